"""Routed blocks in Triton against the torch reference, independent of other rows.

They run in the interpreter on the CPU, or on a GPU.
"""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.support.routed import KINDS, doubled, routed, tokens
from tests.support.slow import mostly_slow
from weft.ops import moe as torch_moe
from weft.ops import triton as kernels
from weft.ops.moe import Routed
from weft.ops.registry import choose

Tensor = torch.Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READY = importlib.util.find_spec("triton") is not None and (DEVICE.type == "cuda" or kernels.interpreting())
pytestmark = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
#: Form, dtype, error allowed.
TYPES = [("moe_invariant", torch.float32, 1e-5), ("moe", torch.bfloat16, 4e-2)]


def placed(weights: Routed) -> Routed:
    made: dict[str, Any] = {f.name: getattr(weights, f.name) for f in fields(weights)}
    return replace(weights, **{k: v.to(DEVICE) for k, v in made.items() if isinstance(v, Tensor)})


def given(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    x, ids = tokens(count, dtype)
    return x.to(DEVICE), ids.to(DEVICE)


@pytest.mark.parametrize(("form", "dtype", "tolerance"), TYPES)
@mostly_slow("kind", KINDS, [*KINDS][:1])
def test_equals_the_reference(form: str, kind: str, dtype: torch.dtype, tolerance: float) -> None:
    from weft.ops.triton import moe

    weights = placed(routed(kind, dtype))
    run = getattr(moe, form)
    for count in (1, 9):
        x, ids = given(count, dtype)
        wanted = torch_moe.moe(x.double(), ids, doubled(weights))
        made = run(x, ids, weights)
        assert (made.dtype, made.shape) == (dtype, wanted.shape)
        assert (made.double() - wanted).abs().max() <= tolerance * wanted.abs().max()
    assert run(*given(0, dtype), weights).shape == (0, 48)


@pytest.mark.parametrize(("form", "dtype"), [one[:2] for one in TYPES])
@mostly_slow("kind", KINDS, ["gated_shared"])
def test_the_next_norm_adds_the_experts(form: str, kind: str, dtype: torch.dtype) -> None:
    """The stream and the norm have the bits of a sum by a kernel of its own, in rows that are no power of
    two."""
    from weft.ops.triton import fused, moe

    weights = placed(routed(kind, dtype))
    terms = getattr(moe, form.replace("moe", "moe_terms"))
    for count in (1, 9):
        x, ids = given(count, dtype)
        made = terms(x, ids, weights)
        assert torch.equal(made.total(), getattr(moe, form)(x, ids, weights))
        weight = torch.rand(x.shape[1], device=DEVICE).to(dtype)
        stream, normed = fused.add_rms_norm(x.clone(), made, weight, 1e-6)
        expected = fused.add_rms_norm(x.clone(), made.total(), weight, 1e-6)
        assert not torch.equal(stream, x)
        assert torch.equal(stream, expected[0])
        assert torch.equal(normed, expected[1])


@pytest.mark.slow
def test_wide_tiles_equal_narrow_ones() -> None:
    from weft.ops.triton import moe

    weights = placed(routed("biased", torch.float32))
    x, _ = given(20, torch.float32)
    ids = torch.randint(0, 16, (20, 3), device=DEVICE)
    narrow, wide = (moe.by_tiles(x, ids, weights, tile) for tile in moe.TILES_M)
    assert torch.allclose(narrow, wide, atol=1e-5)
    assert torch.allclose(narrow, torch_moe.by_expert(x, ids, weights), atol=1e-5)


@pytest.mark.parametrize("tile_m", [4, 16])
@mostly_slow("count", [1, 2, 9, 60], [9])
def test_tiles_cover_every_slot_once(count: int, tile_m: int) -> None:
    """Covers experts without tokens, experts with whole tiles, and an expert with all tokens."""
    from weft.ops.triton import moe

    generator = torch.Generator().manual_seed(count)
    for ids in (
        torch.randint(0, 7, (count, 3), generator=generator),
        torch.full((count, 3), 5),
        torch.arange(3).expand(count, 3),
    ):
        tiles = moe.cut(ids.to(DEVICE), 9, tile_m)
        seen: list[int] = []
        for expert, row in zip(tiles.experts.tolist(), tiles.rows.tolist(), strict=True):
            if expert == 9:
                continue
            slots = tiles.order[row : min(row + tile_m, int(tiles.ends[expert]))].tolist()
            assert slots
            assert {int(ids.reshape(-1)[slot]) for slot in slots} == {expert}
            seen += slots
        assert sorted(seen) == list(range(3 * count))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), [("biased", torch.float32), ("gated_shared", torch.bfloat16)])
def test_bits_of_a_row_are_its_own(kind: str, dtype: torch.dtype) -> None:
    from weft.ops.triton import moe

    weights = placed(routed(kind, dtype))
    x, ids = given(30, dtype)
    whole = moe.moe_invariant(x, ids, weights)
    for begin, count in ((0, 1), (7, 18)):
        part = slice(begin, begin + count)
        assert torch.equal(moe.moe_invariant(x[part], ids[part], weights), whole[part])
    spoiled = x.clone()
    spoiled[1::2] = float("nan")
    assert torch.equal(moe.moe_invariant(spoiled, ids, weights)[::2], whole[::2])


def test_a_gpu_computes_them_so_and_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "available", lambda: True)
    cuda = torch.device("cuda")
    plain, invariant = (choose("moe", torch.bfloat16, cuda, invariant=demanded) for demanded in (False, True))
    assert (plain.name, invariant.name) == ("triton", "triton-invariant")
    assert invariant.invariant
    assert not plain.asks
    assert not invariant.asks
    assert choose("moe", torch.float64, cuda).name == "torch"
