"""Latent attention with torch operations, for CPU and CUDA and every dtype: the reference of both forms.

    absorbed   pieces and groups of torch_backend.py, over one plane of entries that are keys and values
    expanded   row by row: keys and values of ``CHUNK`` positions at a time (absolute multiples), queries in
               tiles; results of the chunks are merged by log-sum-exp

Sums and exponentials of the expanded form are float32 (float64 in float64 models). Nothing waits for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.attention.base import CoreInput, SegmentInput, check_served
from weft.attention.gqa.torch_backend import BITS, GATHER, PieceGroup, batches, cut, make_group
from weft.attention.mla.latent import LatentBackend, LatentInput
from weft.attention.mla.merge import merge
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops import kv_fp8
from weft.ops.latent_ops import rotate_pairs
from weft.ops.torch_ops import wide

Tensor = torch.Tensor

CHUNK = 1024
"""Positions expanded at once."""
SCORES = 1 << 22
"""Maximum scores of one tile of queries (a single query may need more)."""


@dataclass(slots=True)
class _Prepared:
    """Groups of the absorbed form, computed at the first layer with this form and reused by the other
    layers."""

    groups: tuple[PieceGroup, ...] | None = None


class TorchLatent(LatentBackend):
    """Reference backend of latent attention. Stateless, so threads may share an instance."""

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        check_served("torch", dtype, device, BITS, "cpu", "cuda")

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> object:
        return _Prepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, latent: LatentInput) -> None:
        """Write ``out``; see ``LatentBackend.attend``. The absorbed form stages groups in ``prepared``."""
        if not core.segment.tokens:
            return
        mla = latent.mla
        nope, turned = q.split((mla.nope, mla.rope), dim=-1)
        turned = rotate_pairs(turned, *latent.angles, mla.interleaved)
        if latent.form == "expanded":
            _expanded(torch.cat((nope, turned), dim=-1), out, core, latent)
            return
        cache = core.caches[latent.kind]
        prepared = core.prepared if isinstance(core.prepared, _Prepared) else _Prepared()
        if prepared.groups is None:
            prepared.groups = _groups(core.segment, latent.kind, latent.spec, cache[0])
        # [T, heads, kv_lora + rope]: queries in the space of cache entries
        absorbed = torch.einsum("thd,hdl->thl", nope, latent.up.keys)
        if latent.low is not None:
            absorbed = absorbed + latent.low.queries(nope)
        absorbed = torch.cat((absorbed, turned), dim=-1)
        sums = torch.empty_like(absorbed[..., : mla.kv_lora])
        for group in prepared.groups:
            sums[group.tokens] = _absorbed(absorbed[group.tokens], cache, group, mla.kv_lora, core.scale)
        out.copy_(torch.einsum("thl,hvl->thv", sums, latent.up.values))
        if latent.low is not None:
            latent.low.add_values(out, sums)


# --- absorbed ---


def _groups(segment: SegmentInput, kind: int, spec: CacheSpec, entries: Tensor) -> tuple[PieceGroup, ...]:
    """Return the queries in groups of equal shape, staged on the device for all layers of the group."""
    block_size = entries.shape[1]
    limit = max(1, GATHER // (entries.shape[1] * spec.width))
    pieces = cut(segment, spec.window, block_size)
    return tuple(
        make_group(some, segment, kind, spec, block_size, entries.dtype, planes=1)
        for some in batches(pieces, limit)
    )


def _absorbed(q: Tensor, cache: tuple[Tensor, ...], group: PieceGroup, kv_lora: int, scale: float) -> Tensor:
    """Attend q [B * n, heads, width] to entries; return sums of latents [B * n, heads, kv_lora]."""
    b = group.pieces
    n = group.queries
    heads = q.shape[1]
    width = q.shape[2]
    keys = _read(cache, cache[0].shape[1], group.gather, group.seen.view(-1, 1)).view(b, 1, -1, width)
    keys = keys.to(q.dtype)
    # [B, 1, n * heads, keys]: all heads read the same entries, so heads become rows
    mask = group.visible.unsqueeze(3).expand(b, 1, n, heads, -1).reshape(b, 1, n * heads, -1)
    made = F.scaled_dot_product_attention(
        q.reshape(b, 1, n * heads, width), keys, keys[..., :kv_lora], attn_mask=mask, scale=scale
    )
    return made.view(b * n, heads, kv_lora)


# --- expanded ---


def _expanded(
    q: Tensor,  # [T, heads, nope + rope], rotated
    out: Tensor,
    core: CoreInput,
    latent: LatentInput,
) -> None:
    """Write ``out`` [T, heads, v]: expand the entries of each row to keys and values, chunk by chunk."""
    segment = core.segment
    cache = core.caches[latent.kind]
    mla = latent.mla
    window = latent.spec.window
    exact = wide(q.dtype)
    keys = latent.up.keys.to(exact)
    values = latent.up.values.to(exact)
    begin = 0
    for row, (start, count) in enumerate(
        zip(segment.host_starts.tolist(), segment.host_counts.tolist(), strict=True)
    ):
        state = _RowState(q[begin : begin + count].to(exact), mla.v)
        # ``start`` is an upper bound, so no early chunk is certain to lie outside a window.
        for first in range(0, start + count, CHUNK):
            last = min(first + CHUNK, start + count)
            positions = torch.arange(first, last, device=q.device)
            true = segment.starts[row]
            end = segment.starts[row] + count
            seen = positions < end
            if window:
                seen &= positions > true - window
            chunk = _rows_of(cache, segment.tables[latent.kind][row], positions, seen).to(exact)
            # k: [heads, S, nope], shared rotated part: [heads, S, rope], v: [heads, S, v]
            k = torch.einsum("sl,hdl->hsd", chunk[:, : mla.kv_lora], keys)
            shared = chunk[:, mla.kv_lora :].expand(k.shape[0], -1, -1)
            v = torch.einsum("sl,hvl->hsv", chunk[:, : mla.kv_lora], values)
            state.add(torch.cat((k, shared), dim=-1), v, positions, true, window, core.scale)
        out[begin : begin + count] = state.out.transpose(0, 1)
        begin += count


def _rows_of(cache: tuple[Tensor, ...], table: Tensor, positions: Tensor, seen: Tensor) -> Tensor:
    """Return [S, width]: entries of the positions, zeros where not ``seen``."""
    block = cache[0].shape[1]
    table_index = (positions // block).clamp(max=table.shape[0] - 1)  # positions beyond the table are hidden
    return _read(cache, 1, table[table_index] * block + positions % block, -seen.unsqueeze(1).to(torch.int8))


def _read(cache: tuple[Tensor, ...], run: int, index: Tensor, seen: Tensor) -> Tensor:
    """Return [N * run, width]: the runs of ``run`` entries at ``index`` [N], in the model's dtype.

    seen: [N * run, 1] integers, -1 or 0. Entries with 0 become zeros, whatever the cache contains.
    """

    def take(entries: Tensor) -> Tensor:
        width = entries.shape[2]
        result = kv_fp8.take(entries.view(-1, run * width), index).view(-1, width)
        result.view(BITS[result.dtype]).bitwise_and_(seen.to(BITS[result.dtype]))
        return result

    if len(cache) == 1:
        return take(cache[0])
    values, scales, keys = cache
    own = scales.view(-1, run).index_select(0, index).view(-1).where(seen.squeeze(1) != 0, 0.0)
    return torch.cat((kv_fp8.dequantize(take(values), own, keys.dtype), take(keys)), dim=1)


class _RowState:
    """Attention of the queries of one row [n, heads, dim] over the chunks processed so far."""

    def __init__(self, q: Tensor, v: int) -> None:
        self._q = q.transpose(0, 1)  # [heads, n, dim]
        self.out = q.new_zeros(q.shape[1], q.shape[0], v)
        """[heads, n, v]."""
        self._mass = q.new_full((q.shape[1], q.shape[0]), float("-inf"))

    def add(self, k: Tensor, v: Tensor, positions: Tensor, start: Tensor, window: int, scale: float) -> None:
        """Add the keys k [heads, S, dim] and values v [heads, S, v] of ``positions`` [S] to ``out``, in
        place.

        ``start``: position of the first query.
        """
        count = self._q.shape[1]
        tile = max(1, SCORES // (k.shape[0] * k.shape[1]))
        for first in range(0, count, tile):
            last = min(first + tile, count)
            part = slice(first, last)
            queries = start + torch.arange(first, last, device=k.device)
            visible = positions <= queries.unsqueeze(1)
            if window:
                visible &= positions > queries.unsqueeze(1) - window
            scores = (self._q[:, part] @ k.transpose(1, 2)).mul_(scale)
            scores.masked_fill_(~visible, float("-inf"))
            mass = scores.logsumexp(dim=-1)
            # A query without visible keys has mass -inf; -inf - -inf would be NaN.
            empty = (mass == float("-inf")).unsqueeze(-1)
            weights = scores.sub_(mass.unsqueeze(-1)).exp_().masked_fill_(empty, 0.0)
            self.out[:, part], self._mass[:, part] = merge(
                self.out[:, part], self._mass[:, part], weights @ v, mass
            )
