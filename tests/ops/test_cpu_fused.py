"""Norms, rotation and gating of the CPU extension: the reference's values, independent of other rows."""

from __future__ import annotations

import pytest
import torch

from weft.ops import torch_ops
from weft.ops.cpu import fused as ops
from weft.ops.registry import choose

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("extension")
DTYPES = (torch.bfloat16, torch.float32)
SIZES = (1, 16, 20, 64, 100, 768)
#: (heads, kv heads, dim, rotated, norms)
HEADS = ((12, 4, 64, 64, True), (4, 4, 80, 32, False), (8, 1, 20, 12, True), (2, 2, 256, 256, True))


def close(made: Tensor, wanted: Tensor) -> bool:
    """Return True if values differ by at most a bf16 unit (a few float32 units) of the largest value nearby
    (up to 16).

    Sums have another order, so a norm may round differently before the rotation.
    """
    size = 2.0**-7 if made.dtype == torch.bfloat16 else 2.0**-20
    wide = wanted.double()
    near = wide.abs().clamp(max=16).amax(-1, keepdim=True) if wide.numel() else wide
    return bool(((made.double() - wide).abs() <= size * torch.maximum(wide.abs(), near / 4) + 1e-6).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("tokens", [0, 1, 5, 300])
def test_norms(dtype: torch.dtype, size: int, tokens: int) -> None:
    torch.manual_seed(0)
    x, delta, weight = (torch.randn(n, size).to(dtype) for n in (tokens, tokens, 1))
    stream, normed = torch_ops.add_rms_norm(x, delta, weight[0], 1e-6)
    made_stream, made = ops.add_rms_norm(x.clone(), delta, weight[0], 1e-6)
    assert torch.equal(made_stream, stream)
    assert close(made, normed)
    assert torch.equal(ops.rms_norm(stream, weight[0], 1e-6), made)
    kept, same = ops.add_rms_norm(stream, None, weight[0], 1e-6)
    assert kept is stream
    assert torch.equal(same, made)
    for t in range(min(tokens, 5)):
        assert torch.equal(
            ops.add_rms_norm(x[t : t + 1].clone(), delta[t : t + 1], weight[0], 1e-6)[1], made[t : t + 1]
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotated", "norms"), HEADS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 200])
def test_rotation_and_cache(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, rotated: int, norms: bool, tokens: int
) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.randn(tokens, rotated // 2)
    cos, sin = angles.cos(), angles.sin()
    q_weight, k_weight = torch.randn(2, dim).to(dtype) if norms else (None, None)
    block = 16
    cache = torch.full((tokens // block + 2, 2, kv_heads, block, dim), 7.0, dtype=dtype)
    writes = torch.randperm(cache.shape[0] * block)[:tokens]
    wanted_cache = cache.clone()
    columns = (heads, kv_heads, q_weight, k_weight, 1e-6)
    wanted = torch_ops.qkv_rope_cache(qkv, *columns, cos, sin, wanted_cache, writes)
    made_cache = cache.clone()
    made = ops.qkv_rope_cache(qkv, *columns, cos, sin, made_cache, writes)
    assert made.shape == (tokens, heads, dim)
    assert close(made, wanted)
    assert close(made_cache, wanted_cache)
    for t in range(min(tokens, 4)):
        one = slice(t, t + 1)
        alone_cache = cache.clone()
        alone = ops.qkv_rope_cache(qkv[one], *columns, cos[one], sin[one], alone_cache, writes[one])
        assert torch.equal(alone, made[one])
        place, offset = int(writes[t]) // block, int(writes[t]) % block
        assert torch.equal(alone_cache[place, :, :, offset], made_cache[place, :, :, offset])


def test_places_outside_the_cache_are_refused() -> None:
    cache = torch.zeros(2, 2, 1, 4, 16)
    with pytest.raises(RuntimeError, match="token 0 goes to 8 of 8"):
        ops.qkv_rope_cache(
            torch.zeros(1, 48),
            1,
            1,
            None,
            None,
            1e-6,
            torch.ones(1, 8),
            torch.zeros(1, 8),
            cache,
            torch.tensor([8]),
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
@pytest.mark.parametrize("size", SIZES)
def test_gating(dtype: torch.dtype, activation: str, size: int) -> None:
    torch.manual_seed(0)
    x = (torch.randn(40, 2 * size) * 8).to(dtype)
    x[0, 0], x[1, 0] = -300.0, 300.0
    made = ops.gated(x, activation)
    # In float64: torch's own float32 GELU loses digits where 1 + erf cancels.
    assert close(made, torch_ops.gated(x.double(), activation).to(dtype))
    for t in range(3):
        assert torch.equal(ops.gated(x[t : t + 1], activation), made[t : t + 1])


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 64).bfloat16()
    x[1, 5] = float("nan")
    assert ops.rms_norm(x, torch.ones(64).bfloat16(), 1e-6).isnan().any(-1).tolist() == [False, True, False]
    assert ops.gated(x, "silu").isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "qkv_rope_cache", "gated"])
def test_they_are_chosen_where_they_serve(op: str) -> None:
    cpu = torch.device("cpu")
    assert choose(op, torch.bfloat16, cpu, invariant=True).run is getattr(ops, op)
    assert choose(op, torch.float64, cpu).name == "torch"
