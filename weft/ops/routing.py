"""Choice and weights of each token's experts: every published rule in one pure function.

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
    """Rule for the choice and the weights of experts."""

    top_k: int
    scoring: str = "softmax"
    """Score function: ``softmax`` over all experts, ``sigmoid``, ``sqrtsoftplus``: sqrt(log(1 + exp(x)))."""
    renormalize: bool = False
    """Scale the chosen scores to sum to 1. With softmax scores: a softmax over the chosen experts alone."""
    groups: int = 1
    """Number of groups of neighbouring experts."""
    top_groups: int = 1
    """Number of groups from which one token's experts may come."""
    group_rule: str = "max"
    """Score of a group: the best score (``max``), or the sum of the best two scores (``top2``)."""
    scale: float = 1.0
    """Final factor of the weights."""


def route(
    logits: Tensor, rule: Rule, correction: Tensor | None = None, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` experts of each token: (ids int64 [T, k], weights [T, k] in a wide dtype).

    The choice is by score plus ``correction`` (wide [E]); the correction does not affect the weights. Order:
    score descending, then id ascending, so ties go to the lowest id, for groups as well. ``chosen``, int64
    [T, k], replaces the choice (a table's ids), and only weights are computed.
    """
    logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)
    # A renormalized softmax over all experts equals a softmax over the chosen logits, so no scores are
    # needed.
    scores = None if rule.scoring == "softmax" and rule.renormalize else _scores(logits, rule.scoring)
    if chosen is None:
        # Softmax keeps the order of logits. Logits also separate experts whose scores round to the same
        # number.
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
    """Return the scores [T, E].

    The functions used here compute every element of a tensor alike. Raises ValueError for an unknown
    ``scoring``.
    """
    if scoring == "softmax":
        return torch.softmax(logits, dim=-1)
    if scoring == "sigmoid":
        return 1 / (1 + logits.neg().exp())
    if scoring == "sqrtsoftplus":
        return (logits.clamp(min=0) + logits.abs().neg().exp().log1p()).sqrt()
    raise ValueError(f"scoring {scoring!r} is none of {', '.join(SCORINGS)}")


def _chosen(choice: Tensor, rule: Rule) -> Tensor:
    """Return the ids of the best experts, int64 [T, top_k], after the choice of groups.

    Ties go to the lowest id.
    """
    if rule.groups > 1:
        # [T, groups, experts of a group]
        grouped = choice.unflatten(-1, (rule.groups, choice.shape[1] // rule.groups))
        if rule.group_rule == "max":
            best = grouped.amax(-1)
        else:
            best = grouped.sort(-1, descending=True).values[..., :2].sum(-1)
        kept = torch.sort(best, dim=-1, descending=True, stable=True).indices[:, : rule.top_groups]
        closed = torch.ones_like(best, dtype=torch.bool).scatter_(1, kept, False)
        choice = grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).view(choice.shape)
    return torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, : rule.top_k]
