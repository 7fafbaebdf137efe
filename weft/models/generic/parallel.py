"""Division of a model over tensor parallel ranks, by the plan that transformers publishes for the class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

#: Styles that Weft divides.
DIVIDED = frozenset({"colwise", "rowwise", "packed_colwise", "moe_tp_experts"})
#: Styles of modules that are whole on every rank in Weft, with the same input and output.
WHOLE = frozenset(
    {
        "colwise_gather_output",
        "ep_router",
        "mla_kv_a_proj",
        "replicated",
        "replicated_with_grad_allreduce",
        "rowwise_split_input",
    }
)
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


def plan_of(model: Any) -> dict[str, str]:
    """Return the plan of the base model: names below the base with ``*`` for numbers, and styles."""
    config = model.config.get_text_config()
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the style of the module or parameter ``name`` (below the base); None if every rank has all."""
    return plan.get(_NUMBER.sub(".*", name))


def undivided(model: Any, calls: Sequence[Any]) -> str:
    """Return the reason why ranks cannot divide ``model``; empty if ranks can.

    Attention must have outputs divided by heads (colwise) and one output projection with divided inputs
    (rowwise). ``calls``: facts of the attention calls.
    """
    plan = plan_of(model)
    if not plan:
        return "transformers has no plan for tensor parallel ranks of this class"
    unknown = sorted({style for style in plan.values() if style not in DIVIDED | WHOLE})
    if unknown:
        return f"the plan of transformers has styles that Weft does not support: {', '.join(unknown)}"
    # KV caches are divided by heads, so attention that every rank computes whole does not fit.
    base = getattr(model, model.base_model_prefix)
    attention = {call.module for call in calls}
    for name, module in base.named_modules():
        if type(module).__name__ not in attention:
            continue
        styles = [
            style_of(plan, f"{name}.{child}")
            for child, part in module.named_children()
            if isinstance(part, nn.Linear)
        ]
        if "rowwise" not in styles or "colwise" not in styles:
            return "the plan of transformers does not divide the attention heads"
    return ""
