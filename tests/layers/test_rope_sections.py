"""Rotation by frame, row and column: the pairs of each section, and text without sections."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from weft.config.spec import RopeSpec
from weft.layers.build import Build
from weft.layers.rope import Rope, axes

_SECTIONS = [(24, 20, 20), (11, 11, 10), (2, 1, 1), (3, 3, 2), (24, 20, 20), (0, 4, 4), (8, 0, 0)]
_DIMS = [128, 64, 8, 16, 16, 16, 16]


def _spec(sections: tuple[int, int, int], dim: int, *, interleaved: bool = True) -> RopeSpec:
    return RopeSpec(dim=dim, sections=sections, interleaved=interleaved, theta=5000.0)


@pytest.mark.parametrize(("sections", "dim"), list(zip(_SECTIONS, _DIMS, strict=True)))
def test_pairs_in_turns_are_those_of_the_reference(sections: tuple[int, int, int], dim: int) -> None:
    """Also where sections have more pairs than there are."""
    reference: Any = SimpleNamespace(mrope_section=list(sections))
    number = torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 1, 1, dim // 2)
    expected = Qwen3VLTextRotaryEmbedding.recomposition_frequencies(reference, number)[0, 0, : dim // 2]
    assert axes(_spec(sections, dim)) == expected.int().tolist()


def test_pairs_one_section_after_another() -> None:
    assert axes(_spec((2, 3, 3), 16, interleaved=False)) == [0, 0, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_pair_turns_by_its_axis(dtype: torch.dtype) -> None:
    spec = _spec((3, 3, 2), 16)
    build = Build(dtype=dtype, device=torch.device("cpu"))
    rope, plain = Rope(spec, build), Rope(RopeSpec(dim=16, theta=5000.0), build)
    places = torch.randint(0, 400, (3, 9), generator=torch.Generator().manual_seed(1))
    found = rope.angles(torch.arange(9), places)
    for pair, axis in enumerate(axes(spec)):
        for mine, theirs in zip(found, plain.angles(places[axis]), strict=True):
            assert torch.equal(mine[:, pair], theirs[:, pair])
    text = torch.arange(9)
    for mine, theirs in zip(rope.angles(text, text.expand(3, -1)), plain.angles(text), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.is_contiguous(), "as operators take it"
