"""Quantized checkpoints with packed matrices: the logits of the dequantized model, in less memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_quantized_loading import (
    FORMATS,
    _folders,
    deepseek_v4_folders,
    gpt_oss_folders,
    plain,
)
from tests.support import quantized as make
from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from weft.config.families import load_spec
from weft.models.files import WeightFile
from weft.models.loader import load_model
from weft.models.quantized.filling import FillTarget
from weft.models.quantized.sources import TensorSource
from weft.ops import coded
from weft.ops.coded import Codes
from weft.ops.cpu.linear import PackedMatrix
from weft.ops.cpu.moe import Packed as RoutedPacked
from weft.parallel.mesh import make_mesh
from weft.types.layout import Layout

__all__ = ["plain"]

Tensor = torch.Tensor
CPU = torch.device("cpu")
#: Formats whose matrices all stay packed here; q, k and v of the others have different orders of inputs.
PARTLY = ("fp8 mixed", "gptq", "autoround as gptq")
"""Formats in which some matrices stay plain."""
WHOLE = [name for name in FORMATS if name not in PARTLY]


def load(folder: Path, dtype: torch.dtype, **more: Any) -> Any:
    return load_model(str(folder), load_spec(str(folder)), dtype, CPU, progress=False, **more)


def logits(model: Any, paged: Any) -> Tensor:
    """Return the logits of a chunked prompt and some decode steps, for two sequences."""
    harness = paged(model)
    first = harness.sequence([(7 * i + 3) % 90 for i in range(19)])
    second = harness.sequence([(11 * i + 1) % 90 for i in range(14)])
    harness.step([(first, 6)])
    harness.step([(second, 9), (first, 7)])
    for _ in range(3):
        harness.step([], [(second, 1), (first, 1)])
    return torch.stack([*first.logits, *second.logits])


def tensors_of(model: Any) -> Iterator[Tensor]:
    """Yield all tensors that layers compute with."""
    for module in model.modules():
        for value in (*vars(module).values(), *module.parameters(recurse=False)):
            if isinstance(value, PackedMatrix):
                value = [value.data, value.scales, value.order]
            elif isinstance(value, Codes):
                value = value.tensors()
            elif isinstance(value, RoutedPacked):
                value = list(value.tensors)
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, Tensor):
                    yield one


def held(model: Any) -> int:
    """Bytes of a model's weights."""
    each = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors_of(model)}
    return sum(each.values())


@mostly_slow("name", list(FORMATS), ["fp8 blocks", "nvfp4", "packed 4 bits", "awq", "gptq"])
def test_logits_are_those_of_the_dequantized(name: str, plain: Path, tmp_path: Path, paged: Any) -> None:
    """The float64 difference on torch is the order of scales; in C++ it is the rounding of sums."""
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 2e-5), (torch.bfloat16, 0.01)):
        wanted = logits(load(packed, dtype, packed=False), paged).double()
        found = logits(load(packed, dtype), paged).double()
        missed = (found - wanted).abs()  # in bf16 a router may choose another expert at a near tie
        worst = missed.mean() if dtype == torch.bfloat16 else missed.max()
        assert worst <= most * wanted.abs().max(), dtype


@pytest.mark.parametrize("name", WHOLE)
def test_matrices_are_held_as_codes(name: str, plain: Path, tmp_path: Path, extension: None) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    for dtype in (torch.bfloat16, torch.float64):
        model = load(packed, dtype)
        layers = [m for m in model.modules() if "_packed" in vars(m) and m is not model.head]
        assert len(layers) == 7
        for layer in layers:
            made = layer._packed
            if isinstance(made, PackedMatrix):
                assert made.coding is not None
            elif not isinstance(made, torch.ScriptObject | RoutedPacked):
                matrix = made if isinstance(made, Codes) else made.gate_up
                assert isinstance(matrix, Codes)


LARGE = {
    "awq": (lambda name, w: make.awq(tuple(w.shape), 128, seed=1), FORMATS["awq"][1]),
    "gptq": (lambda name, w: make.gptq(tuple(w.shape), 4, 128, seed=1), FORMATS["gptq"][1]),
    "packed 4 bits": (lambda name, w: make.packed(tuple(w.shape), 4, 128), FORMATS["packed 4 bits"][1]),
    "fp8 blocks": (
        lambda name, w: make.fp8(w, "block", block=(128, 128)),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "mxfp4": (
        lambda name, w: _mxfp4(w),
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
    ),
    "nvfp4": FORMATS["nvfp4"],
}


def _mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    values, scales, meant = make.mxfp4(weight)
    return {"weight_packed": values, "weight_scale": scales}, meant


@mostly_slow("name", list(LARGE), ["mxfp4", "nvfp4"])
def test_memory_is_that_of_the_file(name: str, large: Path, tmp_path: Path, extension: None) -> None:
    """Tensors of layers have at most 15% more bytes than the quantized part of the file."""
    packed, _ = _folders(large, tmp_path, *LARGE[name])
    file = load_file(packed / "model.safetensors")
    size = sum(
        tensor.nbytes // (2 if tensor.dtype == torch.float32 and "proj" not in part else 1)
        for part, tensor in file.items()
    )
    model = load(packed, torch.bfloat16)
    assert held(model) <= 1.15 * size
    dequantized = held(load(packed, torch.bfloat16, packed=False))
    assert dequantized > 1.6 * size
    codes = load(packed, torch.float64)
    assert held(codes) <= 1.15 * size + 3 * sum(t.nbytes // 2 for n, t in file.items() if "proj" not in n)


@pytest.mark.parametrize("name", ["awq", "packed 8 bits", "nvfp4", "fp8 blocks", "fp8 per channel"])
def test_ranks_have_their_columns(
    name: str, plain: Path, tmp_path: Path, paged: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """With two ranks, cut groups become smaller groups."""
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    wanted = logits(load(packed, torch.float64, packed=False), paged)
    found = on_ranks(Layout(tensor=2), lambda mesh: logits(load(packed, torch.float64, mesh=mesh), paged))
    for one in found:
        assert (one - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def test_a_cut_group_becomes_smaller_ones(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 48 of 96 inputs in groups of 32 everything stays packed. Where groups of 2 would result, it does
    not.
    """
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    packed, _ = _folders(plain, tmp_path, *FORMATS["awq"])
    mesh = make_mesh(Layout(tensor=2), 1)  # not connected: loading needs no other rank
    with caplog.at_level(logging.INFO, "weft"):
        model = load(packed, torch.float64, mesh=mesh)
    assert not [record for record in caplog.records if "cuts groups" in record.getMessage()]
    down = model.blocks[1].feed_forward.down._packed
    assert isinstance(down, Codes)
    assert (down.inputs, down.group) == (48, 16)
    monkeypatch.setattr(coded, "LEAST_GROUP", 32)
    with caplog.at_level(logging.INFO, "weft"):
        model = load(packed, torch.float64, mesh=mesh)
    assert [record for record in caplog.records if "cuts groups" in record.getMessage()]
    assert not isinstance(model.blocks[1].feed_forward.down._packed, Codes)


def test_experts_divided_whole(plain: Path, tmp_path: Path, paged: Any) -> None:
    packed, _ = _folders(plain, tmp_path, *FORMATS["nvfp4"])
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 2e-5)):
        wanted = logits(load(packed, dtype, packed=False), paged)
        layout = Layout(tensor=2, expert=True)
        found = on_ranks(layout, lambda mesh, dtype=dtype: logits(load(packed, dtype, mesh=mesh), paged))
        for one in found:
            assert (one - wanted).abs().max() <= most * wanted.abs().max()


def test_a_stack_is_codes_or_values_and_never_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unsound expert makes the whole stack dequantized: no codes of the other experts remain."""
    gpt_oss_folders(tmp_path)
    file = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.experts.gate_up_proj_scales"][2, 0, 0] = 255  # not a number
    save_file(tensors, file)
    experts: dict[str, list[int]] = {}
    fill = FillTarget.fill

    def watched(self: FillTarget, source: TensorSource, file: WeightFile) -> None:
        fill(self, source, file)
        held = self.parameters[self.weights.placements[source.name].parameter].note.held
        if held is not None and "experts" in source.name:
            experts[source.name] = list(held.pieces)

    monkeypatch.setattr(FillTarget, "fill", watched)
    load(tmp_path / "packed", torch.bfloat16)
    layers = "model.layers.{}.mlp.experts.{}"
    assert experts == {
        layers.format(0, "gate_up_proj"): [0, 1, 2],
        layers.format(0, "down_proj"): [0, 1, 2],
        layers.format(1, "gate_up_proj"): [],
        layers.format(1, "down_proj"): [0, 1, 2],
    }


@pytest.mark.parametrize("folders", [gpt_oss_folders, deepseek_v4_folders])
def test_families_that_publish_four_bits(folders: Any, tmp_path: Path, paged: Any) -> None:
    """Stacked blocks of [experts, outputs, inputs] with gate and up rows in turn; experts one by one beside
    FP8 blocks."""
    folders(tmp_path)
    wanted = logits(load(tmp_path / "packed", torch.float64, packed=False), paged)
    model = load(tmp_path / "packed", torch.float64)
    assert sum(isinstance(t, Codes) for m in model.modules() for t in _fields(m)) >= 4
    assert (logits(model, paged) - wanted).abs().max() <= 1e-12 * wanted.abs().max()
    found = logits(load(tmp_path / "packed", torch.float32), paged).double()
    assert (found - wanted).abs().mean() <= 1e-5 * wanted.abs().max()
    for expert in (False, True):
        layout = Layout(tensor=2, expert=expert)
        for one in on_ranks(
            layout, lambda mesh: logits(load(tmp_path / "packed", torch.float64, mesh=mesh), paged)
        ):
            assert (one - wanted).abs().max() <= 1e-12 * wanted.abs().max()


def _fields(module: Any) -> list[Any]:
    made = list(vars(module).values())
    packed = vars(module).get("_packed")
    return [*made, *(getattr(packed, name, None) for name in ("gate_up", "down", "shared_gate_up"))]


@pytest.mark.parametrize("name", ["awq", "nvfp4", "fp8 blocks"])
def test_company_changes_no_bit(name: str, plain: Path, tmp_path: Path, paged: Any, extension: None) -> None:
    """A sequence in one chunk alone, and in other chunks beside another one."""
    packed, _ = _folders(plain, tmp_path, *FORMATS[name])
    model = load(packed, torch.bfloat16)
    tokens = [(7 * i + 3) % 90 for i in range(40)]
    alone = paged(model)
    first = alone.sequence(tokens)
    alone.step([(first, 30)])
    for _ in range(4):
        alone.step([], [(first, 1)])
    together = paged(model)
    again = together.sequence(tokens)
    other = together.sequence([(11 * i + 1) % 90 for i in range(60)])
    together.step([(other, 17), (again, 11)])
    together.step([(again, 19)], [(other, 1)])
    for _ in range(4):
        together.step([], [(other, 1), (again, 1)])
    assert torch.equal(torch.stack(first.logits), torch.stack(again.logits))
