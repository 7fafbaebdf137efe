"""Grouped-query attention with the traits of ``AttentionSpec``, by the same ops as plain attention.

pairs of neighbours   columns of queries and keys are reordered, so that pairs are (i, i + dim / 2):
                      both sides of a score have the same order
no rotation           angles of 0: cos 1, sin 0
norm behind rotation  a rotation keeps the norm of a head. So the op normalizes without weights and
                      rotates; the queries take the weights of both sides. The cache has keys without
                      weights, and scores are the same
norm over all heads   before the op, with one sum over the ranks
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import torch

from weft.attention.base import LayerCache
from weft.attention.gqa.gqa import Attention, AttentionInput
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.dense import RMSNorm
from weft.ops import torch_ops
from weft.parallel.comm import Pending, reduced

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TraitInput(AttentionInput):
    """Attention input shared by all layers of a step, for several rotations."""

    rotations: tuple[tuple[Tensor, Tensor], ...]
    """cos and sin of each rotary embedding; the last entry rotates by 0."""
    temperature: Tensor | None
    """Factor of the queries, wide [T, 1, 1]."""
    kv: Sequence[LayerCache]
    """Caches of all layers."""
    inputs: Tensor | None = None
    """Embeddings of the tokens for each layer, [layers, T, dims of this rank]."""


class TraitAttention(Attention):
    """Grouped-query attention with traits. ``steps`` yields once with a norm over all heads of several
    ranks."""

    def __init__(self, spec: ModelSpec, layer: int, build: Build) -> None:
        traits = spec.attention
        source = traits.source(layer)
        self._source: int | None = None if source == layer else source
        self._kv_parts = 0 if source != layer else 1 if layer in traits.key_is_value else 2
        super().__init__(spec, source, build, kv_parts=self._kv_parts)
        self._rope = traits.rope(layer)
        self._comm = build.comm
        self._sizes = (self._heads * self._dim, self._kv_heads * self._dim)
        cache = spec.caches[self._kind]
        #: Elements of queries and keys of all ranks, each KV head as often as ranks store the head.
        copies = max(1, build.comm.size // cache.kv_heads)
        self._totals = (spec.heads * self._dim, copies * cache.kv_heads * self._dim)
        norm = traits.norm if spec.qk_norm else "head"
        self._over_all = norm == "all"
        self._squares = build.op("squares").run if norm == "all" else None
        self._behind = norm == "behind"
        self._unit: Tensor | None = None
        self._ones = torch.ones(self._dim, dtype=build.dtype, device=build.device)
        self._rms = build.op("rms_norm").run
        self._value_norm = traits.value_norm
        if self._source is not None:
            self.k_norm = None
        if norm == "all":
            heads, kv_heads = build.part(spec.heads), build.kv_part(cache.kv_heads)
            q, k = heads.times(self._dim), kv_heads.times(self._dim)
            self.q_weight = build.weight(q.count, shard=q)
            self.k_weight = build.weight(k.count, shard=k)
        elif norm == "behind":
            self.q_norm = RMSNorm(self._dim, spec.norm_eps, build)
            self.k_norm = RMSNorm(self._dim, spec.norm_eps, build)
        if norm == "behind" or (norm == "unit" and self._rope >= 0):
            self._unit = self._ones
        warm = traits.temperature
        self._warm = warm is not None and (self._rope < 0 or not warm.unrotated)
        self._order: Tensor | None = None
        if traits.interleaved and self._rope >= 0:
            rotated = (spec.rope, *spec.ropes)[self._rope].dim
            self._order = self._columns(rotated).to(build.device)

    def _columns(self, rotated: int) -> Tensor:
        """Return the order of the columns of ``qkv``: int64 [gate + (heads + 2 * kv_heads) * dim].

        In each head of queries and keys, the even ones of the first ``rotated`` dims come first, then the odd
        ones.
        """
        head = torch.cat(
            (torch.arange(0, rotated, 2), torch.arange(1, rotated, 2), torch.arange(rotated, self._dim))
        )
        heads = self._heads + self._kv_heads
        begin = self._gate
        ordered = begin + (torch.arange(heads).unsqueeze(1) * self._dim + head).flatten()
        values = torch.arange(begin + heads * self._dim, begin + sum(self._sizes) + self._sizes[1])
        return torch.cat((torch.arange(begin), ordered, values))

    def steps(
        self, x: Tensor, shared: TraitInput, caches: LayerCache, logits_indices: Tensor | None = None
    ) -> Generator[Pending, None, Tensor]:
        """Return the partial sum of ``forward``; yield at the sum of squares over the ranks."""
        made = self.qkv(x, shared.step.adapters)
        if self._source is not None:
            return self._attended(
                self._queries(made, shared), made, shared, shared.kv[self._source], logits_indices
            )
        if self._kv_parts == 1 or self._value_norm:
            made = self._with_values(made)
        if self._over_all:
            made = yield from self._normed(made)
        if self._order is not None:
            made = made.index_select(1, self._order)
        q_weight = k_weight = self._unit
        if self.q_norm is not None and self.k_norm is not None and not self._behind:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        q = self._rotate_and_cache(
            made[:, self._gate :] if self._gate else made,
            self._heads,
            self._kv_heads,
            q_weight,
            k_weight,
            self._eps,
            *shared.rotations[self._rope],
            *caches[self._kind],
            shared.step.writes[self._kind],
        )
        return self._attended(self._scaled(q, shared), made, shared, caches, logits_indices)

    def _queries(self, made: Tensor, shared: TraitInput) -> Tensor:
        """Return normalized and rotated queries [T, heads, dim], for a layer without keys and values."""
        q = made.view(len(made), self._heads, self._dim)
        if self.q_norm is not None:
            q = self.q_norm(q)
        cos, sin = shared.rotations[self._rope]
        size = 2 * cos.shape[1]
        rotated = torch_ops.rotate(q[..., :size], cos, sin)
        return rotated if size == self._dim else torch.cat((rotated, q[..., size:]), dim=-1)

    def _with_values(self, made: Tensor) -> Tensor:
        """Return ``made`` with normalized values, [T, gate + q + 2 kv]."""
        keys = self._gate + self._sizes[0]
        values = made[:, keys:] if self._kv_parts == 1 else made[:, keys + self._sizes[1] :]
        if self._value_norm:
            heads = values.reshape(len(made), self._kv_heads, self._dim)
            values = self._rms(heads, self._ones, self._eps).flatten(1)
        return torch.cat((made[:, : keys + self._sizes[1]], values), dim=1)

    def _scaled(self, q: Tensor, shared: TraitInput) -> Tensor:
        """Return the queries [T, heads, dim] with weights behind the rotation and with the temperature."""
        if self._behind:
            assert self.q_norm is not None
            assert self.k_norm is not None
            q = q * (self.q_norm.weight * self.k_norm.weight)
        if self._warm:
            assert shared.temperature is not None
            q = (q.to(shared.temperature.dtype) * shared.temperature).to(q.dtype)
        return q

    def _normed(self, made: Tensor) -> Generator[Pending, None, Tensor]:
        """Return ``made`` [T, gate + q + 2 kv] with one RMS norm over all queries, and one over all keys."""
        q_size, k_size = self._sizes
        gate, q, k, v = made.split((self._gate, q_size, k_size, k_size), dim=1)
        exact = torch_ops.wide(made.dtype)
        assert self._squares is not None
        sums = yield from reduced(self._comm, torch.cat((self._squares(q), self._squares(k)), dim=1))
        scaled = [gate]
        parts = ((q, self.q_weight), (k, self.k_weight))
        for column, ((part, weight), total) in enumerate(zip(parts, self._totals, strict=True)):
            mean = sums[:, column : column + 1] / total
            factor = torch.rsqrt(mean + self._eps)
            scaled.append((part.to(exact) * factor * weight.to(exact)).to(made.dtype))
        return torch.cat((*scaled, v), dim=1)
