"""Routed experts with other weights: of each expert, or on the input; and experts beside a dense block.

Experts beside a dense block have norms of their own (Gemma 4).

The router reads its own scaling of the normalized stream, and the experts read another. Both scalings are
vectors, so their quotient is part of the router's matrix. Each expert has a factor of its output.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

import msgspec
import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.config.spec import ModelSpec
from weft.layers.build import Build
from weft.layers.dense import GatedMLP, RMSNorm
from weft.moe.block import RoutedMLP
from weft.moe.experts import RankExperts, rank_experts, settled
from weft.moe.products import Products
from weft.ops.low_rank import AdapterRows
from weft.ops.row_routes import RowRoutes
from weft.parallel.comm import Comm, Pending, reduced
from weft.types.exchange import UNAGREED, Exchange

Tensor = torch.Tensor


class FactorExperts:
    """``RankExperts`` with a factor of each expert's output, wide [experts]."""

    def __init__(self, inner: RankExperts, factors: Tensor) -> None:
        self._inner, self._factors = inner, factors

    def route(self, x: Tensor, ids: Tensor | None, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (experts, weights with the factors, factor of the shared expert); see ``RankExperts``."""
        experts, scales, share = self._inner.route(x, ids, weights)
        return experts, scales * self._factors.to(scales.dtype)[experts], share

    def with_table(self, weights: Any, table: Tensor) -> Any:
        return self._inner.with_table(weights, table)

    def answer(self, x: Tensor, places: Tensor, scales: Tensor | None, weights: Any, exact: bool) -> Tensor:
        return self._inner.answer(x, places, scales, weights, exact)

    def answers(self, dtype: torch.dtype, exact: bool) -> torch.dtype:
        return self._inner.answers(dtype, exact)

    def shared(self, x: Tensor, share: Tensor | None, weights: Any) -> Any:
        return self._inner.shared(x, share, weights)

    def finish(self, total: Tensor, scales: Tensor, shared: Any, dtype: torch.dtype, exact: bool) -> Tensor:
        return self._inner.finish(total, scales, shared, dtype, exact)

    def tensors(self, weights: Any) -> Iterable[Tensor]:
        return self._inner.tensors(weights)

    def products(self, weights: Any) -> Products:
        return self._inner.products(weights)


class UnweightedExperts(FactorExperts):
    """``RankExperts`` with weight 1 of the chosen experts."""

    def __init__(self, inner: RankExperts) -> None:
        self._inner = inner

    def route(self, x: Tensor, ids: Tensor | None, weights: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        experts, scales, share = self._inner.route(x, ids, weights)
        return experts, torch.ones_like(scales), share


class InputWeightedMLP(RoutedMLP):
    """One expert per token, whose weight multiplies the expert's input, plus a shared expert (Llama 4).

    Ranks with whole experts route twice: a positive factor of a row does not change the order of its scores.
    """

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        assert spec.moe is not None
        routed = msgspec.structs.replace(spec.moe, shared=0)
        super().__init__(spec.hidden, routed, spec.activation, build)
        self.beside = GatedMLP(spec.hidden, spec.moe.shared, spec.activation, build)
        self._op = build.matrix_op("moe_pieces")
        self._inner = rank_experts(self._op.run())
        self._parts = UnweightedExperts(self._inner)
        self._run, self._terms = (lambda: self._parts), None

    def steps(
        self,
        comm: Comm,
        x: Tensor,
        ids: Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, Tensor]:
        shared = yield from self.beside.steps(comm, x, None, exchange, adapters)
        packed = self._packed
        if routes is not None and self.number is not None:
            ids, packed = settled(self._inner, x, ids, packed, self.number, routes)
        experts, scales, _ = self._inner.route(x, ids, packed)
        weighted = (x.to(scales.dtype) * scales).to(x.dtype)
        if self.divided is not None:
            return shared + (yield from self.divided.steps(weighted, ids, exchange, adapters, packed))
        ones = torch.ones_like(scales)
        total = self._answers(self._parts, weighted, experts, ones, adapters)
        partial = self._parts.finish(total, ones, None, x.dtype, False)
        return shared + (yield from reduced(comm, partial))


class FactorMLP(RoutedMLP):
    """Routed experts with a factor of each expert's output. Uses the parts of the op for any ranks."""

    def __init__(self, spec: ModelSpec, build: Build, norm: RMSNorm) -> None:
        """``norm``: norm of the experts' input."""
        assert spec.moe is not None
        super().__init__(spec.hidden, spec.moe, spec.activation, build)
        self.factors = build.weight(spec.moe.experts, wide=True)
        self.router_scale = build.weight(spec.hidden, wide=True)
        # A tuple hides the norm's weight from nn.Module: the block owns the norm.
        self._norm = (norm,)
        self._op = build.matrix_op("moe_pieces")
        pieces = self._op.run()
        self._parts = FactorExperts(rank_experts(pieces), self.factors)
        self._run, self._terms = (lambda: self._parts), None

    def pack(self) -> None:
        """Put the quotient of the two scalings into the router, and pack.

        Raise ConfigError for a norm weight of 0.
        """
        weight = self._norm[0].weight.to(self.router.weight.dtype)
        if not bool((weight != 0).all()):
            raise ConfigError("a norm weight of the experts' input is 0", param="--model")
        size = self.router.weight.shape[1]
        self.router.weight.data.mul_(self.router_scale.data * size**-0.5 / weight)
        super().pack()

    def _whole(self, x: Tensor, ids: Tensor | None, packed: Any, adapters: AdapterRows | None) -> Tensor:
        """Return a partial result, for a rank with a part of every expert. x: [T, hidden]."""
        experts, scales, _ = self._parts.route(x, ids, packed)
        total = self._answers(self._parts, x, experts, scales, adapters)
        return self._parts.finish(total, scales, None, x.dtype, False)


class BesideExperts(nn.Module):
    """``norm(dense) + norm(experts(norm(x)))``: the sum of both feed-forwards of a block."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        super().__init__()
        self.norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.experts = FactorMLP(spec, build, self.norm)
        self.dense_out_norm = RMSNorm(spec.hidden, spec.norm_eps, build)
        self.experts_out_norm = RMSNorm(spec.hidden, spec.norm_eps, build)

    def steps(
        self,
        comm: Comm,
        x: Tensor,
        dense: Tensor,
        exchange: Exchange,
        adapters: AdapterRows | None,
        routes: RowRoutes | None,
    ) -> Generator[Pending, None, Tensor]:
        """Return [T, hidden] for the stream x and the output of the dense feed-forward, [T, hidden] each."""
        routed = yield from self.experts.steps(comm, self.norm(x), None, exchange, adapters, routes)
        return self.dense_out_norm(dense) + self.experts_out_norm(routed)
