"""Division of a model over tensor parallel ranks, by the plan that transformers publishes for the class.

A class without a usable plan is divided by recognition (``_recognized_plan``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from weft.models.generic import recognition
from weft.models.generic.attention import rotation_of
from weft.models.generic.skeleton import base_of

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


def plan_of(model: Any, calls: Sequence[Any]) -> dict[str, str]:
    """Return names below the base model with ``*`` for numbers, and styles: the plan of transformers, or a
    plan by recognition if ranks cannot follow the plan of transformers. ``calls``: facts of attention calls.
    """
    plan = _published_plan(model)
    return plan if not _refused(model, plan, calls) else _recognized_plan(model, calls) or plan


def _published_plan(model: Any) -> dict[str, str]:
    config = model.config.get_text_config()
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def _recognized_plan(model: Any, calls: Sequence[Any]) -> dict[str, str]:
    """Return a plan with the recognized modules alone; {} if an attention module is not recognized.

    Such a module computes what Weft's layers compute, so ranks may divide heads and inner columns. All other
    modules are whole on every rank.
    """
    plan = dict[str, str]()
    dims = {call.module: (call.dim, call.v_dim) for call in calls}
    for name, module in base_of(model)[1].named_modules():
        kind = type(module).__name__
        pattern = _NUMBER.sub(".*", name)
        if kind in dims:
            dim, v_dim = dims[kind]
            if dim != v_dim or rotation_of(module, dim) is None:
                return {}
            plan |= {f"{pattern}.{part}": "colwise" for part in ("q_proj", "k_proj", "v_proj")}
            plan[f"{pattern}.o_proj"] = "rowwise"
        elif _has_columns(module):
            plan[f"{pattern}.down_proj"] = "rowwise"
    return plan


def _has_columns(module: Any) -> bool:
    """Return True for a recognized feed-forward block or recognized experts."""
    if recognition.is_experts(module):
        return recognition.gate_of(module) is not None
    return recognition.mlp_of(module) is not None


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the style of the module or parameter ``name`` (below the base); None if every rank has all."""
    return plan.get(_NUMBER.sub(".*", name))


def undivided(model: Any, calls: Sequence[Any]) -> str:
    """Return the reason why ranks cannot divide ``model``; empty if ranks can.

    ``calls``: facts of the attention calls.
    """
    reason = _refused(model, _published_plan(model), calls)
    return reason if reason and not _recognized_plan(model, calls) else ""


def _refused(model: Any, plan: dict[str, str], calls: Sequence[Any]) -> str:
    """Return the reason why ranks cannot follow ``plan``; empty if ranks can.

    Attention must have outputs divided by heads (colwise) and one output projection with divided inputs
    (rowwise).
    """
    if not plan:
        return "transformers has no plan for tensor parallel ranks of this class"
    unknown = sorted({style for style in plan.values() if style not in DIVIDED | WHOLE})
    if unknown:
        return f"the plan of transformers has styles that Weft does not support: {', '.join(unknown)}"
    # KV caches are divided by heads, so attention that every rank computes whole does not fit.
    base = base_of(model)[1]
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
