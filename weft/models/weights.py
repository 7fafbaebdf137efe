"""Published weight names: where each tensor of a checkpoint goes in a model's parameters.

Families describe their names with the helpers below; the loader does the rest. Several published tensors
may fill one parameter (q, k, v into ``qkv``), each its own part.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from weft.config.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """The part ``parameter[index]`` that one published tensor fills, whole."""

    parameter: str
    index: tuple[int | slice, ...] = ()


@dataclass(slots=True)
class WeightMap:
    """Every name that a checkpoint may hold. Built by a family, read by the loader."""

    placements: dict[str, Placement] = field(default_factory=dict)
    choices: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    """Each entry: alternative sets of names for the same parts, of which a checkpoint holds exactly one.
    Names in no entry are all required."""
    same_as: dict[str, str] = field(default_factory=dict)
    """Optional name to the name whose values it repeats (a tied head that was saved all the same)."""
    ignored: list[re.Pattern[str]] = field(default_factory=list)
    """Names without effect."""

    def add(self, name: str, parameter: str, *index: int | slice) -> None:
        """Places the published tensor ``name``. Raises ValueError for a name placed twice."""
        if name in self.placements:
            raise ValueError(f"{name} is placed twice")
        self.placements[name] = Placement(parameter, index)

    def add_linear(self, name: str, parameter: str, *index: slice, bias: bool) -> None:
        """Places ``name.weight`` and, if there is one, ``name.bias``, at the same rows."""
        self.add(f"{name}.weight", f"{parameter}.weight", *index)
        if bias:
            self.add(f"{name}.bias", f"{parameter}.bias", *index)


def decoder_weights(spec: ModelSpec) -> WeightMap:
    """Embedding, final norm, head, and every layer's norms and attention; feed-forward is the family's."""
    made = WeightMap(ignored=[re.compile(r"\.rotary_emb\.inv_freq$")])
    made.add("model.embed_tokens.weight", "embedding.weight")
    made.add("model.norm.weight", "norm.weight")
    if spec.tied:
        made.same_as["lm_head.weight"] = "model.embed_tokens.weight"
    else:
        made.add("lm_head.weight", "head.weight")
    for layer in range(spec.layers):
        add_block(made, spec, layer, f"model.layers.{layer}", f"blocks.{layer}")
    return made


def add_block(made: WeightMap, spec: ModelSpec, layer: int, theirs: str, ours: str) -> None:
    """The norms and the attention of one layer."""
    made.add(f"{theirs}.input_layernorm.weight", f"{ours}.attention_norm.weight")
    made.add(f"{theirs}.post_attention_layernorm.weight", f"{ours}.feed_forward_norm.weight")
    add = _add_attention if spec.mla is None else _add_latent_attention
    add(made, spec, f"{theirs}.self_attn", f"{ours}.attention")


def _add_attention(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    q, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    for name, begin, end in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
        made.add_linear(f"{theirs}.{name}_proj", f"{ours}.qkv", slice(begin, end), bias=spec.qkv_bias)
    made.add_linear(f"{theirs}.o_proj", f"{ours}.out", bias=spec.o_bias)
    if spec.qk_norm:
        made.add(f"{theirs}.q_norm.weight", f"{ours}.q_norm.weight")
        made.add(f"{theirs}.k_norm.weight", f"{ours}.k_norm.weight")


def _add_latent_attention(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
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
        biased = (lines,) if mla.q_lora is not None else ()  # full queries have none
        made.add(f"{theirs}.kv_a_proj_with_mqa.bias", f"{ours}.down.bias", *biased)
    made.add(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.weight")
    made.add(f"{theirs}.kv_b_proj.weight", f"{ours}.kv_up.weight")
    made.add_linear(f"{theirs}.o_proj", f"{ours}.out", bias=spec.o_bias)


def add_gated_mlp(made: WeightMap, spec: ModelSpec, theirs: str, ours: str) -> None:
    """A dense feed-forward block with the names ``gate_proj``, ``up_proj``, ``down_proj``."""
    n = spec.intermediate
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
    hashed: bool = False,
) -> None:
    """A router ``gate`` and stacked experts, published one by one or fused, and what else ``spec.moe`` has.

    names: what the family calls an expert's gate, up and down matrices. The fused form is
    ``experts.gate_up_proj`` [experts, 2 n, hidden] and ``experts.down_proj`` [experts, hidden, n].
    shared: the family's name of the shared expert. hashed: experts are chosen by the table ``gate.tid2eid``.
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
        made.add(f"{theirs}.{shared}.{gate}.weight", f"{ours}.shared.gate_up", slice(0, s))
        made.add(f"{theirs}.{shared}.{up}.weight", f"{ours}.shared.gate_up", slice(s, 2 * s))
        made.add(f"{theirs}.{shared}.{down}.weight", f"{ours}.shared.down")
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
