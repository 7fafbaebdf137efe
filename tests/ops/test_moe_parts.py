"""Routed blocks with experts divided over ranks, in C++: parts make the whole, rows are independent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.test_coded import codes_of
from tests.support.routed import KINDS, routed, tokens
from weft.moe.experts import ByPieces
from weft.ops import coded, moe
from weft.ops.cpu import moe as ops
from weft.ops.moe import Routed

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float32)
ROWS = (0, *range(1, 20), 31, 32, 33, 64, 100)


def shares(weights: Routed, ranks: int) -> list[tuple[list[int], Routed]]:
    """Each rank's experts, every ``ranks``-th; one more rank has none."""
    count = weights.router.shape[0]
    mine = [list(range(rank, count, ranks)) for rank in range(ranks)] + [[]]

    def part(of: Tensor | None, experts: list[int]) -> Any:
        return None if of is None else of[experts]

    names = ("gate_up", "down", "gate_up_bias", "down_bias")
    return [
        (experts, replace(weights, **{name: part(getattr(weights, name), experts) for name in names}))
        for experts in mine
    ]


def placed(chosen: Tensor, experts: list[int]) -> Tensor:
    """int64 [T, k]: the places of ``chosen`` among ``experts``; -1 of others."""
    places = torch.full((64,), -1)
    places[experts] = torch.arange(len(experts))
    return places[chosen]


PACKS: dict[str, tuple[Any, Any]] = {
    "int8": ops.pack_int8,
    "w8a8": ops.pack_w8a8,
    "w4a8": ops.pack_w4a8,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "int8", "w8a8", "w4a8"])
def test_parts_make_the_whole(kind: str, dtype: torch.dtype, kernel: str, kept_threads: None) -> None:
    """Separate experts give the block's bits in any order of ranks; sums of ranks are close."""
    weights = routed("corrected" if kind in PACKS else kind, dtype)
    pack = PACKS.get(kind, ops.pack)
    block = pack(weights)
    parts = [(experts, pack(mine)) for experts, mine in shares(weights, 3)]
    router = parts[-1][1]
    for count, number in ((0, 1), (1, 1), (5, 2), (70, 2)):
        torch.set_num_threads(number)
        x, ids = tokens(count, dtype)
        whole = ops.moe(x, ids, block)
        chosen, scales, share = ops.PARTS.route(x, ids, router)
        shared = ops.PARTS.shared(x, share, router)
        for exact in (True, False):
            made = [ops.PARTS.answer(x, placed(chosen, e), scales, one, exact) for e, one in parts]
            assert all(answer.dtype == ops.PARTS.answers(dtype, exact) for answer in made)
            assert not made[-1].any()
            total = sum(answer.float() for answer in reversed(made)).to(made[0].dtype)  # type: ignore[union-attr]
            found = ops.PARTS.finish(total, scales, shared, dtype, exact)
            assert found.shape == whole.shape
            if exact:
                assert torch.equal(found, whole)
            elif count:
                most = 0.02 if dtype == torch.bfloat16 else 1e-5
                assert (found.double() - whole.double()).abs().max() <= most * whole.abs().max().double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_are_torchs(dtype: torch.dtype, extension: None) -> None:
    """A rank's output equals the torch pieces within rounding, and routers choose the same experts."""
    for kind in ("corrected", "biased", "gated_shared", "hashed"):
        weights = routed(kind, dtype)
        x, ids = tokens(40, dtype)
        experts, mine = shares(weights, 3)[1]
        cpp, torchs = ops.PARTS, ByPieces(moe.PLAIN)
        packed = ops.pack(mine)
        made, wanted = cpp.route(x, ids, packed), torchs.route(x, ids, mine)
        assert torch.equal(made[0], wanted[0])
        assert torch.allclose(made[1], wanted[1], rtol=1e-4)
        places = placed(made[0], experts)
        for exact in (True, False):
            one = cpp.answer(x, places, made[1], packed, exact).double()
            other = torchs.answer(x, places, made[1], mine, exact).double()
            most = 0.04 if dtype == torch.bfloat16 else 1e-5
            assert (one - other).abs().max() <= most * other.abs().max()
            assert not one[(places < 0).all(1)].any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_a_row_of_a_part_are_its_own(
    dtype: torch.dtype, exact: bool, kernel: str, kept_threads: None
) -> None:
    weights = routed("corrected", dtype)
    experts, mine = shares(weights, 2)[1]
    packed = ops.pack(mine)
    x, ids = tokens(300, dtype)
    chosen, scales, share = ops.PARTS.route(x, ids, packed)
    places = placed(chosen, experts)
    whole = ops.PARTS.answer(x, places, scales, packed, exact)
    made, _ = ops.PARTS.shared(x, share, packed) or (None, None)
    assert made is not None
    for count in (1, 2):
        torch.set_num_threads(count)
        for rows in ROWS:
            part = slice(rows % 7, rows % 7 + rows)
            own = ops.PARTS.route(x[part], ids[part], packed)
            assert torch.equal(own[0], chosen[part])
            assert torch.equal(own[1], scales[part])
            assert torch.equal(
                ops.PARTS.answer(x[part], places[part], scales[part], packed, exact), whole[part]
            )
            again, _ = ops.PARTS.shared(x[part], share, packed) or (None, None)
            assert torch.equal(again, made[part])


def test_wrong_places_are_refused(extension: None) -> None:
    _, mine = shares(routed("gated_shared", torch.float32), 3)[0]
    packed = ops.pack(mine)
    x, ids = tokens(3, torch.float32)
    _, scales, _ = ops.PARTS.route(x, ids, packed)
    for place in (-2, 6):
        with pytest.raises(IndexError, match=f"place {place} of 6"):
            ops.PARTS.answer(x, torch.full((3, 4), place), scales, packed, False)
    with pytest.raises(RuntimeError, match="places must be"):
        ops.PARTS.answer(x, torch.zeros(3, 5, dtype=torch.int64), scales, packed, False)
    with pytest.raises(RuntimeError, match="6 of 16 experts are here"):
        ops.moe(x, ids, packed)


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4", "mxfp8", "int4 zeros"])
def test_codes_of_experts_move_row_by_row(form: str) -> None:
    """Scales in bytes as well, which torch takes no rows of: experts trade places."""
    weights = routed("plain", torch.float32)
    names = ("gate_up", "down")
    codes = {name: codes_of(form, tuple(getattr(weights, name).shape)) for name in names}
    before = {name: coded.dequantize(one, torch.float32) for name, one in codes.items()}
    for tensor in ByPieces(moe.PLAIN).tensors(replace(weights, **codes)):
        tensor[torch.tensor([0, 3])] = tensor[torch.tensor([3, 0])]
    for name, one in codes.items():
        after = coded.dequantize(one, torch.float32)
        assert torch.equal(after[[0, 3]], before[name][[3, 0]])
        assert torch.equal(after[4:], before[name][4:])
