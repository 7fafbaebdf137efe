"""Sparse attention's core, as an interface: one line serves all heads as key and value.

A token reads two sets of lines, either of which a layer may lack:

    window   lines of single positions p - window + 1 .. p
    groups   lines of whole groups of ``ratio`` positions, those that are complete at p: (p + 1) // ratio of
             them; all, or ``top`` of them that an indexer chooses for each token by itself

A group's line is in the cache before any token reads it, so what a token sees follows from its position
alone, however its prompt was cut. Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch

from weft.attention.base import Backend, LayerCache, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the layers of one type read."""

    lines: int | None
    """Cache kind of the window's lines; None: no window."""
    window: int = 0
    groups: int | None
    """Cache kind of the groups' lines; None: no groups."""
    ratio: int = 1
    top: int = 0
    """Groups that a token chooses; 0: it reads all."""
    heads: int
    dim: int
    """Elements of a query, and of a line's key, with which a line of either kind begins."""
    index_heads: int = 0


class SparseBackend(Backend):
    """Sparse attention over the paged caches, which hold the segment's own lines and groups.

    A backend that lacks something says so in ``check``.
    """

    form = "sparse"

    @abstractmethod
    def plan(self, segment: SegmentInput, reads: Reads, caches: LayerCache) -> object:
        """What all layers of a type share in one step, which it must not outlive.

        ``caches``: those of any of the layers.
        """

    @abstractmethod
    def select(
        self,
        q: Tensor,  # [T, index_heads, n] of this segment
        weights: Tensor,  # wide [T, index_heads]
        caches: LayerCache,
        segment: SegmentInput,
        reads: Reads,
        plan: object,
    ) -> Tensor | None:
        """The groups that each token chooses: int64 [T, top], -1 where it sees fewer.

        Those with the highest sum over heads h of ``weights[h] * relu(q[h] @ key)``, which is computed in a
        wide dtype; ties go to the lowest group. ``key``: the last n elements of a group's line. None if
        every token can choose all that it sees.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, dim] of this segment
        out: Tensor,  # [T, heads, n], written; n <= dim: a line's value is its first n elements
        caches: LayerCache,
        segment: SegmentInput,
        reads: Reads,
        plan: object,
        selected: Tensor | None,  # ``select``'s answer; None: all groups
        sinks: Tensor | None,  # wide [heads]: a score with no value in each softmax
        scale: float,
    ) -> None:
        """Attends to what ``reads`` says. Lines that no token may see can hold NaN; rows may be none."""


def places(table: Tensor, rows: Tensor, lines: Tensor, per_block: int) -> Tensor:
    """Where the lines [B, K] of the rows [B] of a block table lie in a cache of ``per_block`` lines a block.

    What is past the table (and so past the row's end) is clamped to a block that it does not name.
    """
    entries = (lines // per_block).clamp(max=table.shape[1] - 1)
    return table[rows.unsqueeze(1), entries] * per_block + lines % per_block
