"""Memory while loading: no layer's experts and no file stay alive beside the packed result."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from tests.models.test_packed_weights import LARGE, load
from tests.models.test_quantized_loading import _folders
from tests.ops.test_coded import codes_of, meaning
from tests.support.mapped_pages import resident_of
from weft.layers.pending_codes import Note, PendingCodes, Weight, put_codes, take_apart, take_codes
from weft.models import loader
from weft.models.quantized.filling import FillTarget
from weft.ops import cpu, stacks
from weft.ops.coded import Codes
from weft.ops.cpu import linear, moe

EXPERTS, ROWS, INPUTS = 6, 64, 256


def waiting(form: str, pieces: int) -> tuple[Weight, torch.Tensor, Callable[[], int]]:
    """Return (stack of experts in ``pieces`` pieces each, its values, counter of matrices with live
    codes).
    """
    parameter = nn.Parameter(torch.empty(EXPERTS, ROWS, INPUTS), requires_grad=False)
    weight = Weight(parameter, Note(held=PendingCodes(parameter.device)))
    alive: list[list[StorageWeakRef]] = []
    meant = []
    for expert in range(EXPERTS):
        alive.append([])
        for piece in range(pieces):
            rows = ROWS // pieces
            codes = codes_of(form, (rows, INPUTS), seed=expert * pieces + piece)
            put_codes(weight, expert, piece * rows, codes)
            meant.append(meaning(codes))
            alive[-1].append(StorageWeakRef(codes.values.untyped_storage()))

    def count() -> int:
        return sum(any(not ref.expired() for ref in of_one) for of_one in alive)

    return weight, torch.cat(meant).view(EXPERTS, ROWS, INPUTS), count


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("form", ["int4", "fp8", "nvfp4"])
def test_experts_go_as_their_stack_is_filled(form: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """When matrix i is copied, the earlier matrices are freed, also where gate and up are joined."""
    weight, meant, count = waiting(form, pieces)
    assert count() == EXPERTS
    seen: list[int] = []
    take = stacks.Unstacked.take

    def watched(self: stacks.Unstacked, place: int) -> Codes:
        seen.append(count())
        return take(self, place)

    monkeypatch.setattr(stacks.Unstacked, "take", watched)
    found = take_codes(weight)
    assert found is not None
    assert torch.equal(meaning(found), meant)
    # The first until all have memory, and the one before until the next is there.
    assert seen[0] == EXPERTS
    assert all(most <= EXPERTS - place + 2 for place, most in enumerate(seen))
    assert count() == 0


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("form", ["int4", "fp8", "nvfp4"])
def test_experts_go_as_they_are_packed(
    form: str, pieces: int, monkeypatch: pytest.MonkeyPatch, extension: None
) -> None:
    """There is no stack of codes at all."""
    weight, meant, count = waiting(form, pieces)
    found = take_apart(weight)
    assert found is not None
    assert found.shape == meant.shape
    seen: list[int] = []
    pack = linear.code_blocks

    def watched(codes: Codes, *, gated: bool) -> Any:
        if len(codes):
            seen.append(count())
        return pack(codes, gated=gated)

    monkeypatch.setattr(linear, "code_blocks", watched)
    packed, factors, coding = moe._matrix(found, True, "plain")
    assert seen == [EXPERTS - place - (pieces > 1) for place in range(EXPERTS)]
    assert count() == 0
    monkeypatch.setattr(linear, "code_blocks", pack)
    again, _, _ = waiting(form, pieces)
    whole = take_codes(again)
    assert whole is not None
    wanted, other, of_whole = moe._matrix(whole, True, "plain")
    assert packed is not None
    assert wanted is not None
    assert torch.equal(packed, wanted)
    assert coding == of_whole
    assert (factors is None) == (other is None)
    assert factors is None or other is None or torch.equal(factors, other)


def test_experts_leave_no_packed_copies(extension: None) -> None:
    """The memory of packed weights has a single place for the temporary packing of an expert."""
    codes = codes_of("int4", (ROWS, INPUTS))
    kept = linear.pack_codes(codes).data
    parameter, _, _ = waiting("int4", 1)
    packed, _, _ = moe._matrix(take_apart(parameter), False, False)
    after = linear.pack_codes(codes).data
    assert packed.data_ptr() == kept.data_ptr() + kept.nbytes
    assert after.data_ptr() == packed.data_ptr() + packed.nbytes


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("name", ["fp8 blocks", "mxfp4", "nvfp4", "awq", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_pages_of_a_file_go_when_they_were_read(
    name: str | None, dtype: torch.dtype, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages are dropped after a copy of plain weights, and after layers pack mapped codes. In float64 the
    codes stay mapped.
    """
    folder = large if name is None else _folders(large, tmp_path, *LARGE[name])[0]
    path = folder / "model.safetensors"
    seen: list[int] = []
    fill = FillTarget.fill

    def watched(self: FillTarget, *more: Any) -> None:
        seen.append(resident_of(path))
        fill(self, *more)

    monkeypatch.setattr(FillTarget, "fill", watched)
    assert path.stat().st_size > 1 << 19
    load(folder, dtype, pack=False)
    assert len(seen) > 20
    if dtype == torch.bfloat16 and cpu.load():  # torch reads the codes when it computes
        monkeypatch.setattr("weft.layers.build.trim_heap", lambda: seen.append(resident_of(path)))
    model = load(folder, dtype)
    assert max(seen) <= 64 << 10
    del model
    assert resident_of(path) == 0


def test_memory_on_the_way_is_given_back(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The heap is trimmed during reading, and after each layer's packing."""
    given: list[str] = []
    monkeypatch.setattr(loader, "trim_heap", lambda: given.append("reading"))
    monkeypatch.setattr("weft.layers.build.trim_heap", lambda: given.append("packing"))
    monkeypatch.setattr(loader, "_TRIM_ENTRIES", 100_000)
    model = load(large, torch.bfloat16)
    packing = sum(hasattr(module, "pack") for module in model.modules()) - 1
    assert given.count("packing") == packing
    assert given.index("packing") > 5
    assert given[given.index("packing") :] == ["packing"] * packing
