"""Readers of traits that several rows share: windows and routed experts."""

from __future__ import annotations

from weft.config.families.common import FULL, SLIDING, layer_types
from weft.config.families.declared.row import Experts
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.spec import MoESpec


def typed_windows(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) by ``layer_types``; else window layers from ``max_window_layers``.

    Raise ConfigError.
    """
    window = facts.optional_integer("sliding_window")
    types = layer_types(facts)
    first = facts.integer("max_window_layers", layers, low=0)
    if types is None:
        types = [SLIDING if window is not None and i >= first else FULL for i in range(layers)]
    return checked_types(facts, window, types, layers)


def one_window(facts: Facts, layers: int) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer) for one window in all layers, or none. Raise ConfigError."""
    window = facts.optional_integer("sliding_window")
    return window, [FULL if window is None else SLIDING] * layers


def checked_types(
    facts: Facts, window: int | None, types: list[str], layers: int
) -> tuple[int | None, list[str]]:
    """Return (window, type of each layer). Raise ConfigError for short lists and missing windows."""
    if len(types) < layers:
        raise facts.fail("layer_types", f"has {len(types)} entries for {layers} layers")
    if SLIDING in types[:layers] and window is None:
        raise facts.fail("layer_types", f"has {SLIDING}, so sliding_window must be set")
    return window, types[:layers]


def grouped_sigmoid(*, shared: bool = True) -> Experts:
    """Return the reader of experts with sigmoid scores, a correction and groups, as in DeepSeek V3.

    ``shared``: True if there are ``n_shared_experts``.
    """

    def read(facts: Facts, layers: int) -> MoESpec | None:
        """Return the routing. Raise ConfigError."""
        for name, only in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
            if (facts.get(name) or only) != only:
                raise facts.fail(name, f"{facts.get(name)!r} is not supported; there is: {only}")
        first = facts.integer("first_k_dense_replace", 0, low=0)
        routed = tuple(range(first, layers))
        if not routed or not facts.get("n_routed_experts"):
            return None
        experts = facts.integer("n_routed_experts", high=MOST_PARTS)
        groups = facts.integer("n_group", 1)
        chosen = facts.integer("topk_group", 1)
        top_k = facts.integer("num_experts_per_tok")
        if experts % groups or chosen > groups or (groups > 1 and experts // groups < 2):
            raise facts.fail("n_group", f"{groups} does not fit {experts} experts and topk_group {chosen}")
        check_top_k(facts, "num_experts_per_tok", top_k, experts // groups * chosen)
        inner = facts.integer("moe_intermediate_size")
        return MoESpec(
            experts=experts,
            top_k=top_k,
            intermediate=inner,
            renormalize=facts.flag("norm_topk_prob", False),
            layers=routed,
            scoring="sigmoid",
            correction=True,
            groups=groups,
            top_groups=chosen,
            group_rule="top2",
            scale=facts.number("routed_scaling_factor", 1.0),
            shared=facts.integer("n_shared_experts", 0, low=0) * inner if shared else 0,
        )

    return read


def check_top_k(facts: Facts, name: str, top_k: int, experts: int) -> None:
    """Raise ConfigError if the field ``name`` chooses more than ``experts`` experts."""
    if top_k > experts:
        raise facts.fail(name, f"{top_k} is more than the {experts} experts")
