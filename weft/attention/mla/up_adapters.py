"""LoRA adapters of the matrix that turns latents into keys and values (``kv_b_proj``), in the absorbed form.

    key of a head    (W_k + B_k A) latent     a query q becomes  W_k^T q + A^T (B_k^T q)
    value of a head  (W_v + B_v A) latent     a sum s of latents becomes  W_v s + B_v (A s)

The cache entries are latents, so adapters change no entry. Both products are low-rank products of one head:
two pools have a place for each adapter and head, ``place * heads + head``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.config.spec import MLASpec
from weft.layers.build import Build
from weft.layers.low_rank import LowRank
from weft.ops.low_rank import AdapterRows, LowRankPool, make_pool

Tensor = torch.Tensor


class UpAdapters(LowRank):
    """Adapters of the matrix of one layer, for the heads of this rank.

    ``pool`` has A and B as published. ``keys`` and ``values`` have the same numbers for the products.
    """

    keys: LowRankPool
    """Products with ``B_k`` and then ``A``: [nope] to [kv_lora]."""
    values: LowRankPool
    """Products with ``A`` and then ``B_v``: [kv_lora] to [v]."""

    def __init__(self, build: Build, heads: int, mla: MLASpec) -> None:
        super().__init__(build)
        self._heads, self.mla = heads, mla

    def allocate(self, parts: int, shape: tuple[int, int], spans: Sequence[tuple[int, int, int]]) -> None:
        super().allocate(parts, shape, spans)
        mla, places, rank = self.mla, self._options.places * self._heads, self._options.rank
        for name, inputs, outputs in (("keys", mla.nope, mla.kv_lora), ("values", mla.kv_lora, mla.v)):
            whole = [(0, 0, outputs)]
            made = make_pool(places, rank, 1, (outputs, inputs), whole, self._dtype, self._device)
            setattr(self, name, made)

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.pool is None else self.keys.nbytes + self.values.nbytes)

    def placed(self, place: int) -> None:
        assert self.pool is not None
        rank, nope = self.pool.ranks[place], self.mla.nope
        own = slice(place * self._heads, (place + 1) * self._heads)
        a = self.pool.a[place, 0]  # [rank, kv_lora]
        b = self.pool.b[place].unflatten(1, (self._heads, -1)).transpose(0, 1)  # [heads, rank, nope + v]
        self.keys.a[own, 0] = b[..., :nope]
        self.keys.b[own] = a
        self.values.a[own, 0] = a
        self.values.b[own] = b[..., nope:]
        for pool in (self.keys, self.values):
            pool.ranks[own] = [rank] * self._heads
            pool.device_ranks[own].fill_(rank)

    def clear(self, place: int) -> None:
        super().clear(place)
        self.placed(place)

    def of(self, rows: AdapterRows | None) -> UpRows | None:
        """Return the adapters of ``rows``; None if no adapter of the rows changes the matrix.

        A captured step has no list of adapters: the ops then find the rows.
        """
        if rows is None or self.pool is None:
            return None
        if rows.present and not any(self.pool.ranks[place] for place in rows.present):
            return None
        return UpRows(self, rows)

    def product(self, x: Tensor, pool: LowRankPool, rows: AdapterRows, outputs: int) -> Tensor:
        """Return the low-rank products of x [T, heads, inputs], [T, heads, outputs]."""
        tokens = len(x)
        made = x.new_zeros(self._heads * tokens, outputs)
        # Head by head, so that rows of one adapter and head lie together.
        self._op(made, x.transpose(0, 1).reshape(len(made), -1), pool, rows.repeated(self._heads))
        return made.view(self._heads, tokens, outputs).transpose(0, 1)

    def scaled(self, x: Tensor, rows: AdapterRows, part: slice) -> Tensor:
        """Return x [T, heads, n] times the factors (DoRA) of the outputs ``part`` of each head."""
        assert self.pool is not None
        if not any(place in self.pool.factors for place in rows.present):
            return x
        made = x.clone()
        for place, index in rows.groups():
            factors = self.pool.factors.get(place)
            if factors is not None:
                own = factors.view(self._heads, -1)[:, part]
                rows_of = slice(None) if index is None else index
                made[rows_of] = (x[rows_of].to(factors.dtype) * own).to(x.dtype)
        return made


class UpRows(NamedTuple):
    """The adapters of some rows in one layer."""

    low: UpAdapters
    rows: AdapterRows

    def scaled_queries(self, nope: Tensor) -> Tensor:
        """Return the queries [T, heads, nope] with the factors of the keys. Call before all products."""
        return self.low.scaled(nope, self.rows, slice(None, self.low.mla.nope))

    def scaled_heads(self, q: Tensor) -> Tensor:
        """Return whole queries [T, heads, nope + rope] with the factors of the keys."""
        nope = q[..., : self.low.mla.nope]
        made = self.scaled_queries(nope)
        return q if made is nope else torch.cat((made, q[..., self.low.mla.nope :]), dim=-1)

    def queries(self, nope: Tensor) -> Tensor:
        """Return the addition to the absorbed queries, [T, heads, kv_lora], for ``nope`` [T, heads, nope]."""
        return self.low.product(nope, self.low.keys, self.rows, self.low.mla.kv_lora)

    def add_values(self, out: Tensor, sums: Tensor) -> None:
        """Add the products of sums [T, heads, kv_lora] to out [T, heads, v], in place, and scale."""
        out += self.low.product(sums, self.low.values, self.rows, self.low.mla.v)
        scaled = self.low.scaled(out, self.rows, slice(self.low.mla.nope, None))
        if scaled is not out:
            out.copy_(scaled)
