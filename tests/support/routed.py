"""Make routed blocks with random weights, one per published form, and compute their output token by token."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import torch

from weft.ops.moe import Gate, Routed
from weft.ops.routing import Rule

Tensor = torch.Tensor

VOCAB = 50
#: Form -> (rule, gate, further features).
KINDS: dict[str, tuple[Rule, Gate, frozenset[str]]] = {
    "plain": (Rule(3), Gate(), frozenset()),
    "renormalized": (Rule(2, renormalize=True), Gate("gelu"), frozenset()),
    "grouped_by_best": (Rule(3, groups=4, top_groups=2, scale=2.5), Gate(), frozenset({"shared"})),
    "corrected": (
        Rule(4, "sigmoid", True, groups=4, top_groups=2, group_rule="top2", scale=2.5),
        Gate(),
        frozenset({"correction", "shared"}),
    ),
    "root": (Rule(3, "sqrtsoftplus", True, scale=1.5), Gate(limit=1.5), frozenset({"correction", "shared"})),
    "hashed": (Rule(3, "sqrtsoftplus", True, scale=1.5), Gate(limit=1.5), frozenset({"table", "shared"})),
    "biased": (Rule(3, renormalize=True), Gate(limit=1.0, alpha=1.702), frozenset({"bias"})),
    "gated_shared": (Rule(4, renormalize=True), Gate(), frozenset({"shared", "gate"})),
}


def routed(
    kind: str,
    dtype: torch.dtype,
    *,
    experts: int = 16,
    hidden: int = 48,
    inner: int = 40,
    shared: int = 24,
    seed: int = 0,
) -> Routed:
    """Return weights of magnitude 1 / sqrt(inputs). Tensors that a model of ``dtype`` stores wide are
    wide.
    """
    rule, gate, more = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def noise(*shape: int, to: torch.dtype = dtype, scale: float = 0.0) -> Tensor:
        made = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (made * (scale or shape[-1] ** -0.5)).to(dtype).to(to)

    made: dict[str, Any] = {
        "router": noise(experts, hidden, to=wide, scale=2 * hidden**-0.5),
        "gate_up": noise(experts, 2 * inner, hidden),
        "down": noise(experts, hidden, inner),
    }
    if "bias" in more:
        made["router_bias"] = noise(experts, to=wide, scale=0.5)
        made["gate_up_bias"] = noise(experts, 2 * inner, scale=0.3)
        made["down_bias"] = noise(experts, hidden, scale=0.3)
    if "correction" in more:
        # The correction has its own precision: published in float32 for every dtype of the model.
        made["correction"] = torch.randn(experts, generator=generator, dtype=torch.float64).to(wide) * 0.2
    if "table" in more:
        picks = [torch.randperm(experts, generator=generator)[: rule.top_k] for _ in range(VOCAB)]
        made["table"] = torch.stack(picks)
    if "shared" in more:
        made["shared_gate_up"] = noise(2 * shared, hidden)
        made["shared_down"] = noise(hidden, shared)
    if "gate" in more:
        made["shared_gate"] = noise(1, hidden, to=wide)
    return Routed(rule=rule, gate=gate, **made)


def tokens(count: int, dtype: torch.dtype, hidden: int = 48, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(x [count, hidden], ids int64 [count])."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, hidden, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, VOCAB, (count,), generator=generator)


def doubled(weights: Routed) -> Routed:
    """Return the same numbers in float64."""
    made: dict[str, Any] = {f.name: getattr(weights, f.name) for f in fields(weights)}
    made = {k: v.double() for k, v in made.items() if isinstance(v, Tensor) and v.is_floating_point()}
    return replace(weights, **made)


def chosen(logits: list[float], weights: Routed, token: int) -> tuple[list[int], list[float]]:
    """Return the experts and weights of one token, in plain Python."""
    rule, count = weights.rule, len(logits)
    if rule.scoring == "softmax":
        most = max(logits)
        parts = [math.exp(v - most) for v in logits]
        scores = [v / math.fsum(parts) for v in parts]
    elif rule.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    else:
        scores = [math.sqrt(math.log1p(math.exp(v))) for v in logits]
    added = [0.0] * count if weights.correction is None else weights.correction.tolist()
    choice = [a + b for a, b in zip(scores, added, strict=True)]
    size = count // rule.groups
    groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(rule.groups)]
    worth = [g[0] if rule.group_rule == "max" else g[0] + g[1] for g in groups]
    kept = sorted(range(rule.groups), key=lambda g: (-worth[g], g))[: rule.top_groups]
    open_to = [e for e in range(count) if rule.groups == 1 or e // size in kept]
    ids = sorted(open_to, key=lambda e: (-choice[e], e))[: rule.top_k]
    if weights.table is not None:
        ids = weights.table[token].tolist()
    total = math.fsum(scores[e] for e in ids) if rule.renormalize else 1.0
    return ids, [scores[e] / total * rule.scale for e in ids]
