"""Ops with gradients: the engine's op forward, a differentiable reference op backward.

    forward     engine's op on packed weights           the same bits as the engine
    backward    reference op of ``weft.ops.torch_ops``, recomputed in a wide dtype and differentiated

``RecordingBuild`` gives these ops to the engine's layers, so that each model family has one definition. The
gradient at the rounded weight is used as the gradient of the master weight (straight-through).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from weft.common.errors import ConfigError
from weft.layers.build import Build
from weft.moe.experts import rank_experts
from weft.ops import torch_ops
from weft.ops.moe import Pieces, Routed, block, by_expert
from weft.ops.registry import Implementation, reference
from weft.ops.routing import Rule
from weft.train.masters import Master, Masters

Tensor = torch.Tensor

_PLAIN = (
    "linear",
    "gated_linear",
    "gated",
    "rms_norm",
    "add_rms_norm",
    "layer_norm",
    "activation",
    "activation_erf",
    "softcap",
    "sigmoid_gate",
    "squares",
    "embedding",
)
"""Ops with a differentiable reference of the same signature."""
_OVERWRITES = ("add_rms_norm",)
"""Ops that may overwrite the first argument."""
_OF_EXPERTS = (
    *("router", "router_bias", "gate_up", "down", "gate_up_bias", "down_bias"),
    *("shared_gate_up", "shared_down", "shared_gate"),
)
"""Trained fields of ``Routed``. The bias of expert scores has no gradient."""


def _activation(x: Tensor, name: str) -> Tensor:
    if name in ("relu", "relu2"):
        return F.relu(x) if name == "relu" else F.relu(x).square()
    return F.silu(x) if name == "silu" else F.gelu(x, approximate="tanh")


def _swiglu(gate_up: Tensor, activation: str, *, alpha: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


#: Replace references that divide by 1 + exp(-x): their derivative is NaN where exp overflows.
_RECOMPUTE: dict[str, Callable[..., Tensor]] = {
    "activation": _activation,
    "sigmoid_gate": lambda x, gate: x * torch.sigmoid(gate),
    "softcap": lambda x, cap: cap * torch.tanh(x / cap),
}


_LOWEST = -80.0
"""Lower bound of logits before a sigmoid: sigmoid(-80) is 2e-35, and exp(80) fits float32."""


def _product(rule: Rule, router: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the logits of the router or of the shared expert's gate, bounded so that derivatives are finite.

    ``route`` computes sigmoids by exp. Where exp overflows, the derivative is 0 * inf = NaN, also for an
    expert that was not chosen.
    """
    logits = F.linear(x, weight, bias)
    return logits if weight is router and rule.scoring == "softmax" else logits.clamp(min=_LOWEST)


class _Recorded(torch.autograd.Function):
    """Run ``engine`` in the forward pass, and differentiate ``recompute`` in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Callable[[], Any],
        recompute: Callable[..., Any],
        masters: Sequence[Master | None],
        *inputs: Tensor,
    ) -> Any:
        """Return ``engine()``. inputs: differentiable tensors, with ``Master.value`` in place of a parameter.

        ``recompute``: reference op. Gets the inputs in a wide dtype and returns the outputs of ``engine``.
        """
        ctx.recompute, ctx.masters = recompute, masters
        ctx.save_for_backward(*inputs)
        return engine()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # The derivative is taken at the rounded weights, because the forward pass used these weights.
        values = [
            tensor if master is None else master.plain
            for tensor, master in zip(ctx.saved_tensors, ctx.masters, strict=True)
        ]
        made = differentiate(ctx.recompute, values, ctx.needs_input_grad[3:], gradients)
        found = [
            None if one is None else one.to(tensor.dtype)
            for one, tensor in zip(made, ctx.saved_tensors, strict=True)
        ]
        return None, None, None, *found


def differentiate(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    needed: Sequence[bool],
    gradients: Sequence[Tensor],
) -> list[Tensor | None]:
    """Return the gradient of each needed input, in a wide dtype; None for the other inputs.

    ``function`` gets the inputs in a wide dtype. ``gradients``: gradients of the outputs of ``function``.
    """
    # Outputs without a gradient function and unused inputs are legal: both give None.
    with torch.enable_grad():
        values = [
            tensor.detach().to(torch_ops.wide(tensor.dtype)).requires_grad_(need)
            for tensor, need in zip(inputs, needed, strict=True)
        ]
        made = function(*values)
    outputs = made if isinstance(made, tuple) else (made,)
    pairs = [
        (out, one.to(out.dtype)) for out, one in zip(outputs, gradients, strict=True) if out.requires_grad
    ]
    wanted = [value for value, need in zip(values, needed, strict=True) if need]
    if not pairs or not wanted:
        return [None] * len(values)
    outs, ones = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outs, wanted, ones, allow_unused=True))
    return [next(found) if need else None for need in needed]


@dataclass(slots=True, eq=False)
class PackedWeights:
    """Weights for one op, packed again after each change of the masters."""

    masters: Masters
    pack: Callable[[], Any]
    master: Master | None = None
    """Master of the matrix; None for routed experts."""
    of_experts: dict[str, Master] = field(default_factory=dict)
    """Masters of a routed block, by field of ``Routed``."""
    weights: Routed | None = None
    _packed: Any = None
    _version: int = -1

    @property
    def packed(self) -> Any:
        """Weights in the layout of the engine's op."""
        if self._version != self.masters.version:
            self._packed, self._version = self.pack(), self.masters.version
        return self._packed


def run_recorded(
    masters: Masters,
    engine: Callable[..., Any],
    recompute: Callable[..., Any],
    *args: Any,
    overwrites: bool = False,
) -> Any:
    """Return ``engine(*args)`` with gradients for every tensor, parameter and ``PackedWeights`` matrix in
    ``args``.

    ``recompute``: reference op of the same signature. ``overwrites``: ``engine`` may overwrite ``args[0]``.
    """
    places, inputs, owners = list[int](), list[Tensor](), list[Master | None]()
    given = list(args)
    for place, arg in enumerate(args):
        if isinstance(arg, PackedWeights):
            owner = arg.master
            given[place] = arg.packed
        elif isinstance(arg, Tensor) and arg.is_floating_point():
            owner = masters.of(arg)
        else:
            continue
        places.append(place)
        owners.append(owner)
        inputs.append(arg if owner is None else owner.value)
    if overwrites:
        given[0] = given[0].clone()

    def reference_of(*values: Tensor) -> Any:
        whole = list(args)
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        return recompute(*whole)

    return _Recorded.apply(lambda: engine(*given), reference_of, owners, *inputs)


class _Rotated(torch.autograd.Function):
    """The op ``qkv_rope_cache``. Gradients of keys and values arrive as the gradient of the cache."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Callable[[], Tensor],
        masters: Sequence[Master | None],
        facts: tuple[Any, ...],
        qkv: Tensor,
        cache: Tensor,
        *norms: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (queries, cache). facts: (heads, kv_heads, eps, cos, sin, writes)."""
        ctx.masters, ctx.facts, ctx.cache_shape = masters, facts, cache.shape
        ctx.save_for_backward(qkv, *norms)
        made = engine()
        ctx.mark_dirty(cache)
        return made, cache

    @staticmethod
    def backward(ctx: Any, d_q: Tensor, d_cache: Tensor) -> Any:
        heads, kv_heads, eps, cos, sin, writes = ctx.facts
        qkv, *norms = ctx.saved_tensors
        dim = ctx.cache_shape[4]
        rows = torch_ops.cache_rows(d_cache, writes)
        # [2, T, kv_heads, dim]: gradients of the keys and values that the op wrote
        d_kv = d_cache.reshape(-1, dim)[rows].view(2, len(writes), kv_heads, dim)
        values = [
            tensor if master is None else master.plain
            for tensor, master in zip(norms, ctx.masters, strict=True)
        ]

        def recompute(qkv: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q_norm, k_norm = weights or (None, None)
            angles = (cos.to(qkv.dtype), sin.to(qkv.dtype))
            return torch_ops.rotated_qkv(qkv, heads, kv_heads, dim, q_norm, k_norm, eps, *angles)

        needed = [ctx.needs_input_grad[3], *ctx.needs_input_grad[5:]]
        d_qkv, *d_norms = differentiate(recompute, [qkv, *values], needed, (d_q, d_kv[0], d_kv[1]))
        before = None
        if ctx.needs_input_grad[4]:  # the cache has entries of an earlier call
            before = d_cache.clone()
            before.view(-1, dim)[rows] = 0
        d_qkv = None if d_qkv is None else d_qkv.to(qkv.dtype)
        d_norms = [
            None if one is None else one.to(norm.dtype) for one, norm in zip(d_norms, norms, strict=True)
        ]
        return None, None, None, d_qkv, before, *d_norms


def _rotate(
    masters: Masters,
    engine: Callable[..., Tensor],
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    cache: Tensor,
    writes: Tensor,
) -> Tensor:
    """Run the op ``qkv_rope_cache`` with gradients. Autograd treats ``cache`` as a result of the op."""
    weights = [one for one in (q_weight, k_weight) if one is not None]
    owners = [masters.of(one) for one in weights]
    norms = [one if owner is None else owner.value for one, owner in zip(weights, owners, strict=True)]
    call = functools.partial(
        engine, qkv, heads, kv_heads, q_weight, k_weight, eps, cos, sin, cache.detach(), writes
    )
    facts = (heads, kv_heads, eps, cos, sin, writes)
    q, _ = _Rotated.apply(call, owners, facts, qkv, cache, *norms)
    return q


def _experts(
    masters: Masters,
    engine: Implementation,
    parts: Implementation,
    x: Tensor,
    ids: Tensor | None,
    trained: PackedWeights,
) -> Tensor:
    """Run the op ``moe`` with gradients for x [T, hidden] and the weights of ``trained``."""
    packed = trained.packed
    weights = trained.weights
    assert weights is not None
    with torch.no_grad():
        # The backward pass uses the experts of the forward pass: recomputed scores may break ties
        # differently.
        chosen = rank_experts(parts.run()).route(x, ids, packed)[0]
    names = list(trained.of_experts)
    alpha = weights.gate.alpha
    gated = functools.partial(_swiglu, alpha=alpha) if alpha else torch_ops.gated
    fixed = replace(weights, table=chosen, gate=weights.gate._replace(alpha=0.0))

    def recompute(x: Tensor, *values: Tensor) -> Tensor:
        changes: dict[str, Any] = dict(zip(names, values, strict=True))
        own = replace(fixed, **changes)
        product = functools.partial(_product, own.rule, own.router)
        pieces = Pieces(product, torch_ops.linear, gated, functools.partial(by_expert, gated=gated))
        return block(x, torch.arange(len(x), device=x.device), own, pieces)

    owners = [trained.of_experts[name] for name in names]
    inputs = [owner.value for owner in owners]
    call = functools.partial(engine.run, x, ids, packed)
    made: Tensor = _Recorded.apply(call, recompute, [None, *owners], x, *inputs)
    return made


@dataclass(frozen=True, kw_only=True)
class RecordingBuild(Build):
    """A build with differentiable ops. The weights follow ``masters``."""

    masters: Masters

    def op(self, name: str, *, wide: bool = False) -> Implementation:
        """Return the engine's implementation of ``name`` with gradients. An op without a gradient raises
        ConfigError in the first forward pass."""
        # The reference norms take no extra terms.
        engine = replace(super().op(name, wide=wide), terms=None)
        masters = self.masters
        if name in _PLAIN:
            recompute = _RECOMPUTE.get(name) or reference(name, self.device).run
            overwrites = name in _OVERWRITES

            def run(*args: Any, **keywords: Any) -> Any:
                forward = functools.partial(engine.run, **keywords)
                return run_recorded(
                    masters, forward, functools.partial(recompute, **keywords), *args, overwrites=overwrites
                )

            pack = self._matrix(engine) if name in ("linear", "gated_linear") else engine.pack
            return replace(engine, run=run, pack=pack, pack_codes=None, mixes=False, apart=False)
        if name == "qkv_rope_cache":
            return replace(engine, run=functools.partial(_rotate, masters, engine.run))
        if name == "moe":
            parts = super().op("moe_pieces", wide=wide)
            run_experts = functools.partial(_experts, masters, engine, parts)
            pack = functools.partial(self._routed, parts)
            return replace(engine, run=run_experts, pack=pack, pack_codes=None, apart=False)
        return replace(engine, run=functools.partial(_refuse, name), pack_codes=None)

    def _matrix(self, engine: Implementation) -> Callable[..., PackedWeights]:
        def pack(plain: Tensor) -> PackedWeights:
            master = self.masters.of(plain)
            assert master is not None
            make = (lambda: master.plain) if engine.pack is None else (lambda: engine.pack(master.plain.data))
            return PackedWeights(self.masters, make, master=master)

        return pack

    def _routed(self, parts: Implementation, weights: Routed) -> PackedWeights:
        found = {name: self.masters.of(getattr(weights, name)) for name in _OF_EXPERTS}
        own = {name: master for name, master in found.items() if master is not None}
        make = (lambda: weights) if parts.pack is None else (lambda: parts.pack(weights))
        return PackedWeights(self.masters, make, of_experts=own, weights=weights)


def _refuse(name: str, *args: Any, **keywords: Any) -> Any:
    raise ConfigError(f"this model cannot be trained: the op {name} has no gradient", param="--model")
