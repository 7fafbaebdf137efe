"""Norm, rotary embedding, feed-forward: values, precision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts
from weft.config.families.rope_settings import rope_spec
from weft.config.spec import RopeSpec
from weft.layers.build import Build
from weft.layers.dense import RowLinear
from weft.layers.rope import Rope, attention_factor, inverse_frequencies
from weft.layers.shard import Shard, whole
from weft.ops import registry, torch_ops
from weft.parallel.comm import Comm, LocalComm, Pending, reduced
from weft.parallel.mesh import Mesh

CPU = torch.device("cpu")


def _build(dtype: torch.dtype, comm: Comm | None = None) -> Build:
    return Build(dtype=dtype, device=CPU, mesh=Mesh(tp=comm or LocalComm()))


def test_rms_norm_is_exact_in_float64_and_rounds_once_below() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(5, 64, dtype=torch.float64), torch.randn(64, dtype=torch.float64)
    exact = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w
    assert torch.allclose(torch_ops.rms_norm(x, w, 1e-6), exact, rtol=1e-14, atol=0)
    narrow = torch_ops.rms_norm(x.bfloat16(), w.bfloat16(), 1e-6)
    y = x.bfloat16().double()
    once = (y / (y.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * w.bfloat16().double()).bfloat16()
    assert (narrow != once).float().mean() < 0.01


_PARAMETERS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.7,
    },
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 1.0, "original_max_position_embeddings": 131072},
]


@pytest.mark.parametrize("parameters", _PARAMETERS, ids=lambda p: f"{p['rope_type']}-{p.get('factor')}")
@pytest.mark.parametrize("dim", [16, 128])
def test_frequencies_equal_transformers(parameters: dict[str, Any], dim: int) -> None:
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=131072,
        rope_parameters=dict(parameters),
    )
    spec = rope_spec(Facts({"rope_parameters": parameters}), dim, 131072, 10000.0)
    kind = parameters["rope_type"]
    if kind == "default":
        theirs, factor = parameters["rope_theta"] ** -(torch.arange(0, dim, 2) / dim), 1.0
    else:
        theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, CPU)
    assert torch.allclose(inverse_frequencies(spec).float(), theirs, rtol=2e-6, atol=0)
    assert attention_factor(spec) == pytest.approx(factor, rel=1e-12)


def test_dynamic_frequencies_follow_the_position() -> None:
    """Position p is rotated as transformers rotates the last token of a sequence of p + 1 tokens."""
    parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=100, rope_parameters=dict(parameters)
    )
    spec = rope_spec(Facts({"rope_parameters": parameters}), 16, 100, 10000.0)
    positions = torch.tensor([0, 42, 99, 100, 150, 399])
    cos, sin = Rope(spec, _build(torch.float64)).angles(positions)
    for row, p in enumerate(positions.tolist()):
        theirs, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, CPU, seq_len=p + 1)
        assert torch.allclose(cos[row].float(), (p * theirs).cos(), atol=2e-4)
        assert torch.allclose(sin[row].float(), (p * theirs).sin(), atol=2e-4)
    early = Rope(RopeSpec(dim=16), _build(torch.float64)).angles(positions[:3])
    assert torch.equal(cos[:3], early[0])


def test_angles_keep_the_wide_type() -> None:
    """float64 models get float64 angles; all others float32 ones, also where weights are narrower."""
    positions = torch.tensor([0, 1, 100_000])
    for dtype, wide in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        cos, sin = Rope(RopeSpec(dim=8), _build(dtype)).angles(positions)
        assert cos.dtype == sin.dtype == wide
    exact = 100_000 * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    cos, _ = Rope(RopeSpec(dim=8), _build(torch.float64)).angles(positions)
    assert torch.allclose(cos[2], exact.cos(), atol=1e-9)


def test_rotation_preserves_length_and_depends_on_distance() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    rope = Rope(RopeSpec(dim=8), _build(torch.float64))
    scores = []
    for p in (0, 5, 77):
        cos, sin = rope.angles(torch.tensor([p + 3, p]))
        scores.append((torch_ops.rotate(q, cos[:1], sin[:1]) * torch_ops.rotate(k, cos[1:], sin[1:])).sum())
    assert torch.allclose(torch.stack(scores), scores[0].expand(3), rtol=1e-12)
    cos, sin = rope.angles(torch.tensor([9]))
    assert torch_ops.rotate(q, cos, sin).norm().item() == pytest.approx(q.norm().item(), rel=1e-12)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations_equal_transformers(name: str) -> None:
    x = torch.linspace(-4, 4, 40).view(2, 20)
    gate, up = x.chunk(2, -1)
    expected = transformers.activations.ACT2FN[name](gate) * up
    assert torch.allclose(torch_ops.gated(x, name), expected, atol=1e-6)


def test_ops_are_chosen_by_capability() -> None:
    assert registry.choose("rms_norm", torch.bfloat16, CPU, invariant=True).name in ("torch", "cpu")
    assert registry.choose("moe", torch.float64, CPU).name == "torch"
    assert registry.choose("moe", torch.float64, CPU, invariant=True).name == "torch_tiled"
    with pytest.raises(ConfigError, match=r"no implementation of rms_norm for int8 on cpu"):
        registry.choose("rms_norm", torch.int8, CPU)
    with pytest.raises(ValueError, match="already"):
        registry.register("rms_norm", registry.Implementation(name="torch", run=torch_ops.rms_norm))


class _Sum(Pending):
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def result(self) -> torch.Tensor:
        return self._tensor * 2


class _Twice(Comm):
    """Two ranks that always have equal partial sums."""

    rank = 1
    size = 2

    def all_reduce(self, partial: torch.Tensor) -> Pending:
        return _Sum(partial)

    def all_gather(self, x: torch.Tensor) -> Pending:
        raise NotImplementedError

    def reduce_scatter(self, x: torch.Tensor) -> Pending:
        raise NotImplementedError

    def all_to_all(
        self, x: torch.Tensor, sends: Sequence[int], receives: Sequence[int], even: bool = False
    ) -> Pending:
        raise NotImplementedError


def test_row_linear_returns_a_partial_and_ranks_yield_once() -> None:
    x = torch.randn(2, 4, dtype=torch.float64)
    for inputs, times in ((Shard(((0, 4),), 8), 1.0), (whole(4), 0.0)):
        here = RowLinear(inputs, 3, _build(torch.float64), bias=True)
        here.weight.data.normal_()
        assert here.bias is not None
        here.bias.data.normal_()
        there = RowLinear(inputs, 3, _build(torch.float64, _Twice()), bias=True)
        there.load_state_dict(here.state_dict())
        here.pack()
        there.pack()
        # Only the first rank adds the bias, unless every rank has all inputs.
        assert torch.allclose(here(x) - there(x), times * here.bias.expand(2, 3))
    steps = reduced(_Twice(), x)
    assert torch.equal(next(steps).result(), 2 * x)
    with pytest.raises(StopIteration) as end:
        next(steps)
    assert torch.equal(end.value.value, 2 * x)
    assert list(reduced(LocalComm(), x)) == []
