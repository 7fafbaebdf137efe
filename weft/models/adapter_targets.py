"""Linear layers that take LoRA adapters on one rank: which published matrix goes into which layer.

The family's weight map has all knowledge: an adapter tensor ``X.lora_B`` goes where the rows of ``X.weight``
go, and ``X.lora_A`` where the columns go. No family code deals with adapters.

    layer divided by outputs     A whole, B cut as the outputs
    layer divided by inputs      A cut as the inputs, B whole; the products are added to the partial results

A layer has one A for each of the smallest published matrices in its rows (q, k, v). A matrix that is
published joined (qkv) has its A in each of these parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from weft.layers.build import Layer
from weft.layers.low_rank import LowRank
from weft.layers.pending_codes import Weight
from weft.models.slices import Window, part_shape, windows
from weft.models.weights import Placement, WeightMap

if TYPE_CHECKING:
    from weft.models.decoder import Model

ALL = slice(None)
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The place of one published matrix in the low-rank part of a layer."""

    low: LowRank
    parts: tuple[int, ...]
    """Parts of the layer with rows of the matrix."""
    placement: Placement
    shape: tuple[int, int]
    """Outputs and inputs of the published matrix."""
    taken: tuple[Window, ...]
    """Windows of this rank; () if the rank stores nothing of the matrix."""

    @property
    def scalable(self) -> bool:
        """True if the layer supports factors of its outputs (DoRA)."""
        return self.low.base is not None

    @property
    def changed(self) -> set[tuple[int, int, int]]:
        """(layer, 0, part) of the numbers of the model that an adapter of the matrix changes."""
        return {(id(self.low), 0, part) for part in self.parts}


def targets_of(model: Model, weights: WeightMap) -> dict[str, Target]:
    """Return published module name -> target, for all layers that take adapters, and allocate the layers."""
    layers = dict(_adapted(model))
    parameters = model.notes.weights(model.named_parameters())
    found: dict[str, list[tuple[str, Placement]]] = {}
    for name, placement in weights.placements.items():
        owner = placement.parameter.removesuffix(_WEIGHT)
        weighs = placement.parameter.endswith(_WEIGHT) and name.endswith(_WEIGHT)
        if owner in layers and weighs and _keeps_columns(placement, parameters[placement.parameter]):
            found.setdefault(owner, []).append((name.removesuffix(_WEIGHT), placement))
    made: dict[str, Target] = {}
    for owner, placed in found.items():
        weight = parameters[owner + _WEIGHT]
        rows = [_span(*placement.index, count=weight.global_shape[0]) for _, placement in placed]
        parts = list(pairwise(sorted({edge for span in rows for edge in span})))
        for (name, placement), (begin, end) in zip(placed, rows, strict=True):
            outputs, inputs = part_shape(weight, placement.index)
            made[name] = Target(
                low=layers[owner],
                parts=tuple(n for n, (first, last) in enumerate(parts) if begin <= first and last <= end),
                placement=placement,
                shape=(outputs, inputs),
                taken=tuple(windows(weight, placement.index)),
            )
        outputs, inputs = weight.parameter.shape
        spans = [
            (part, *_span(rows_of(window)[1], count=outputs))
            for part, edges in enumerate(parts)
            for window in windows(weight, (slice(*edges),))
        ]
        layers[owner].allocate(len(parts), (outputs, inputs), spans)
    return made


def _adapted(model: Model) -> Iterable[tuple[str, LowRank]]:
    """Yield (name, low-rank part) of each layer that gets the adapters of the rows."""
    for name, module in model.named_modules():
        for child in module.adapted if isinstance(module, Layer) else ():
            low = getattr(getattr(module, child), "low", None)
            if low is not None:
                yield f"{name}.{child}", low


def _keeps_columns(placement: Placement, weight: Weight) -> bool:
    """Return True if the parameter stores whole columns of the published matrix, in any order of rows."""
    if len(weight.parameter.shape) != 2 or len(placement.index) > 1:
        return False
    if placement.read is None:
        return True
    rows = part_shape(weight, placement.index)[0]
    try:
        return placement.read(torch.zeros(rows, 1)).shape == (rows, 1)
    except (RuntimeError, ValueError, IndexError):
        return False


def rows_of(window: Window) -> tuple[slice, slice]:
    """Return (rows of the published matrix, rows of the local parameter) of a window."""
    source = window.source[0] if window.source else ALL
    target = window.target[0] if window.target else ALL
    assert isinstance(target, slice)
    return source, target


def columns_of(taken: Iterable[Window]) -> slice:
    """Return the columns of the published matrix on this rank, equal in every window."""
    return next((window.source[1] for window in taken if len(window.source) > 1), ALL)


def _span(rows: int | slice = ALL, *, count: int) -> tuple[int, int]:
    """Return (begin, end) of ``rows`` of ``count`` rows."""
    assert isinstance(rows, slice)
    begin, end, _ = rows.indices(count)
    return begin, end
