"""Latent attention with torch operations and independent rows, for any CPU dtype.

For ``--deterministic``. Always uses the absorbed form, whatever form is requested. Core attention is the code
of invariant_backend.py, over one plane of entries that are keys and values. Products with the key and value
matrices use ``ops.fixed_shapes``.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from weft.attention.base import CoreInput, SegmentInput, check_served, refuse_fp8
from weft.attention.gqa.invariant_backend import TILE, PieceMemory, TileGroup, cut, pair_shapes, tiles
from weft.attention.gqa.torch_backend import BITS
from weft.attention.mla.latent import LatentBackend, LatentInput
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.fixed_shapes import ProductShapes, linear
from weft.ops.latent_ops import rotate_pairs
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


@dataclass(slots=True)
class _LatentInvariantPrepared:
    """Cut of a segment, computed at the first layer and reused: ``prepare`` does not know the heads."""

    groups: tuple[TileGroup, ...] | None = None


class InvariantLatent(LatentBackend):
    """Invariant backend on torch. Stateless, so threads may share an instance."""

    invariant = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for a model, dtype or device without support.

        Tries the product shapes, which takes time.
        """
        check_served("invariant", dtype, device, BITS, "cpu")
        refuse_fp8("invariant", cache)
        assert spec.mla is not None
        pair_shapes(cache.width, spec.mla.kv_lora, wide(dtype))  # try the shapes before any request

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _LatentInvariantPrepared:
        return _LatentInvariantPrepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, latent: LatentInput) -> None:
        """Write ``out``; see ``LatentBackend.attend``.

        ``form`` is ignored: all rows use the absorbed form.
        """
        segment = core.segment
        if not segment.tokens:
            return
        prepared = (
            core.prepared
            if isinstance(core.prepared, _LatentInvariantPrepared)
            else _LatentInvariantPrepared()
        )
        spec = latent.spec
        mla = latent.mla
        (entries,) = core.caches[latent.kind]
        shapes = pair_shapes(spec.width, mla.kv_lora, wide(q.dtype))
        if prepared.groups is None:
            memory = PieceMemory(1, spec.width, entries.shape[1], entries.dtype)
            prepared.groups = tuple(cut(segment, latent.kind, spec, memory, q.shape[1], shapes[0].rows))
        nope, turned = q.split((mla.nope, mla.rope), dim=-1)
        turned = rotate_pairs(turned, *latent.angles, mla.interleaved)
        # [T, heads, kv_lora + rope]: queries in the space of cache entries
        absorbed = _by_heads(nope, latent.up.keys.transpose(1, 2))
        if latent.low is not None:
            absorbed = absorbed + latent.low.queries(nope)
        absorbed = torch.cat((absorbed, turned), dim=-1)
        sums = torch.empty_like(absorbed[..., : mla.kv_lora])
        flat = entries.view(-1, gcd(entries.shape[1], TILE) * spec.width)
        for group in prepared.groups:
            _attend(absorbed, sums, flat, group, core.scale, shapes)
        out.copy_(_by_heads(sums, latent.up.values))
        if latent.low is not None:
            latent.low.add_values(out, sums)


def _by_heads(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply each head with its matrix: x [T, heads, K], matrices [heads, N, K] -> [T, heads, N]."""
    return torch.stack([linear(x[:, head], one) for head, one in enumerate(matrices)], dim=1)


def _attend(
    q: Tensor,
    out: Tensor,
    entries: Tensor,
    group: TileGroup,
    scale: float,
    shapes: tuple[ProductShapes, ProductShapes],
) -> None:
    """Attend q [T, heads, width] to the entries of ``group``; write the rows of the group to out [T, heads,
    kv_lora].
    """
    (pieces, n), heads, width = group.queries.shape, q.shape[1], q.shape[2]
    found = entries.index_select(0, group.entries).view(1, pieces, 1, -1, width)
    found.view(group.seen.dtype).bitwise_and_(group.seen)  # +0.0 for any previous content, NaN included
    keys = found.to(wide(q.dtype)).view(pieces, 1, -1, TILE, width)
    # [P, 1, heads * n, width]: all heads read the same entries, so heads become rows
    folded = q[group.queries].to(keys.dtype).transpose(1, 2).reshape(pieces, 1, heads * n, width)
    size = next((rows for rows in reversed(shapes[0].rows) if rows >= heads * n), shapes[0].rows[0])
    lora = out.shape[2]
    made = folded.new_empty(pieces, 1, heads * n, lora)
    for begin in range(0, heads * n, size):
        part = slice(begin, min(begin + size, heads * n))
        hidden = group.hidden.expand(-1, -1, -1, heads, -1, -1).flatten(3, 4)[:, :, :, part]
        values = keys[..., :lora]
        made[:, :, part] = tiles(folded[:, :, part], keys, values, hidden, scale, size, shapes, None)
    made = made.view(pieces, heads, n, -1).transpose(1, 2).reshape(pieces * n, heads, -1)
    out[group.places] = made[group.real].to(out.dtype)
