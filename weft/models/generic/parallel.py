"""Division of a model over tensor parallel ranks, by the plan that transformers publishes for the class.

A class without a usable plan is divided by recognition. Attention modules that are not recognized are whole
on every rank:

    x -> q, k, v of all heads -> the rank's heads -> KV caches, attention -> gather -> o_proj, whole
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.models.generic import recognition
from weft.models.generic.attention import rotation_of
from weft.models.generic.interface import AttentionCall
from weft.models.generic.modules import Sums
from weft.models.generic.skeleton import base_of

Tensor = torch.Tensor
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
_MATRICES = DIVIDED - {"moe_tp_experts"}
#: Styles of the parts of recognized blocks.
_BLOCKS = {
    "gate_proj": "colwise",
    "up_proj": "colwise",
    "gate_up_proj": "packed_colwise",
    "gate_up_proj_bias": "packed_colwise",
    "down_proj": "rowwise",
}
_NUMBER = re.compile(r"\.\d+(?=\.|$)")


class Division(NamedTuple):
    """Division of a model over tensor parallel ranks."""

    plan: dict[str, str]
    """Names below the base model with ``*`` for numbers, and styles."""
    heads: bool
    """True if the plan divides the heads of attention. Otherwise every rank has whole attention modules, and
    only the KV caches and the attention between the matrices are divided (``HeadCut``)."""


@dataclass(frozen=True, slots=True)
class HeadCut:
    """The heads of one rank in a layer whose attention module is whole on every rank."""

    mine: slice
    kv: slice
    """KV heads of the rank; other ranks may share a head."""
    heads: int
    """Heads of all ranks."""

    def of(self, call: AttentionCall) -> AttentionCall:
        """Return ``call`` with the heads of the rank."""
        sinks = None if call.sinks is None else call.sinks[self.mine]
        q, k, v = call.q[:, self.mine], call.k[:, self.kv], call.v[:, self.kv]
        return replace(call, q=q, k=k, v=v, sinks=sinks)

    def whole(self, out: Tensor, sums: Sums) -> Tensor:
        """Return the results of all ranks [T, heads, dim]. out: [T, heads of the rank, dim]."""
        rows, _, dim = out.shape
        return sums.gathered(out.flatten(1), self.heads * dim).view(rows, self.heads, dim)


def division_of(model: Any, calls: Sequence[Any]) -> Division:
    """Return the division of ``model``. ``calls``: facts of attention calls.

    In this order: the plan of transformers; a plan by recognition; whole attention modules beside recognized
    feed-forward blocks and experts.
    """
    published = _published_plan(model)
    if _divides_heads(model, published, calls):
        return Division(published, True)
    blocks, attention = _recognized_blocks(model), _recognized_attention(model, calls)
    return Division(blocks | attention, bool(attention))


def whole_weights(model: Any, calls: Sequence[Any]) -> list[nn.Parameter]:
    """Return the parameters that every tensor parallel rank has, without the embedding and the head."""
    plan = division_of(model, calls).plan
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    without = {id(weight) for table in tables if table is not None for weight in table.parameters()}
    prefix = f"{base_of(model)[0]}."
    return [
        weight
        for name, weight in model.named_parameters()
        if id(weight) not in without and not _is_divided(plan, name.removeprefix(prefix))
    ]


def _is_divided(plan: dict[str, str], name: str) -> bool:
    """Return True if ranks divide the parameter ``name``. Only outputs divide a bias."""
    style = style_of(plan, name) or style_of(plan, name.rpartition(".")[0])
    return style in _MATRICES and not (style == "rowwise" and name.endswith("bias"))


def _published_plan(model: Any) -> dict[str, str]:
    config = model.config.get_text_config()
    return dict(getattr(config, "base_model_tp_plan", None) or {})


def _recognized_attention(model: Any, calls: Sequence[Any]) -> dict[str, str]:
    """Return styles of the attention modules; {} if an attention module is not recognized.

    A recognized module computes what Weft's layers compute, so ranks may divide its heads.
    """
    plan = dict[str, str]()
    dims = {call.module: (call.dim, call.v_dim) for call in calls}
    for name, module in base_of(model)[1].named_modules():
        kind = type(module).__name__
        if kind not in dims:
            continue
        dim, v_dim = dims[kind]
        if dim != v_dim or rotation_of(module, dim) is None:
            return {}
        pattern = _NUMBER.sub(".*", name)
        plan |= {f"{pattern}.{part}": "colwise" for part in ("q_proj", "k_proj", "v_proj")}
        plan[f"{pattern}.o_proj"] = "rowwise"
    return plan


def _recognized_blocks(model: Any) -> dict[str, str]:
    """Return styles of recognized feed-forward blocks and experts. All other modules are whole.

    Blocks with one name pattern must all be recognized.
    """
    found, others = dict[str, str](), set[str]()
    for name, module in base_of(model)[1].named_modules():
        if not hasattr(module, "down_proj"):
            continue
        pattern = _NUMBER.sub(".*", name)
        parts = {part.removesuffix(".weight").removesuffix(".bias") for part, _ in module.named_parameters()}
        styles = {f"{pattern}.{part}": _BLOCKS[part] for part in parts if part in _BLOCKS}
        if _has_columns(module):
            found |= styles
        else:
            others |= set(styles)
    return {name: style for name, style in found.items() if name not in others}


def _has_columns(module: Any) -> bool:
    """Return True for a recognized feed-forward block or recognized experts."""
    if recognition.is_experts(module):
        return recognition.gate_of(module) is not None
    return recognition.mlp_of(module) is not None


def style_of(plan: dict[str, str], name: str) -> str | None:
    """Return the style of the module or parameter ``name`` (below the base); None if every rank has all."""
    return plan.get(_NUMBER.sub(".*", name))


def _divides_heads(model: Any, plan: dict[str, str], calls: Sequence[Any]) -> bool:
    """Return True if ranks can follow ``plan``.

    All styles must be known. Attention must have outputs divided by heads (colwise) and one output projection
    with divided inputs (rowwise): KV caches are divided by heads.
    """
    if not plan or not set(plan.values()) <= DIVIDED | WHOLE:
        return False
    attention = {call.module for call in calls}
    for name, module in base_of(model)[1].named_modules():
        if type(module).__name__ not in attention:
            continue
        styles = [
            style_of(plan, f"{name}.{child}")
            for child, part in module.named_children()
            if isinstance(part, nn.Linear)
        ]
        if "rowwise" not in styles or "colwise" not in styles:
            return False
    return True
