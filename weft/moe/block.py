"""A routed feed-forward block: router, experts, shared expert, combination.

Source: Shazeer et al. 2017, arXiv 1701.06538; shared experts, Dai et al. 2024, arXiv 2401.06066. The rules by
which experts are chosen are ``weft.ops.routing``; the whole block is one op, ``moe``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.config.spec import MoESpec
from weft.layers.build import Build, Packs
from weft.ops.moe import Gate, Routed
from weft.ops.routing import Rule

Tensor = torch.Tensor


class Router(nn.Module):
    """What a token's experts are chosen by; all wide but the table."""

    def __init__(self, hidden: int, spec: MoESpec, build: Build, vocab: int) -> None:
        super().__init__()
        self.weight = build.weight(spec.experts, hidden, wide=True)
        self.bias = build.weight(spec.experts, wide=True) if spec.bias else None
        self.correction = build.weight(spec.experts, wide=True) if spec.correction and not vocab else None
        self.table: nn.Parameter | None = None
        if vocab:
            ids = torch.arange(spec.top_k, device=build.device).repeat(vocab, 1)
            self.table = nn.Parameter(ids, requires_grad=False)


class Experts(nn.Module):
    """The experts' weights, stacked. Of each expert the gate's rows come before those of ``up``."""

    def __init__(self, hidden: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        count, inner = spec.experts, spec.intermediate
        self.gate_up = build.weight(count, 2 * inner, hidden)
        self.down = build.weight(count, hidden, inner)
        self.gate_up_bias = build.weight(count, 2 * inner) if spec.bias else None
        self.down_bias = build.weight(count, hidden) if spec.bias else None


class Shared(nn.Module):
    """The expert of every token: shared experts side by side are one, as wide as all of them."""

    def __init__(self, hidden: int, spec: MoESpec, build: Build) -> None:
        super().__init__()
        self.gate_up = build.weight(2 * spec.shared, hidden)
        self.down = build.weight(hidden, spec.shared)
        self.gate = build.weight(1, hidden, wide=True) if spec.shared_gate else None


class RoutedMLP(Packs):
    """The ``top_k`` experts of each token, summed by their weights in top-k order, and the shared expert.

    Returns a partial. The router computes in float32 (float64 in a float64 model); ties go to the lowest
    expert. With ``hashed``, the size of the vocabulary, experts come from a table by token id, and scores
    only weight them.
    """

    def __init__(self, hidden: int, spec: MoESpec, activation: str, build: Build, *, hashed: int = 0) -> None:
        super().__init__()
        self.reads_ids = hashed > 0
        self.router = Router(hidden, spec, build, hashed)
        self.experts = Experts(hidden, spec, build)
        self.shared = Shared(hidden, spec, build) if spec.shared else None
        self._rule = Rule(
            top_k=spec.top_k,
            scoring=spec.scoring,
            renormalize=spec.renormalize,
            groups=spec.groups,
            top_groups=spec.top_groups,
            group_rule=spec.group_rule,
            scale=spec.scale,
        )
        self._gate = Gate(activation=activation, limit=spec.limit, alpha=spec.alpha)
        self._op = build.matrix_op("moe")
        self._run = self._op.run
        self._packed: Any = None

    def pack(self) -> None:
        router, experts, shared = self.router, self.experts, self.shared
        weights = Routed(
            rule=self._rule,
            gate=self._gate,
            router=_data(router.weight),
            router_bias=_data(router.bias),
            correction=_data(router.correction),
            table=_data(router.table),
            gate_up=_data(experts.gate_up),
            down=_data(experts.down),
            gate_up_bias=_data(experts.gate_up_bias),
            down_bias=_data(experts.down_bias),
            shared_gate_up=None if shared is None else _data(shared.gate_up),
            shared_down=None if shared is None else _data(shared.down),
            shared_gate=None if shared is None else _data(shared.gate),
        )
        if self._op.pack is None:
            self._packed = weights
            return
        self._packed = self._op.pack(weights)
        for held in (experts, shared):
            if held is not None:
                held.gate_up = held.down = None  # type: ignore[assignment]

    def forward(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; ids: int64 [T], the tokens of its rows, where ``reads_ids``."""
        partial: Tensor = self._run(x, ids, self._packed)
        return partial


def _data(weight: nn.Parameter | None) -> Any:
    return None if weight is None else weight.data
