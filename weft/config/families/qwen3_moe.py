"""Qwen3 with routed experts in some or all feed-forward layers. Source: arXiv 2505.09388."""

from __future__ import annotations

from weft.config.families.common import (
    Defaults,
    decoder_spec,
    layer_count,
    refuse_sliding_types,
    uniform_window,
)
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import ModelSpec, MoESpec

_DEFAULTS = Defaults(kv_heads=4)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec.

    Layer i routes if ``decoder_sparse_step`` divides i + 1 and i is not in ``mlp_only_layers``. Raise
    ConfigError.

    With ``use_sliding_window`` all layers use the window; the family has no ``max_window_layers``.
    """
    refuse_sliding_types(facts)
    layers = layer_count(facts, override)
    window = None
    if facts.flag("use_sliding_window", False):
        window = facts.optional_integer("sliding_window") if "sliding_window" in facts else 4096
    window, types = uniform_window(window, layers)
    bias = facts.flag("attention_bias", False)
    return decoder_spec(
        facts,
        family="qwen3_moe",
        layers=layers,
        defaults=_DEFAULTS,
        window=window,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=experts(facts, layers, 128, 8, 768),
    )


def experts(facts: Facts, layers: int, count: int, top_k: int, intermediate: int) -> MoESpec | None:
    """Return the routing of the layers, or None if no layer routes. Raise ConfigError.

    ``count``, ``top_k`` and ``intermediate``: defaults for missing fields.
    """
    # transformers 5 writes num_local_experts, older files have num_experts.
    field = "num_experts" if "num_experts" in facts else "num_local_experts"
    count = facts.integer(field, count, low=0, high=MOST_PARTS)
    step = facts.integer("decoder_sparse_step", 1)
    dense = facts.integers("mlp_only_layers")
    routed = tuple(i for i in range(layers) if count and i not in dense and (i + 1) % step == 0)
    if not routed:
        return None
    top_k = facts.integer("num_experts_per_tok", top_k)
    if top_k > count:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than {field} {count}")
    return MoESpec(
        experts=count,
        top_k=top_k,
        intermediate=facts.integer("moe_intermediate_size", intermediate),
        renormalize=facts.flag("norm_topk_prob", False),
        layers=routed,
    )
