"""Published weight names: maps each tensor of a checkpoint to a part of a model parameter.

Families describe their names with the helpers below; the loader does the rest. Several published tensors may
fill one parameter (q, k, v into ``qkv``), each its own part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

import torch

from weft.config.spec import ModelSpec

Read = Callable[[torch.Tensor], torch.Tensor]
"""Transform of a published tensor."""
_HEAD = "lm_head.weight"
_PATCH = "vision.module.patch_embed.proj.weight"
"""Patch matrix of a tower of transformers."""
_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


@dataclass(frozen=True, slots=True)
class Placement:
    """The part ``parameter[index]`` that one published tensor fills completely."""

    parameter: str
    index: tuple[int | slice, ...] = ()
    groups: int = 1
    parts: tuple[tuple[int, int], ...] = ()
    """Parts of a group of published rows: rows begin .. end of each of ``groups`` equal groups. The parameter
    stores the first part of every group, then the second part, and so on. Empty: row order is unchanged."""
    offset: float = 0.0
    """Added to every published value."""

    read: Read | None = None
    """Transform of the published tensor, for other orders of axes or rows."""

    def arranged(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return ``values``, as published, in the arrangement of a parameter of ``dtype``; may share memory.

        Raises ValueError, or an error of ``read``, for values of another shape.
        """
        if self.read is not None:
            values = self.read(values)
        if self.parts:
            size = sum(end - begin for begin, end in self.parts)
            if values.shape[0] != self.groups * size:
                raise ValueError(f"{values.shape[0]} rows are not {self.groups} groups of {size}")
            grouped = values.unflatten(0, (self.groups, size))
            values = torch.cat([grouped[:, begin:end].flatten(0, 1) for begin, end in self.parts])
        return values.to(dtype) + self.offset if self.offset else values


@dataclass(slots=True)
class WeightMap:
    """All names that a checkpoint may contain. Built by a family, read by the loader."""

    placements: dict[str, Placement] = field(default_factory=dict)
    choices: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    """Alternative sets of names for the same parts; a checkpoint contains exactly one set per entry. Names in
    no entry are all required."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Optional names, each with the name that has the same values (a tied head that was saved anyway)."""
    ignored: list[re.Pattern[str]] = field(default_factory=list)
    """Patterns of names without effect."""

    def published_as(self, names: Collection[str]) -> WeightMap:
        """Return the map with the name prefixes of a checkpoint with tensors ``names``.

        Publishers save the same model below ``model.``, ``model.language_model.``, ``language_model.model.``,
        or no prefix. The embedding reveals the prefix of the text model, the patch matrix the prefix of the
        tower, and the head its own prefix. A family that lists several names per tensor already covers the
        prefixes: its map is returned unchanged.
        """
        moved = dict[str, str]()
        # An anchor tensor (embedding, patch matrix) is searched by its last parts.
        for parameter, depth in (("embedding.weight", 1), ("vision.patch.weight", 2), (_PATCH, 2)):
            anchors = [name for name, placed in self.placements.items() if placed.parameter == parameter]
            if len(anchors) == 1:
                ours, theirs = _prefixes(anchors[0], depth, names)
                if ours and ours != theirs:
                    of_tower = parameter.startswith("vision.")
                    known = [
                        name
                        for name, placed in self.placements.items()
                        if placed.parameter.startswith("vision.") == of_tower
                    ]
                    known += [] if of_tower else [*self.same_as]
                    moved |= {n: theirs + n.removeprefix(ours) for n in known if n.startswith(ours)}
        heads = [name for name, placed in self.placements.items() if placed.parameter == "head.weight"]
        # The head may lie outside the prefix of the text model.
        for head in heads[:1] if len(heads) == 1 else [n for n in self.same_as if n.endswith(_HEAD)]:
            ours, theirs = _prefixes(head, 1, names)
            moved[head] = theirs + head.removeprefix(ours)
        if not any(one != other for one, other in moved.items()):
            return self

        def named(name: str) -> str:
            return moved.get(name, name)

        return WeightMap(
            {named(name): placed for name, placed in self.placements.items()},
            [tuple(tuple(map(named, form)) for form in forms) for forms in self.choices],
            {named(name): named(other) for name, other in self.same_as.items()},
            self.ignored,
        )

    def saved_as(self, names: Collection[str]) -> WeightMap:
        """Return the map for tensors ``names`` that have repeated weights under one name only.

        Some trainers drop the first of two tied tensors, so the embedding has the name of the head.
        """
        swapped = {
            other: name for name, other in self.same_as.items() if name in names and other not in names
        }
        # Of several repetitions, the last one stands for the weight; the loader ignores the others.
        if not swapped:
            return self
        placements = {swapped.get(name, name): placed for name, placed in self.placements.items()}
        same = {name: swapped.get(other, other) for name, other in self.same_as.items()}
        kept = {name: other for name, other in same.items() if name != other}
        return replace(self, placements=placements, same_as=kept)

    def add(
        self,
        name: str,
        parameter: str,
        *index: int | slice,
        groups: int = 1,
        parts: tuple[tuple[int, int], ...] = (),
        offset: float = 0.0,
        read: Read | None = None,
    ) -> None:
        """Map the published tensor ``name``. Raises ValueError for a name that is mapped already."""
        if name in self.placements:
            raise ValueError(f"{name} is placed twice")
        self.placements[name] = Placement(parameter, index, groups, parts, offset, read)

    def add_norm(self, spec: ModelSpec, name: str, parameter: str) -> None:
        """Map the weight of a norm, published directly or as its difference from 1, and the bias if any."""
        self.add(f"{name}.weight", f"{parameter}.weight", offset=float(spec.centred_norms))
        if spec.norms.bias:
            self.add(f"{name}.bias", f"{parameter}.bias")

    def add_linear(self, name: str, parameter: str, *index: slice, bias: bool) -> None:
        """Map ``name.weight`` and, with ``bias``, ``name.bias`` to the same rows."""
        self.add(f"{name}.weight", f"{parameter}.weight", *index)
        if bias:
            self.add(f"{name}.bias", f"{parameter}.bias", *index)


def transposed(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` with its last two dims swapped."""
    return weight.transpose(-2, -1)


def in_halves(rows: torch.Tensor) -> torch.Tensor:
    """Return [experts, 2 n, ..] with all gate rows first, from alternating rows of gate and up."""
    return torch.cat((rows[:, ::2], rows[:, 1::2]), dim=1)


def in_order(first: Read | None, second: Read | None) -> Read | None:
    """Return the transform that runs ``first``, then ``second``; None if both are None."""
    if first is None or second is None:
        return first or second
    one, other = first, second
    return lambda values: other(one(values))


def _prefixes(name: str, depth: int, names: Collection[str]) -> tuple[str, str]:
    """Return (prefix of ``name``, prefix of the same weight in ``names``). Both are equal if nothing matches.

    depth: number of name parts between the prefix and the last part.
    """
    module = name.rpartition(".")[0]
    stem = ".".join(module.split(".")[-depth:])
    ours = module.removesuffix(stem)
    # Parts of quantized weights have other endings. Copies inside layers belong to MTP modules.
    found = re.compile(rf"^((?:.*\.)?){re.escape(stem)}\.[^.]+$")
    present = {m[1] for one in names if (m := found.match(one)) and not _LAYER.search(m[1])}
    return ours, ours if ours in present or not present else min(present, key=lambda p: (len(p), p))


def decoder_weights(spec: ModelSpec, prefix: str = "model", head: str = "lm_head") -> WeightMap:
    """Map embedding, final norm, head, and norms and attention of every layer. The family adds feed-forward
    weights.

    prefix: common prefix of all names except ``head``. Delta net layers get their norms only.
    """
    weight_map = WeightMap(ignored=[re.compile(r"\.rotary_emb\.inv_freq$")])
    weight_map.add(f"{prefix}.embed_tokens.weight", "embedding.weight")
    weight_map.add_norm(spec, f"{prefix}.norm", "norm")
    if spec.tied:
        weight_map.same_as[f"{head}.weight"] = f"{prefix}.embed_tokens.weight"
    elif spec.head:
        weight_map.add(f"{head}.weight", "head.weight")
    for layer in range(spec.layers):
        add_block(weight_map, spec, layer, f"{prefix}.layers.{layer}", f"blocks.{layer}")
    return weight_map


def add_score(made: WeightMap, spec: ModelSpec) -> WeightMap:
    """Return ``made``, with the matrix of a classifier if the model has one. A saved output head is ignored
    then."""
    if spec.classify is not None and not spec.classify.tokens:
        made.add("score.weight", "score.weight")
        made.ignored.append(re.compile(r"(^|\.)lm_head\."))
    return made


def add_block(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the norms and the attention of one layer to ``made``."""
    for name, norm in _NORMS[spec.norms.place]:
        made.add_norm(spec, f"{theirs}.{name}", f"{ours}.{norm}")
    if spec.delta is not None and layer in spec.delta.layers:
        return  # the family knows the names
    if spec.mla is not None:
        _add_latent_attention(made, spec, f"{theirs}.self_attn", f"{ours}.attention")
    else:
        add_attention(made, spec, layer, f"{theirs}.self_attn", f"{ours}.attention")


_NORMS = {
    "pre": (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "feed_forward_norm")),
    "post": (
        ("post_attention_layernorm", "attention_out_norm"),
        ("post_feedforward_layernorm", "feed_forward_out_norm"),
    ),
    "both": (
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "attention_out_norm"),
        ("pre_feedforward_layernorm", "feed_forward_norm"),
        ("post_feedforward_layernorm", "feed_forward_out_norm"),
    ),
    "parallel": (("input_layernorm", "attention_norm"),),
}
"""Place of the norms -> (published name, name in the block)."""


def add_attention(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """Add the tensors of grouped-query attention to ``made``, as far as ``spec`` has such tensors."""
    source = spec.attention.source(layer)
    cache = spec.caches[spec.cache_of(source)]
    q = spec.heads * cache.head_dim
    kv = cache.kv_heads * cache.head_dim
    begin = 2 * q if spec.output_gate else q
    parts = [("k", begin, begin + kv), ("v", begin + kv, begin + 2 * kv)]
    # A layer may have no matrix for values, or neither keys nor values.
    parts = [] if source != layer else parts[: 1 if layer in spec.attention.key_is_value else 2]
    for name, first, last in parts:
        made.add_linear(f"{theirs}.{name}_proj", f"{ours}.qkv", slice(first, last), bias=spec.qkv_bias)
    if spec.output_gate:
        _add_gated_queries(made, spec, f"{theirs}.q_proj", f"{ours}.qkv")
    else:
        made.add_linear(f"{theirs}.q_proj", f"{ours}.qkv", slice(0, q), bias=spec.qkv_bias)
    made.add_linear(f"{theirs}.o_proj", f"{ours}.out", bias=spec.o_bias)
    if spec.qk_norm and spec.attention.norm in ("head", "behind"):
        offset = float(spec.centred_norms)
        for name in ("q_norm", "k_norm") if source == layer else ("q_norm",):
            made.add(f"{theirs}.{name}.weight", f"{ours}.{name}.weight", offset=offset)
    elif spec.qk_norm and spec.attention.norm == "all":
        made.add(f"{theirs}.q_norm.weight", f"{ours}.q_weight")
        made.add(f"{theirs}.k_norm.weight", f"{ours}.k_weight")


def _add_gated_queries(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add queries with output gates to ``made``.

    Published per head, query before gate; stored as all gates, then all queries.
    """
    q = spec.heads * spec.head_dim
    dim = spec.head_dim
    parts = ((dim, 2 * dim), (0, dim))
    for kind in ("weight", "bias") if spec.qkv_bias else ("weight",):
        made.add(f"{theirs}.{kind}", f"{ours}.{kind}", slice(0, 2 * q), groups=spec.heads, parts=parts)


def _add_latent_attention(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Add the tensors of latent attention to ``made``, as far as ``spec`` has such tensors."""
    mla = spec.mla
    assert mla is not None
    if mla.q_lora is None:
        first = spec.heads * (mla.nope + mla.rope)
        made.add(f"{theirs}.q_proj.weight", f"{ours}.down.weight", slice(0, first))
    else:
        first = mla.q_lora
        made.add_linear(f"{theirs}.q_a_proj", f"{ours}.down", slice(0, first), bias=mla.bias)
        made.add(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_norm.weight")
        made.add(f"{theirs}.q_b_proj.weight", f"{ours}.q_up.weight")
    lines = slice(first, first + mla.kv_lora + mla.rope)
    made.add(f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.down.weight", lines)
    if mla.bias:
        biased = (lines,) if mla.q_lora is not None else ()  # full queries have no bias
        made.add(f"{theirs}.kv_a_proj_with_mqa.bias", f"{ours}.down.bias", *biased)
    made.add(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.weight")
    made.add(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up.weight")
    made.add_linear(f"{theirs}.o_proj", f"{ours}.out", bias=spec.o_bias)


def add_gated_mlp(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """Map a dense feed-forward block with names ``gate_proj`` (if gated), ``up_proj``, ``down_proj``."""
    n = spec.intermediate
    if not spec.gated:
        made.add_linear(f"{theirs}.up_proj", f"{ours}.up", bias=spec.mlp_bias)
        made.add_linear(f"{theirs}.down_proj", f"{ours}.down", bias=spec.mlp_bias)
        return
    made.add_linear(f"{theirs}.gate_proj", f"{ours}.gate_up", slice(0, n), bias=spec.mlp_bias)
    made.add_linear(f"{theirs}.up_proj", f"{ours}.gate_up", slice(n, 2 * n), bias=spec.mlp_bias)
    made.add_linear(f"{theirs}.down_proj", f"{ours}.down", bias=spec.mlp_bias)


def add_experts(
    made: WeightMap,
    spec: ModelSpec,
    theirs: str,
    ours: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    *,
    shared: str = "shared_experts",
    shared_names: tuple[str, str, str] | None = None,
    hashed: bool = False,
) -> None:
    """Add to ``made`` a router ``gate``, experts in either published form, and the further parts of
    ``spec.moe``.

    names: the family's names of an expert's gate, up and down matrices. The fused form is
    ``experts.gate_up_proj`` [experts, 2 n, hidden] and ``experts.down_proj`` [experts, hidden, n]; the other
    form has single experts. shared: the family's name of the shared expert. shared_names: names of the
    matrices of the shared expert (None: ``names``). hashed: the table ``gate.tid2eid`` chooses experts.
    """
    assert spec.moe is not None
    n = spec.moe.intermediate
    gate, up, down = names
    made.add(f"{theirs}.gate.weight", f"{ours}.router.weight")
    if hashed:
        made.add(f"{theirs}.gate.tid2eid", f"{ours}.router.table")
    elif spec.moe.correction:
        made.add(f"{theirs}.gate.e_score_correction_bias", f"{ours}.router.correction")
    if spec.moe.shared:
        s = spec.moe.shared
        shared_gate, shared_up, shared_down = shared_names or names
        made.add(f"{theirs}.{shared}.{shared_gate}.weight", f"{ours}.shared.gate_up", slice(0, s))
        made.add(f"{theirs}.{shared}.{shared_up}.weight", f"{ours}.shared.gate_up", slice(s, 2 * s))
        made.add(f"{theirs}.{shared}.{shared_down}.weight", f"{ours}.shared.down")
        if spec.moe.shared_gate:
            made.add(f"{theirs}.{shared}_gate.weight", f"{ours}.shared.gate")
    single = []
    for expert in range(spec.moe.experts):
        prefix = f"{theirs}.experts.{expert}"
        made.add(f"{prefix}.{gate}.weight", f"{ours}.experts.gate_up", expert, slice(0, n))
        made.add(f"{prefix}.{up}.weight", f"{ours}.experts.gate_up", expert, slice(n, 2 * n))
        made.add(f"{prefix}.{down}.weight", f"{ours}.experts.down", expert)
        single += [f"{prefix}.{name}.weight" for name in names]
    made.add(f"{theirs}.experts.gate_up_proj", f"{ours}.experts.gate_up")
    made.add(f"{theirs}.experts.down_proj", f"{ours}.experts.down")
    fused = (f"{theirs}.experts.gate_up_proj", f"{theirs}.experts.down_proj")
    made.choices.append((tuple(single), fused))
