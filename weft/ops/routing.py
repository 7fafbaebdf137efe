"""Which experts a token goes to, and with what weights: every published rule, as one pure function.

Sources: softmax over all experts, Shazeer et al. 2017, arXiv 1701.06538; groups by their best, DeepSeek-V2,
arXiv 2405.04434; sigmoid, correction and groups by their best two, DeepSeek-V3, arXiv 2412.19437.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

Tensor = torch.Tensor

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")
_TINY = 1e-20


class Rule(NamedTuple):
    """How experts are chosen and weighted."""

    top_k: int
    scoring: str = "softmax"
    """``softmax`` over all experts; ``sigmoid``; ``sqrtsoftplus``: sqrt(log(1 + exp(x)))."""
    renormalize: bool = False
    """Scale the chosen experts' scores to sum to 1. Of softmax scores: a softmax over the chosen alone."""
    groups: int = 1
    """Groups of neighbouring experts."""
    top_groups: int = 1
    """Groups that one token's experts may come from."""
    group_rule: str = "max"
    """What a group is chosen by: its best score (``max``), or the sum of its best two (``top2``)."""
    scale: float = 1.0
    """What the weights are multiplied with in the end."""


def route(
    logits: Tensor, rule: Rule, correction: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The ``top_k`` experts of each token: (ids int64 [T, k], weights [T, k] in the logits' wide dtype).

    Choice is by score plus ``correction`` (wide [E]), which has no part in the weights. Order: score
    descending, then id ascending, so that ties go to the lowest id, in groups too. Softmax scores that
    nothing is added to are compared as logits, which tell apart what rounding makes equal.
    chosen: int64 [T, k], ids that are given (a table's); then only weights are computed.
    """
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    scores = None if rule.scoring == "softmax" and rule.renormalize else _scores(logits, rule.scoring)
    if chosen is None:
        by_logit = rule.scoring == "softmax" and correction is None
        if by_logit and (rule.groups == 1 or rule.group_rule == "max"):
            choice = logits
        else:
            choice = _scores(logits, rule.scoring) if scores is None else scores
            choice = choice if correction is None else choice + correction
        chosen = _chosen(choice, rule)
    if scores is None:
        weights = torch.softmax(logits.gather(1, chosen), dim=-1)
    else:
        weights = scores.gather(1, chosen)
        if rule.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return chosen, weights if rule.scale == 1 else weights * rule.scale


def _scores(logits: Tensor, scoring: str) -> Tensor:
    """[T, E]. Written in functions that torch computes alike for every element (E1)."""
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return 1 / (1 + logits.neg().exp())
    if scoring == "sqrtsoftplus":
        return (logits.clamp(min=0) + logits.abs().neg().exp().log1p()).sqrt()
    raise ValueError(f"scoring {scoring!r} is none of {', '.join(SCORINGS)}")


def _chosen(choice: Tensor, rule: Rule) -> Tensor:
    if rule.groups > 1:
        grouped = choice.unflatten(-1, (rule.groups, choice.shape[1] // rule.groups))
        if rule.group_rule == "max":
            best = grouped.amax(-1)
        else:
            best = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).view(choice.shape)
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
