"""Entries of groups of positions, each made of what its tokens left in the cache by the one that completes
it.

    positions   0 ....... g r ........ (g + 1) r - 1 .......
    sources     one entry a position: [kv | gate], in a cache that slides
    group g     sum over its positions (and, where groups overlap, those of group g - 1) of
                softmax(gate) * kv, for each channel by itself; normalized, rotated as position g r

All entries have places by position, sources as well, so it makes no difference how a prompt was cut, where a
sequence resumed, or what a rejected draft left: the row that computes position (g + 1) r - 1 writes group g,
before any token reads it. Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import SegmentInput, StepInput
from weft.attention.sparse import places
from weft.layers.build import Build, Packs
from weft.layers.rope import Rope
from weft.ops.sparse_ops import pool, rotate_pairs_
from weft.ops.upload import upload

Tensor = torch.Tensor

GATHER = 1 << 24
"""Elements of source entries gathered at once at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """C groups that a step completes; on a GPU also some that it does not, which go to the null block."""

    sources: Tensor
    """int64 [C, overlap * ratio]: entries of the sources' cache as [blocks * block, width], oldest first."""
    begun: Tensor
    """bool [C, overlap * ratio]: false before the start of the sequence."""
    writes: Tensor
    """int64 [C]: entries of the groups' cache as [blocks * per block, width]."""
    angles: tuple[Tensor, Tensor]
    """cos and sin of the groups' positions, wide [C, dim / 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByToken:
    """The groups that a step completes, found where they are written: by C++ (csrc/compress.cpp), from
    tokens' positions. The host asks nothing."""

    step: StepInput
    sources: int
    """Cache kind."""
    writes: Tensor
    """int64 [T]: as ``StepInput.writes``."""
    ratio: int
    angles: tuple[Tensor, Tensor]
    """cos and sin of the first position of the group that a token would complete: float32 [T, dim / 2]."""


def groups_by_token(step: StepInput, sources: int, groups: int, ratio: int, rope: Rope) -> ByToken:
    """What all layers of a type share in one step. sources, groups: cache kinds."""
    angles = rope.angles((step.positions - (ratio - 1)).clamp(min=0))
    return ByToken(step=step, sources=sources, writes=step.writes[groups], ratio=ratio, angles=angles)


def completed_groups(
    step: StepInput, sources: int, groups: int, ratio: int, overlap: int, block: int, rope: Rope
) -> Completed | None:
    """What all layers of a type share in one step; None if there is nothing to do.

    sources, groups: cache kinds; block: positions of a block of sources.
    """
    found = [_of_segment(step, part, sources, groups, ratio, overlap, block) for part in step.segments]
    merged = [torch.cat(parts) for parts in zip(*(part for part in found if part is not None), strict=True)]
    if not merged or not len(merged[0]):
        return None
    places_of, begun, writes, positions = merged
    return Completed(sources=places_of, begun=begun, writes=writes, angles=rope.angles(positions))


def _of_segment(
    step: StepInput, segment: SegmentInput, sources: int, groups: int, ratio: int, overlap: int, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """(sources, begun, writes, positions) of the groups that a segment may complete."""
    if not segment.tokens:
        return None
    counts = segment.host_counts.astype(np.int64)
    device = segment.starts.device
    most = -(-counts // ratio)  # so many at most, whatever the true starts
    rows = np.repeat(np.arange(segment.rows), most)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(most) - most, most)
    begins = segment.begin + np.cumsum(counts) - counts
    row, nth, begin, count = (upload(a, device) for a in (rows, within, begins[rows], counts[rows]))
    start = segment.starts[row]
    group = start // ratio + nth
    last = (group + 1) * ratio - 1 - start  # the token of the row that completes it
    complete = last < count
    if _asking_is_free(device):
        kept = complete.nonzero().squeeze(1)
        row, begin, group, last, complete = (a[kept] for a in (row, begin, group, last, complete))
    token = (begin + last).clamp(max=len(step.positions) - 1)
    writes = torch.where(complete, step.writes[groups][token] // ratio, 0)
    span = torch.arange((1 - overlap) * ratio, ratio, device=device)
    positions = (group * ratio).unsqueeze(1) + span
    found = places(segment.tables[sources], row, positions.clamp(min=0), block)
    return found, positions >= 0, writes, group * ratio


def _asking_is_free(device: torch.device) -> bool:
    """Whether the host can look at true starts without waiting."""
    return device.type == "cpu"


class Compressor(Packs):
    """Makes groups' entries. An entry is the concatenation of one vector for each of ``dims``.

    A source entry is, for each of ``overlap`` groups that it has a part in, the latest last, ``[kv | gate]``
    of all dims together.
    """

    def __init__(self, dims: tuple[int, ...], ratio: int, overlap: int, eps: float, build: Build) -> None:
        super().__init__()
        self.biases = torch.nn.ParameterList(build.weight(ratio, overlap * dim, wide=True) for dim in dims)
        """Of gates, by position in the group; as published, part by part along the last dim."""
        self.norms = torch.nn.ParameterList(build.weight(dim, wide=True) for dim in dims)
        self._dims = dims
        self._overlap = overlap
        self._eps = eps
        self._norm = build.op("rms_norm", wide=True).run
        self._bias: Tensor = torch.empty(0)

    def pack(self) -> None:
        parts = [
            torch.cat([b.data.chunk(self._overlap, 1)[i] for b in self.biases], dim=1)
            for i in range(self._overlap)
        ]
        self._bias = torch.cat(parts)  # [overlap * ratio, sum of dims]

    def forward(self, sources: Tensor, groups: Tensor, completed: Completed | ByToken) -> None:
        """Writes the entries of ``completed``.

        sources: [blocks, block, overlap * 2 n]; groups: [blocks, per block, n], n the sum of dims.
        """
        if isinstance(completed, ByToken):
            self._by_token(sources, groups, completed)
            return
        flat = sources.view(-1, sources.shape[2])
        entries = groups.view(-1, groups.shape[2])
        cos, sin = completed.angles
        most = max(1, GATHER // (completed.sources.shape[1] * flat.shape[1]))
        for first in range(0, len(completed.writes), most):
            part = slice(first, first + most)
            pooled = pool(flat, completed.sources[part], completed.begun[part], self._bias, self._overlap)
            made = []
            for vector, norm in zip(pooled.split(self._dims, dim=1), self.norms, strict=True):
                normed = self._norm(vector.contiguous(), norm, self._eps).unsqueeze(1)
                made.append(rotate_pairs_(normed, cos[part], sin[part]).squeeze(1))
            entry = torch.cat(made, dim=1) if len(made) > 1 else made[0]
            entries.index_copy_(0, completed.writes[part], entry.to(entries.dtype))

    def _by_token(self, sources: Tensor, groups: Tensor, completed: ByToken) -> None:
        norms = list(self.norms)
        for segment in completed.step.segments:
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            cos, sin = completed.angles
            torch.ops.weft_cpu.compress_groups.default(
                sources,
                groups,
                segment.q_offsets,
                segment.starts,
                segment.tables[completed.sources],
                completed.writes[rows],
                cos[rows],
                sin[rows],
                self._bias,
                norms,
                completed.ratio,
                self._overlap,
                self._eps,
            )
