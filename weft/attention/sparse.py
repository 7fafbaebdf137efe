"""Sparse attention's core, as an interface: one entry serves all heads as key and value.

A token reads two sets of entries, either of which a layer may lack:

    window   entries of single positions p - window + 1 .. p
    groups   entries of whole groups of ``ratio`` positions, those that are complete at p: (p + 1) // ratio of
             them; all, or ``top`` of them that an indexer chooses for each token by itself

A group's entry is in the cache before any token reads it, so what a token sees follows from its position
alone, however its prompt was cut. Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.attention.base import Backend, LayerCache, SegmentInput

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """What the layers of one type read."""

    entries: int | None
    """Cache kind of the window's entries; None: no window."""
    window: int = 0
    groups: int | None
    """Cache kind of the groups' entries; None: no groups."""
    ratio: int = 1
    top: int = 0
    """Groups that a token chooses; 0: it reads all."""
    heads: int
    dim: int
    """Elements of a query, and of an entry's key, with which an entry of either kind begins."""
    index_heads: int = 0


class SparseBackend(Backend):
    """Sparse attention over the paged caches, which hold the segment's own entries and groups.

    A backend that lacks something says so in ``check``.
    """

    form = "sparse"
    by_token: ClassVar[bool] = False
    """Whether groups that a step completes are found and written by C++ (``compress.ByToken``): in the dtypes
    that this backend serves the host need not look which they are."""

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
        wide dtype; ties go to the lowest group. ``key``: the last n elements of a group's entry. None if
        every token can choose all that it sees.
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, dim] of this segment
        out: Tensor,  # [T, heads, n], written; n <= dim: an entry's value is its first n elements
        caches: LayerCache,
        segment: SegmentInput,
        reads: Reads,
        plan: object,
        selected: Tensor | None,  # ``select``'s answer; None: all groups
        sinks: Tensor | None,  # wide [heads]: a score with no value in each softmax
        scale: float,
    ) -> None:
        """Attends to what ``reads`` says. Entries that no token may see can hold NaN; rows may be none."""


def places(table: Tensor, rows: Tensor, entries: Tensor, per_block: int) -> Tensor:
    """Where the entries [B, K] of the rows [B] of a block table lie in a cache of ``per_block`` entries a
    block.

    What is past the table (and so past the row's end) is clamped to a block that it does not name.
    """
    table_index = (entries // per_block).clamp(max=table.shape[1] - 1)
    return table[rows.unsqueeze(1), table_index] * per_block + entries % per_block
