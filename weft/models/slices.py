"""Intersection of published tensors with the part of a parameter on a rank.

published     fills  parameter[index]  of the global parameter
a rank        stores spans of one dim of the global parameter
a window      is the intersection: a part of the published tensor, and its place in the local parameter
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch

from weft.layers.pending_codes import Weight

Index: TypeAlias = tuple[int | slice, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a published tensor (arranged as in the parameter), and its target."""

    source: tuple[slice, ...]
    """Slices of the leading dims; further dims are whole. () for the whole tensor."""
    target: Index
    """Index into the local parameter."""


def windows(weight: Weight, index: Index) -> list[Window]:
    """Return the windows that this rank stores of the tensor for the global ``parameter[index]``; may be
    empty."""
    shard = weight.note.shard
    if shard is None:
        return [Window((), index)]
    dim = shard.dim
    entries = index + (slice(None),) * (dim + 1 - len(index))
    before = entries[:dim]
    entry = entries[dim]
    after = entries[dim + 1 :]
    published = sum(isinstance(one, slice) for one in before)  # an integer takes a dim away
    result = []
    # ``offset``: place in the local parameter where the span begins.
    offset = 0
    for begin, end in shard.spans:
        if isinstance(entry, int):
            if begin <= entry < end:
                result.append(Window((), (*before, offset + entry - begin, *after)))
        else:
            start, stop, _ = entry.indices(shard.size)
            low = max(begin, start)
            high = min(end, stop)
            if low < high:
                source = (*(slice(None),) * published, slice(low - start, high - start))
                target = slice(offset + low - begin, offset + high - begin)
                result.append(Window(source, (*before, target, *after)))
        offset += end - begin
    return result


def whole_groups(
    taken: list[Window], groups: int, parts: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], list[Window]] | None:
    """Return ((first, last) of the groups behind the windows ``taken``, the same windows relative to these
    groups).

    Published rows are ``groups`` of ``parts``; the parameter stores part after part (see ``Placement``). None
    if the windows do not cover the same whole groups in every part.
    """
    found = list[Window]()
    chosen = set[tuple[int, int]]()
    base = 0
    left = list(taken)
    done = 0
    for begin, end in parts:
        each = end - begin
        # [base, base + groups * each): rows of this part in the arranged tensor
        inside_part = [
            w for w in left if len(w.source) == 1 and base <= w.source[0].start < base + groups * each
        ]
        for window in inside_part:
            low = window.source[0].start - base
            high = window.source[0].stop - base
            if low % each or high % each or high > groups * each:
                return None
            chosen.add((low // each, high // each))
            count = (high - low) // each
            found.append(Window((slice(done * count, (done + each) * count),), window.target))
        base = base + groups * each
        done = done + each
    if len(found) != len(taken) or len(chosen) != 1:
        return None
    return chosen.pop(), found


def part_shape(weight: Weight, index: Index) -> tuple[int, ...]:
    """Return the shape of the global ``parameter[index]``."""
    shape = weight.global_shape
    made = []
    for size, entry in zip(shape, index, strict=False):
        if isinstance(entry, slice):
            made.append(len(range(*entry.indices(size))))
    return (*made, *shape[len(index) :])


def inside(index: Index, place: int) -> Index:
    """Return the index of matrix ``place`` in the stack ``parameter[index]``."""
    for number, entry in enumerate(index):
        if isinstance(entry, slice):
            return (*index[:number], (entry.start or 0) + place, *index[number + 1 :])
    return (*index, place)


def note_largest(weight: Weight, index: Index, values: torch.Tensor) -> None:
    """Record the largest magnitude of each whole row, for weights with a ``Note.largest`` table."""
    largest = weight.note.largest
    if largest is not None:
        largest[index] = values.to(weight.parameter.dtype).to(largest.dtype).abs().amax(-1, keepdim=True)


def apart(experts: int, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ([experts, rank, inputs], [experts, outputs, rank]) of both tensors of a module. ``experts``: 0
    for a single expert."""
    if not experts:
        return a.unsqueeze(0), b.unsqueeze(0)
    return a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
