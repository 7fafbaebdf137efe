"""Compressed entries: one entry per group of positions, made by the token that completes the group.

    positions   0 ....... g r ........ (g + 1) r - 1 .......
    sources     one entry per position: [kv | gate], in a sliding cache
    group g     sum over its positions (and, where groups overlap, the positions of group g - 1) of
                softmax(gate) * kv, per channel; normalized, rotated as position g r

All entries, sources included, have places by position. So chunking, the resume position of a sequence and
entries of rejected drafts make no difference: the row that computes position (g + 1) r - 1 writes group g
before any token reads group g. Source: DeepSeek-V4 (2026), section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.attention.base import SegmentInput, StepInput
from weft.attention.sparse.sparse import places
from weft.layers.build import Build, Packs
from weft.layers.rope import Rope
from weft.ops.sparse_ops import pool
from weft.ops.upload import upload

Tensor = torch.Tensor

GATHER = 1 << 24
"""Maximum elements of source entries gathered at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """C groups completed by a step. On a GPU also incomplete groups, with writes to the null block."""

    sources: Tensor
    """int64 [C, overlap * ratio]: entries of the sources' cache seen as [blocks * block, width], oldest
    first."""
    begun: Tensor
    """bool [C, overlap * ratio]: False before the start of the sequence."""
    writes: Tensor
    """int64 [C]: entries of the groups' cache seen as [blocks * per block, width]."""
    angles: tuple[Tensor, Tensor]
    """cos and sin of the groups' positions, wide [C, dim / 2]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ByToken:
    """Groups completed by a step, found by C++ (csrc/compress.cpp) from the positions of tokens during the
    write. The host needs no device values."""

    step: StepInput
    sources: int
    """Number of a KV cache group."""
    writes: Tensor
    """int64 [T]: as ``StepInput.writes``."""
    ratio: int
    angles: tuple[Tensor, Tensor]
    """cos and sin of the first position of the group that each token would complete: float32 [T, dim / 2]."""


def groups_by_token(step: StepInput, sources: int, groups: int, ratio: int, rope: Rope) -> ByToken:
    """Return the data shared by all layers of a type in one step. sources, groups: numbers of KV cache
    groups."""
    angles = rope.angles((step.positions - (ratio - 1)).clamp(min=0))
    return ByToken(step=step, sources=sources, writes=step.writes[groups], ratio=ratio, angles=angles)


def completed_groups(
    step: StepInput, sources: int, groups: int, ratio: int, overlap: int, block: int, rope: Rope
) -> Completed | None:
    """Return the data shared by all layers of a type in one step; None if the step completes no group.

    sources, groups: numbers of KV cache groups; block: positions per block of sources.
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
    """Return (sources, begun, writes, positions) of the groups that a segment may complete; None without
    tokens."""
    if not segment.tokens:
        return None
    device = segment.starts.device
    row, nth, begin, count = _candidates(segment, ratio)
    start = segment.starts[row]
    group = start // ratio + nth
    last = (group + 1) * ratio - 1 - start  # token of the row that completes the group
    complete = last < count
    # On a GPU the host must not wait for ``complete``: incomplete groups stay and write to the null block.
    if _asking_is_free(device):
        kept = complete.nonzero().squeeze(1)
        row, begin, group, last, complete = (a[kept] for a in (row, begin, group, last, complete))
    token = (begin + last).clamp(max=len(step.positions) - 1)
    writes = torch.where(complete, step.writes[groups][token] // ratio, 0)
    # [C, overlap * ratio]: positions of each group, and of the preceding groups where groups overlap
    span = torch.arange((1 - overlap) * ratio, ratio, device=device)
    positions = (group * ratio).unsqueeze(1) + span
    found = places(segment.tables[sources], row, positions.clamp(min=0), block)
    return found, positions >= 0, writes, group * ratio


def _candidates(segment: SegmentInput, ratio: int) -> tuple[Tensor, Tensor | int, Tensor, Tensor | int]:
    """Return (row, number of the group within the row, first token of the row, tokens of the row) of each
    group that a row may complete. Rows of equal counts copy nothing from the host, for captured graphs."""
    counts = segment.host_counts.astype(np.int64)
    device = segment.starts.device
    most = -(-counts // ratio)  # upper bound for any true start
    if counts.min() == counts.max():
        count, each = int(counts[0]), int(most[0])
        numbers = torch.arange(segment.rows * each, device=device)
        row = numbers if each == 1 else numbers // each
        return row, 0 if each == 1 else numbers - row * each, segment.begin + row * count, count
    rows = np.repeat(np.arange(segment.rows), most)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(most) - most, most)
    begins = segment.begin + np.cumsum(counts) - counts
    row, nth, begin, tokens = (upload(a, device) for a in (rows, within, begins[rows], counts[rows]))
    return row, nth, begin, tokens


def _asking_is_free(device: torch.device) -> bool:
    """Return True if the host can read true starts without waiting."""
    return device.type == "cpu"


class Compressor(Packs):
    """Makes the entries of groups. An entry is the concatenation of one vector per entry of ``dims``.

    A source entry contains ``[kv | gate]`` of all dims, once for each of the ``overlap`` groups that the
    position belongs to; the latest group comes last.
    """

    def __init__(self, dims: tuple[int, ...], ratio: int, overlap: int, eps: float, build: Build) -> None:
        """``dims``: sizes of the vectors of an entry.

        ``ratio``: positions per group. ``overlap``: groups that each position belongs to.
        """
        super().__init__()
        self.biases = torch.nn.ParameterList(build.weight(ratio, overlap * dim, wide=True) for dim in dims)
        """Biases of gates by position in the group, as published: part by part along the last dim."""
        self.norms = torch.nn.ParameterList(build.weight(dim, wide=True) for dim in dims)
        self._dims = dims
        self._overlap = overlap
        self._eps = eps
        self._norm = build.op("rms_norm", wide=True).run
        self._rotate = build.op("rotate_neighbours", wide=True).run
        self._write_lines = build.op("write_lines").run
        self._bias: Tensor = torch.empty(0)

    def pack(self) -> None:
        """Join the biases into one matrix in the order of a source entry. Needed once, before ``forward``."""
        parts = [
            torch.cat([b.data.chunk(self._overlap, 1)[i] for b in self.biases], dim=1)
            for i in range(self._overlap)
        ]
        self._bias = torch.cat(parts)  # [overlap * ratio, sum of dims]

    def forward(self, sources: Tensor, groups: tuple[Tensor, ...], completed: Completed | ByToken) -> None:
        """Write the entries of ``completed`` into ``groups``.

        sources: [blocks, block, overlap * 2 n]. groups: caches of entries of n elements, see
        ``kv_fp8.write_lines``. n: sum of dims.
        """
        if isinstance(completed, ByToken):
            self._by_token(sources, groups, completed)
            return
        flat = sources.view(-1, sources.shape[2])
        cos, sin = completed.angles
        most = max(1, GATHER // (completed.sources.shape[1] * flat.shape[1]))
        for first in range(0, len(completed.writes), most):
            part = slice(first, first + most)
            # [C, n]
            pooled = pool(flat, completed.sources[part], completed.begun[part], self._bias, self._overlap)
            made = []
            for vector, norm in zip(pooled.split(self._dims, dim=1), self.norms, strict=True):
                normed = self._norm(vector.contiguous(), norm, self._eps).unsqueeze(1)
                made.append(self._rotate(normed, cos[part], sin[part]).squeeze(1))
            entry = torch.cat(made, dim=1) if len(made) > 1 else made[0]
            self._write_lines(groups, completed.writes[part], entry)

    def _by_token(self, sources: Tensor, groups: tuple[Tensor, ...], completed: ByToken) -> None:
        """Write the completed groups with the compiled operation, which finds the groups token by token."""
        norms = list(self.norms)
        for segment in completed.step.segments:
            if not segment.tokens:
                continue
            rows = slice(segment.begin, segment.begin + segment.tokens)
            cos, sin = completed.angles
            torch.ops.weft_cpu.compress_groups.default(
                sources,
                groups[0],
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
                *groups[1:],
            )
