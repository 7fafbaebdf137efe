"""GPT-OSS: attention sinks, a window in every second layer, routed experts with biases.

Source: arXiv 2508.10925.
"""

from __future__ import annotations

from weft.config.families.common import FULL, SLIDING, Defaults, decoder_spec, layer_count, layer_types
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import ModelSpec, MoESpec

_DEFAULTS = Defaults(kv_heads=8, head_dim=64, max_position=131072, norm_eps=1e-5, theta=150000.0)
_WINDOW = 128


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec.

    Without ``layer_types`` even layers use the window. Gates are clamped and steeper than silu. Raise
    ConfigError.
    """
    layers = layer_count(facts, override)
    types = layer_types(facts) or [FULL if i % 2 else SLIDING for i in range(layers)]
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    types = types[:layers]
    # An explicit null means no window; a missing field means the default.
    window = facts.optional_integer("sliding_window") if "sliding_window" in facts else _WINDOW
    if window is None and SLIDING in types:
        raise facts.fail("layer_types", f"has {SLIDING}, so sliding_window must be set")
    bias = facts.flag("attention_bias", True)
    experts = facts.integer("num_local_experts", 128, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 4)
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than num_local_experts {experts}")
    return decoder_spec(
        facts,
        family="gpt_oss",
        layers=layers,
        defaults=_DEFAULTS,
        window=window,
        types=types,
        qkv_bias=bias,
        o_bias=bias,
        sinks=True,
        moe=MoESpec(
            experts=experts,
            top_k=top_k,
            intermediate=facts.integer("intermediate_size"),
            renormalize=True,
            layers=tuple(range(layers)),
            limit=facts.number("swiglu_limit", 7.0),
            alpha=facts.number("swiglu_alpha", 1.702),
            bias=True,
        ),
    )
