"""Interface of sparse attention's core: one entry serves all heads as key and value.

A token reads up to two sets of entries; a layer may lack either set:

    window   entries of single positions p - window + 1 .. p
    groups   entries of whole groups of ``ratio`` positions, complete at p: (p + 1) // ratio groups. A token
             reads all groups, or ``top`` groups chosen for the token by an indexer

In 8 bits an entry has codes and a scale for its first elements, and exact elements behind these
(``kv_fp8.write_lines``). Attention reads the dequantized entry.

The entry of a group is in the cache before any token reads the entry. So the visible entries follow from the
position of a token alone, whatever the chunking of its prompt. Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from weft.attention.base import Backend, CoreInput, LayerCache, SegmentInput
from weft.ops.latent_ops import Rotation, rotate_first, rotate_pairs
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """Entries read by the layers of one type."""

    entries: int | None
    """KV cache group of the window's entries; None: no window."""
    window: int = 0
    groups: int | None
    """KV cache group of the groups' entries; None: no groups."""
    ratio: int = 1
    top: int = 0
    """Number of groups that a token chooses; 0: every token reads all groups."""
    heads: int
    dim: int
    """Elements of a query and of a key. The key is the first part of an entry of either set."""
    index_heads: int = 0


class SparseBackend(Backend):
    """Sparse attention over the paged caches. The caches already contain the segment's entries and groups.

    ``check`` rejects everything that a backend does not support.
    """

    form = "sparse"
    by_token: ClassVar[bool] = False
    """True if C++ finds and writes the groups completed by a step (``compress.ByToken``), for all dtypes of
    the backend. The host then never needs to know the completed groups."""

    @abstractmethod
    def plan(self, segment: SegmentInput, reads: Reads, caches: LayerCache) -> object:
        """Compute data shared by all layers of a type in one step. The result must not outlive the step.

        ``caches``: caches of any of the layers.
        """

    @abstractmethod
    def select(
        self,
        q: Tensor,  # [T, index_heads, n] of this segment
        weights: Tensor,  # wide [T, index_heads]
        core: CoreInput,
        reads: Reads,
    ) -> Tensor | None:
        """Return the groups chosen by each token: int64 [T, top], padded with -1; None if no token must
        choose.

        The chosen groups have the highest sums over heads h of ``weights[h] * relu(q[h] @ key)``, computed in
        a wide dtype; ties go to the lowest group. ``key``: the last n elements of a group's entry, in the
        model's dtype for any cache (the last tensor of the group's caches).
        """

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, dim] of this segment
        out: Tensor,  # [T, heads, n], written; n <= dim: an entry's value is its first n elements
        core: CoreInput,
        reads: Reads,
        selected: Tensor | None,  # result of ``select``; None: all groups
    ) -> None:
        """Attend to the entries described by ``reads``. Writes ``out``. Invisible entries may hold NaN; the
        segment may be empty."""

    def select_rotated(
        self,
        q: Tensor,  # [T, index_heads, n], not rotated
        rotation: Rotation,  # of the first elements of q
        weights: Tensor,  # [T, index_heads] in a wide dtype or in q's
        core: CoreInput,
        reads: Reads,
    ) -> Tensor | None:
        """Rotate q, then ``select``."""
        return self.select(rotate_first(q, *rotation), weights.to(wide(q.dtype)), core, reads)

    def attend_rotated(
        self,
        absorbed: Tensor,  # [T, heads, n], contiguous
        q: Tensor,  # [T, heads, m]; the last dim - n elements are not rotated
        rotation: Rotation,  # of the last elements of q
        out: Tensor,
        core: CoreInput,
        reads: Reads,
        selected: Tensor | None,
    ) -> None:
        """Rotate the last elements of q, then ``attend`` with the queries ``[absorbed | rotated]``."""
        rest = rotate_pairs(q[..., q.shape[2] - 2 * rotation.cos.shape[1] :], *rotation)
        self.attend(torch.cat((absorbed, rest), dim=-1), out, core, reads, selected)


def places(table: Tensor, rows: Tensor, entries: Tensor, per_block: int) -> Tensor:
    """Return the places of entries [B, K] of block table rows [B], in a cache with ``per_block`` entries per
    block.

    Entries beyond the table (and so beyond the end of the row) are clamped to a wrong block: callers must
    hide such entries.
    """
    table_index = (entries // per_block).clamp(max=table.shape[1] - 1)
    return table[rows.unsqueeze(1), table_index] * per_block + entries % per_block
