"""Tensor parallelism: ranks together compute the result of a single rank, from slices of the checkpoint."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.support.declared_models import CASES as DECLARED
from tests.support.ranks import on_ranks
from tests.support.sharded import assert_parts, note_reads, weights_of
from tests.support.slow import mostly_slow
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config import sharding
from weft.config.families import load_spec
from weft.layers.build import Build
from weft.layers.dense import LMHead, TokenEmbedding
from weft.layers.pending_codes import Weight, take_codes
from weft.layers.shard import Shard, cut
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.models.quantized.filling import hold_rounded
from weft.models.registry import WEIGHTS
from weft.ops import cpu
from weft.ops.coded import dequantize, row_group, to_exact_int4, to_int4, to_w4a8
from weft.ops.torch_ops import to_int8_codes
from weft.parallel.comm import drive, reduced
from weft.parallel.mesh import Mesh
from weft.runner.graphs.graphs import obstacle
from weft.types.layout import Layout

CPU = torch.device("cpu")
CLOSE = 1e-12
"""Tolerance relative to the largest logit, in float64: sums have another order."""

#: Distinct features of each shape, with 2 ranks. All other cases, and 4 ranks, are in the grid.
DEFAULT = (
    "llama-biases-head-dim",
    "llama-mqa-gelu",
    "qwen3-bias-window",
    "qwen3-moe",
    "deepseek-v3",
    "deepseek-v3-full-queries-bias",
    "qwen3-next",
    "kimi-linear",
    "gpt-oss",
    "deepseek-v4",
    "deepseek-v32",
    "lfm2-moe",
    "nemotron-h-moe",
    "olmo3",
)
GRID = (
    *(name for name in DECLARED if name != "olmo3"),
    "llama",
    "llama-tied-mha",
    "qwen2-mixed-window",
    "qwen3",
    "qwen3-moe-sparse-step",
    "mixtral",
    "deepseek-v2-groups-yarn",
    "deepseek-v3-dense-halves",
    "qwen3-5",
    "qwen3-5-moe",
    "qwen3-next-dense",
    "gpt-oss-clamped",
    "gpt-oss-full-tied",
    "deepseek-v4-odd",
    "deepseek-v4-window",
    "glm-dsa",
    "lfm2",
    "lfm2-bias-taps",
    "lfm2-moe-plain-scores",
    "nemotron-h-dense",
    "nemotron-h-latent",
    "bamba",
    "bamba-groups-bias",
    "falcon-h1",
    "falcon-h1-norm",
    "granite-hybrid",
    "granite-hybrid-dense",
    "bailing-hybrid",
    "mamba2",
    "mamba2-bias",
    "mamba",
    "mamba-odd",
    "falcon-mamba",
    "jamba",
    "jamba-dense",
    "olmo-hybrid",
    "olmo-hybrid-rope",
)


def _run(model: Model, paged: Any) -> Tensor:
    """Mixed steps over two sequences: a prompt in chunks, rows of several tokens, one taken back."""
    harness = paged(model)
    first = harness.sequence([(7 * i + 3) % 90 for i in range(19)])
    second = harness.sequence([(11 * i + 1) % 90 for i in range(14)])
    harness.step([(first, 6)])
    harness.step([(second, 9), (first, 7)])
    harness.step([(second, 1)], [(first, 3)])
    harness.reject(first, 1)
    for _ in range(3):
        harness.step([], [(second, 1), (first, 1)])
    return torch.stack([*first.logits, *second.logits])


def _assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= CLOSE * expected.abs().max()


def _divides(checkpoint: Any, ranks: int) -> bool:
    try:
        sharding.check(load_spec(checkpoint.folder, None), Layout(tensor=ranks))
    except ConfigError:
        return False
    return True


@pytest.mark.requirement("A9")
@pytest.mark.parametrize(
    ("name", "ranks"),
    [(name, 2) for name in DEFAULT]
    + [("llama-mqa-gelu", 4)]
    + [pytest.param(name, 2, marks=pytest.mark.grid) for name in GRID]
    + [pytest.param(name, 4, marks=pytest.mark.grid) for name in (*DEFAULT[:1], *DEFAULT[2:], *GRID)],
)
def test_logits_are_those_of_one_rank(name: str, ranks: int, checkpoints: Any, paged: Any) -> None:
    checkpoint = checkpoints(name)
    if not _divides(checkpoint, ranks):
        pytest.skip(f"{name} does not divide by {ranks}")
    expected = _run(checkpoint.load(torch.float64), paged)
    found = on_ranks(
        Layout(tensor=ranks), lambda mesh: _run(checkpoint.load(torch.float64, mesh=mesh), paged)
    )
    for one in found[1:]:
        assert torch.equal(one, found[0]), "ranks have other bits"
    _assert_close(found[0], expected)


def _file(checkpoint: Any) -> dict[str, Tensor]:
    return load_file(Path(checkpoint.folder) / "model.safetensors")


@pytest.mark.parametrize("name", ["llama-biases-head-dim", "deepseek-v3", "qwen3-5", "qwen3-next", "mixtral"])
def test_each_rank_reads_its_slices_alone(
    name: str, checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank reads only its part of divided tensors."""
    checkpoint = checkpoints(name)
    spec = load_spec(checkpoint.folder, None)
    read = note_reads(monkeypatch)

    def work(mesh: Mesh) -> tuple[dict[str, int], Model]:
        model = load_model(checkpoint.folder, spec, torch.float32, CPU, progress=False, mesh=mesh, pack=False)
        return read[threading.get_ident()], model

    whole = {name: values.nbytes for name, values in _file(checkpoint).items()}
    ranks = on_ranks(Layout(tensor=2), work)
    placements = WEIGHTS.get(spec.family)(spec).published_as(list(whole)).placements
    weights = weights_of(ranks[0][1])
    divided = 0
    for name, size in whole.items():
        place = placements[name]
        each = [found[name] for found, _ in ranks]
        if weights[place.parameter].note.shard is None or "kv_a_proj" in name:
            assert each == [size, size], name
        elif "embed" in name or "lm_head" in name:  # 131 rows
            assert sum(each) == size
            assert max(each) - min(each) == size // 131
        else:
            assert each == [size // 2, size // 2], name
            divided += size
    assert divided > sum(whole.values()) / 3


@pytest.mark.parametrize(
    "name", ["qwen3-5-moe", "gpt-oss-full-tied", "deepseek-v4", "deepseek-v32", "qwen3-moe"]
)
@pytest.mark.parametrize("dummy", [False, True])
def test_parts_make_up_the_whole(name: str, dummy: bool, checkpoints: Any) -> None:
    """Parameters of ranks are cuts of a single rank's parameters, loaded or random."""
    checkpoint = checkpoints(name)
    load_format = "dummy" if dummy else "auto"

    def load(mesh: Mesh | None = None) -> dict[str, Weight]:
        return weights_of(checkpoint.load(mesh=mesh, pack=False, load_format=load_format, seed=3))

    assert_parts(load(), on_ranks(Layout(tensor=2), load))


def test_float32_as_it_is_served(checkpoints: Any, paged: Any) -> None:
    """Runs the operators of this machine in their own layouts."""
    for name in ("qwen3-moe", "deepseek-v3-sixteens", "qwen3-next"):
        checkpoint = checkpoints(name)
        expected = _run(checkpoint.load(), paged)
        found = on_ranks(Layout(tensor=2), lambda mesh, c=checkpoint: _run(c.load(mesh=mesh), paged))
        assert torch.equal(*found)
        assert (found[0] - expected).abs().max() <= 1e-4 * expected.abs().max()


@mostly_slow("quantization", ["int8", "w8a8", "int4", "w4a8", "fp8"], ["w8a8", "int4"])
def test_ranks_round_as_one_does(quantization: str, checkpoints: Any, paged: Any) -> None:
    """Covers weights whose groups are cut, and the rounding of activations."""
    for name in ("llama-tied-mha", "qwen3-5-moe", "deepseek-v4"):
        checkpoint = checkpoints(name)
        expected = _run(checkpoint.load(torch.float64, quantization=quantization), paged)
        found = on_ranks(
            Layout(tensor=2),
            lambda mesh, c=checkpoint: _run(
                c.load(torch.float64, mesh=mesh, quantization=quantization), paged
            ),
        )
        assert torch.equal(*found)
        _assert_close(found[0], expected)


@pytest.mark.parametrize("load_format", ["partial", "dummy"])
def test_ranks_round_what_is_made_up(load_format: str, checkpoints: Any, paged: Any) -> None:
    """Random weights are rounded as on one rank, and loaded weights replace them."""
    more = {"quantization": "int4", "load_format": load_format}
    expected = _run(checkpoints("mixtral").load(torch.float64, **more), paged)
    found = on_ranks(
        Layout(tensor=2),
        lambda mesh: _run(checkpoints("mixtral").load(torch.float64, mesh=mesh, **more), paged),
    )
    _assert_close(found[0], expected)


@pytest.mark.parametrize("inputs", [256, 512, 1408, 2816, 192])
def test_rows_are_rounded_alike_on_any_number_of_ranks(inputs: int) -> None:
    """Two ranks that divide ``inputs`` round like a single rank."""
    build = Build(dtype=torch.float32, device=CPU, quantization="w4a8")
    group = row_group("w4a8", inputs)
    assert group == (0 if inputs % 256 else 64)
    assert build.matrix_op("linear", divided=inputs) is build.op(
        "linear_w4a8" if group else "linear_int4-exact"
    )
    half = Shard(((0, inputs // 2),), inputs, 1)
    rounding = build.notes.weight(build.matrix(8, inputs // 2, shard=half)).note.rounds
    assert rounding is (to_w4a8 if group else to_exact_int4)


@pytest.mark.parametrize(("inputs", "group"), [(1024, 128), (3072, 128), (512, 64), (768, 64), (1408, 0)])
def test_divided_rows_in_8_bits_have_steps_of_groups(inputs: int, group: int) -> None:
    """With w8a8, two and four ranks round rows of x to the codes and steps of one rank."""
    assert row_group("w8a8", inputs) == group
    build = Build(dtype=torch.float32, device=CPU, quantization="w8a8")
    op = build.op(f"linear_w8a8-{group}" if group else "linear_int8-exact")
    assert build.matrix_op("linear", divided=inputs) is op
    x, weight = torch.randn(5, inputs), torch.randn(7, inputs)
    largest = weight.abs().amax(dim=1, keepdim=True)
    assert op.pack is not None
    whole = op.run(x, op.pack(weight, largest), None)
    for ranks in (2, 4):
        parts = zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
        total = sum(op.run(rows, op.pack(part.contiguous(), largest), None) for rows, part in parts)
        assert (total - whole).abs().max() <= 1e-6 * whole.abs().max()


@pytest.mark.parametrize(("inputs", "group"), [(256, 64), (192, 32), (200, 4), (66, 0)])
def test_what_ranks_cut_is_rounded_whole(
    inputs: int, group: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut groups become smaller groups. If none fit, a rank rounds by itself and logs a message."""
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    build = Build(dtype=torch.float64, device=CPU, quantization="int4")
    half = Shard(((0, inputs // 2),), inputs, 1)
    values = torch.randn(8, inputs, dtype=torch.float64)
    weight = build.notes.weight(build.matrix(8, inputs // 2, shard=half))
    assert hold_rounded(weight, (), values) == (group > 0)
    codes = take_codes(weight)
    if not group:
        assert codes is None
        assert "each rank quantizes its part alone" in caplog.text
        return
    assert codes is not None
    assert codes.group == group
    whole = dequantize(to_int4(values), torch.float64)
    assert torch.equal(dequantize(codes, torch.float64), whole[:, : inputs // 2])
    hold_rounded(weight, (), 2 * values)
    hold_rounded(weight, (), values)  # replaces the earlier values
    again = take_codes(weight)
    assert again is not None
    assert torch.equal(dequantize(again, torch.float64), whole[:, : inputs // 2])


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_ranks_know_the_largest_of_whole_rows(load_format: str, checkpoints: Any) -> None:
    """Ranks with divided rows know the row maximum, the base of 8-bit scales."""
    more = {"pack": False, "quantization": "int8", "load_format": load_format}
    whole = dict(checkpoints("mixtral").load(**more).named_parameters())
    parts = on_ranks(
        Layout(tensor=2), lambda mesh: weights_of(checkpoints("mixtral").load(mesh=mesh, **more))
    )
    for own in parts:
        noted = {name: weight.note.largest for name, weight in own.items()}
        of_rows = {name: largest for name, largest in noted.items() if largest is not None}
        assert {name.split(".", 2)[2] for name in of_rows} == {
            "attention.out.weight",
            "feed_forward.experts.down",
        }
        for name, largest in of_rows.items():
            assert torch.equal(largest, whole[name].abs().amax(-1, keepdim=True))


def test_a_vocabulary_smaller_than_its_shares() -> None:
    """Ranks without a part of the vocabulary contribute zero to the embedding, and all logits are present."""
    table = torch.randn(5, 3, dtype=torch.float64)
    ids = torch.tensor([4, 0, 2, 2, 1, 3])

    def work(mesh: Mesh) -> tuple[Tensor, Tensor]:
        build = Build(dtype=torch.float64, device=CPU, mesh=mesh)
        embedding = TokenEmbedding(5, 3, build, tied=True)
        head = LMHead(embedding, build, tied=True)
        embedding.weight.data[: embedding.shard.count] = cut(table, embedding.shard)
        embedding.pack()
        head.pack()
        return drive(reduced(build.comm, embedding(ids))), drive(head.steps(table))

    for embedded, logits in on_ranks(Layout(tensor=4), work):
        assert torch.equal(embedded, table[ids])
        assert torch.allclose(logits, table @ table.T, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["int8", "w8a8", "int4", "w4a8", "fp8"])
def test_heads_of_rounded_models_have_8_bits(quantization: str, tied: bool, dtype: torch.dtype) -> None:
    """The head has 8 bits on any number of ranks; only a table tied to the head is rounded too."""
    table, x = torch.randn(37, 48, dtype=dtype), torch.randn(6, 48, dtype=dtype)
    rounded = to_int8_codes(table)
    meant = dequantize(rounded, torch.float64)
    assert (meant - table.double()).abs().amax() <= 0.51 * rounded.scales.amax()
    ids = torch.arange(37)

    def work(mesh: Mesh) -> tuple[Tensor, Tensor]:
        build = Build(dtype=dtype, device=CPU, mesh=mesh, quantization=quantization)
        embedding = TokenEmbedding(37, 48, build, tied=tied)
        head = LMHead(embedding, build, tied=tied)
        for weight in (embedding.weight, head.weight):
            if weight is not None:
                weight.data.zero_()[: embedding.shard.count] = cut(table, embedding.shard)
        embedding.pack()
        head.pack()
        return drive(reduced(build.comm, embedding(ids))), drive(head.steps(x))

    found = [made for ranks in (1, 2, 3) for made in on_ranks(Layout(tensor=ranks), work)]
    slack = 1e-12 if dtype == torch.float64 else 1e-6 if dtype == torch.float32 else 2.0**-8
    for embedded, logits in found:
        assert torch.equal(embedded, meant.to(dtype) if tied else table)
        wanted = x.double() @ meant.T
        assert (logits.double() - wanted).abs().max() <= slack * (x.double().abs() @ meant.abs().T).max()


@pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")
def test_which_steps_that_meet_are_captured(checkpoints: Any) -> None:
    """On a CPU all such steps are captured; on a GPU those with NCCL."""

    def why(mesh: Mesh) -> str | None:
        model = checkpoints("deepseek-v3-sixteens").load(mesh=mesh)
        assert model.capturable(1)
        return obstacle(model, choose("cpu", model.spec, torch.float32, CPU, 16))

    checkpoints("deepseek-v3-sixteens")
    assert on_ranks(Layout(tensor=2), why) == [None, None]
    assert on_ranks(Layout(tensor=2, data=2), why) == [None] * 4
    shared = Layout(data=2, expert=True)
    assert on_ranks(shared, why) == [None, None]

    def why_on_a_gpu(mesh: Mesh) -> str | None:
        model = checkpoints("deepseek-v3-sixteens").load(mesh=mesh)
        model.device = torch.device("cuda")
        assert not model.capturable(1)
        model.mesh = replace(mesh, nccl=True)
        assert model.capturable(1)
        return obstacle(model, choose("cpu", model.spec, torch.float32, CPU, 16))

    assert on_ranks(shared, why_on_a_gpu) == [None, None]
