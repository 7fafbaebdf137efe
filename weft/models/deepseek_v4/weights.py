"""DeepSeek V4: published weight names.

A tensor has up to three names: the published name, the name in memory of transformers, and the name in files
of transformers' ``save_pretrained`` (published leaves below ``model.``, some renamed).
"""

from __future__ import annotations

import re

from weft.config.spec import ModelSpec
from weft.models.weights import WeightMap


class _Map:
    """A ``WeightMap`` of tensors with several alternative names."""

    def __init__(self) -> None:
        self.made = WeightMap(ignored=[re.compile(r"(^|\.)mtp\."), re.compile(r"rotary_emb\.")])

    def add(self, names: tuple[str, ...], parameter: str, *index: int | slice) -> None:
        """Map each of ``names`` to ``parameter``. Exactly one of several names is expected in the files."""
        names = tuple(dict.fromkeys(names))
        for name in names:
            self.made.add(name, parameter, *index)
        if len(names) > 1:
            self.made.choices.append(tuple((name,) for name in names))

    def of_layer(
        self, layer: int, published: str, memory: str, parameter: str, *index: int | slice, saved: str = ""
    ) -> None:
        """Map a tensor of ``layer``. ``saved``: name in files of transformers, if not ``published``."""
        names = (
            f"layers.{layer}.{published}",
            f"model.layers.{layer}.{memory}",
            f"model.layers.{layer}.{saved or published}",
        )
        self.add(names, f"blocks.{layer}.{parameter}", *index)


def weight_map(spec: ModelSpec) -> WeightMap:
    """Return the weight map. MTP modules (``mtp``) are ignored."""
    found = _Map()
    embedding = ("embed.weight", "model.embed_tokens.weight", "model.embed.weight")
    found.add(embedding, "embedding.weight")
    if spec.tied:
        for name in ("head.weight", "lm_head.weight"):
            found.made.same_as[name] = embedding[0]
    elif spec.head:
        found.add(("head.weight", "lm_head.weight"), "head.weight")
    found.add(("norm.weight", "model.norm.weight"), "norm.weight")
    for leaf, ours in (("fn", "mixer.weight"), ("base", "base"), ("scale", "scale")):
        names = (f"hc_head_{leaf}", f"model.hc_head.hc_{leaf}", f"model.hc_head_{leaf}")
        found.add(names, f"streams_head.{ours}")
    for layer in range(spec.layers):
        _add_frame(found, layer)
        _add_attention(found, spec, layer)
        _add_feed_forward(found, spec, layer)
    return found.made


def _add_frame(found: _Map, layer: int) -> None:
    """Add the norms and stream connections of one layer to ``found``."""
    found.of_layer(layer, "attn_norm.weight", "input_layernorm.weight", "attention_norm.weight")
    found.of_layer(layer, "ffn_norm.weight", "post_attention_layernorm.weight", "feed_forward_norm.weight")
    for short, ours in (("attn", "attention_streams"), ("ffn", "feed_forward_streams")):
        for leaf, parameter in (("fn", "mixer.weight"), ("base", "base"), ("scale", "scale")):
            found.of_layer(layer, f"hc_{short}_{leaf}", f"{short}_hc.{leaf}", f"{ours}.{parameter}")


def _add_attention(found: _Map, spec: ModelSpec, layer: int) -> None:
    """Add the attention tensors of one layer to ``found``; tensors of groups only for layers with groups."""
    sparse = spec.sparse
    assert sparse is not None

    def add(published: str, memory: str, parameter: str, *index: slice, saved: str = "") -> None:
        saved = f"attn.{saved}" if saved else ""
        names = (f"attn.{published}", f"self_attn.{memory}", f"attention.{parameter}")
        found.of_layer(layer, *names, *index, saved=saved)

    dim = spec.head_dim
    queries = spec.heads * spec.head_dim
    low = sparse.q_lora
    add("wq_a.weight", "q_a_proj.weight", "down.weight", slice(0, low))
    add("q_norm.weight", "q_a_norm.weight", "q_norm.weight")
    add("wq_b.weight", "q_b_proj.weight", "q_up.weight", slice(0, queries))
    add("wkv.weight", "kv_proj.weight", "down.weight", slice(low, low + dim))
    add("kv_norm.weight", "kv_norm.weight", "line_norm.weight", saved="norm.weight")
    add("wo_a.weight", "o_a_proj.weight", "out_low.weight")
    add("wo_b.weight", "o_b_proj.weight", "out.weight")
    add("attn_sink", "sinks", "sinks")
    kind = sparse.types[layer]
    if kind == "window":
        return
    vectors = [("compressor", "compressor", dim)]
    if kind == "chosen":
        vectors.append(("indexer.compressor", "compressor.indexer", sparse.index_dim))
    # ``down`` continues with the rows of group sources: first all kv vectors, then all gate vectors.
    begin = low + dim
    for published, memory in (("wkv", "kv_proj"), ("wgate", "gate_proj")):
        for theirs, held, size in vectors:
            rows = size if kind == "all" else 2 * size
            names = (f"{theirs}.{published}.weight", f"{held}.{memory}.weight")
            add(*names, "down.weight", slice(begin, begin + rows))
            begin += rows
    for i, (theirs, held, _) in enumerate(vectors):
        add(f"{theirs}.ape", f"{held}.position_bias", f"compressor.biases.{i}")
        add(f"{theirs}.norm.weight", f"{held}.kv_norm.weight", f"compressor.norms.{i}")
    if kind == "chosen":
        rest = slice(begin, begin + sparse.index_heads)
        add(
            "indexer.weights_proj.weight",
            "compressor.indexer.scorer.weights_proj.weight",
            "down.weight",
            rest,
        )
        rest = slice(queries, queries + sparse.index_heads * sparse.index_dim)
        add("indexer.wq_b.weight", "compressor.indexer.q_b_proj.weight", "q_up.weight", rest)


def _add_feed_forward(found: _Map, spec: ModelSpec, layer: int) -> None:
    """Add router, shared experts and experts of one layer to ``found``."""
    moe = spec.moe
    assert moe is not None

    def add(published: str, memory: str, parameter: str, *index: int | slice) -> None:
        found.of_layer(layer, f"ffn.{published}", f"mlp.{memory}", f"feed_forward.{parameter}", *index)

    add("gate.weight", "gate.weight", "router.weight")
    if layer in moe.hash_layers:
        add("gate.tid2eid", "gate.tid2eid", "router.table")
    else:
        add("gate.bias", "gate.e_score_correction_bias", "router.correction")
    halves = (slice(0, moe.shared), slice(moe.shared, 2 * moe.shared))
    add("shared_experts.w1.weight", "shared_experts.gate_proj.weight", "shared.gate_up", halves[0])
    add("shared_experts.w3.weight", "shared_experts.up_proj.weight", "shared.gate_up", halves[1])
    add("shared_experts.w2.weight", "shared_experts.down_proj.weight", "shared.down")
    _add_experts(found.made, layer, moe.experts, moe.intermediate)


def _add_experts(made: WeightMap, layer: int, experts: int, n: int) -> None:
    """Add experts to ``made``, published one by one (also below ``model.``) or stacked (in memory)."""
    ours = f"blocks.{layer}.feed_forward.experts"
    forms = list[tuple[str, ...]]()
    for prefix in (f"layers.{layer}.ffn.experts", f"model.layers.{layer}.ffn.experts"):
        names = []
        for expert in range(experts):
            for leaf, parameter, index in (
                ("w1", "gate_up", (expert, slice(0, n))),
                ("w3", "gate_up", (expert, slice(n, 2 * n))),
                ("w2", "down", (expert,)),
            ):
                names.append(f"{prefix}.{expert}.{leaf}.weight")
                made.add(names[-1], f"{ours}.{parameter}", *index)
        forms.append(tuple(names))
    stacked = f"model.layers.{layer}.mlp.experts"
    made.add(f"{stacked}.gate_up_proj", f"{ours}.gate_up")
    made.add(f"{stacked}.down_proj", f"{ours}.down")
    made.choices.append((*forms, (f"{stacked}.gate_up_proj", f"{stacked}.down_proj")))
