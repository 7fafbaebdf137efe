"""Readers of the traits of Llama, Mistral, Mixtral and Qwen3: windows over all layers, softmax experts."""

from __future__ import annotations

from weft.config.families.common import refuse_sliding_types, uniform_window
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import MoESpec


def full_layers(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (None, type of each layer) for full attention. Raise ConfigError for layers with a window."""
    refuse_sliding_types(facts)
    return uniform_window(None, layers)


def window_everywhere(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) by ``sliding_window``; null means full attention.

    Raise ConfigError for windows per layer.
    """
    refuse_sliding_types(facts)
    return uniform_window(facts.optional_integer("sliding_window"), layers)


def switched_window(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer): a window in all layers with ``use_sliding_window``, else none.

    Raise ConfigError for windows per layer.
    """
    on = facts.flag("use_sliding_window", False)
    facts.get("max_window_layers")  # a setting of Qwen2 and of dense Qwen3
    window, types = window_everywhere(facts, layers)
    return (window, types) if on else uniform_window(None, layers)


def mixtral_experts(facts: Facts, layers: int) -> MoESpec:
    """Return the routing of Mixtral: all layers. The weights of the chosen experts always sum to 1.

    Raise ConfigError.
    """
    experts = facts.integer("num_local_experts", high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok")
    check_top_k(facts, "num_experts_per_tok", top_k, experts)
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("intermediate_size"),
        renormalize=True,
        layers=tuple(range(layers)),
    )


def qwen_experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routing of Qwen3 with experts, or None if no layer routes.

    Layer i routes if ``decoder_sparse_step`` divides i + 1 and i is not in ``mlp_only_layers``. Raise
    ConfigError.
    """
    return experts_by_step(facts, layers)


def experts_by_step(
    facts: Facts, layers: int, count: int | None = None, top_k: int | None = None, inner: int | None = None
) -> MoESpec | None:
    """Return ``qwen_experts`` with defaults for missing fields: numbers of experts and chosen experts, size.

    Raise ConfigError for a missing field without a default.
    """
    # transformers 5 writes num_local_experts, older files have num_experts.
    field = "num_experts" if "num_experts" in facts else "num_local_experts"
    experts = facts.integer(field, count, low=0, high=MOST_PARTS)
    step = facts.integer("decoder_sparse_step", 1)
    dense = facts.integers("mlp_only_layers")
    routed = tuple(i for i in range(layers) if experts and i not in dense and (i + 1) % step == 0)
    if not routed:
        return None
    chosen = facts.integer("num_experts_per_tok", top_k)
    check_top_k(facts, "num_experts_per_tok", chosen, experts)
    return MoESpec(
        experts=experts,
        top_k=chosen,
        intermediate=facts.integer("moe_intermediate_size", inner),
        renormalize=facts.flag("norm_topk_prob", False),
        layers=routed,
    )


def check_top_k(facts: Facts, name: str, top_k: int, experts: int) -> None:
    """Raise ConfigError if the field ``name`` chooses more than ``experts`` experts."""
    if top_k > experts:
        raise facts.fail(name, f"{top_k} is more than the {experts} experts")
