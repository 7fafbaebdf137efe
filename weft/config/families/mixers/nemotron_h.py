"""Nemotron-H and Nemotron 3: published layers of one part each: Mamba2, attention, feed-forward or experts.

A layer of the spec is a mixer (Mamba2 or attention) together with the feed-forward or experts published
behind it. A mixer followed by a mixer is a layer without feed-forward. So every layer has a cache, as in all
other families. Attention has no rotary embedding.

Source: Nemotron-H, arXiv 2504.03624; NVIDIA Nemotron 3 (2025); the published configurations.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.mixers.state_caches import mamba_cache, time_step_limits
from weft.config.parts.mixers import MambaSpec
from weft.config.spec import ModelSpec, MoESpec, RopeSpec

MAMBA, ATTENTION, DENSE, ROUTED = "mamba", "attention", "mlp", "moe"

_LETTERS = {"M": MAMBA, "*": ATTENTION, "-": DENSE, "E": ROUTED}
_NAMES = {
    **{kind: kind for kind in _LETTERS.values()},
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
}
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "mamba_proj_bias": (False,),
    "residual_in_fp32": (False,),
    "sliding_window": (None,),
    "mamba_hidden_act": ("silu",),
    "mlp_hidden_act": ("relu2",),
}
"""Fields with the only value that is computed. Any other value is refused."""
_DEFAULTS = Defaults(kv_heads=8, head_dim=128, max_position=4096, intermediate=21504, bos_id=1, eos_ids=(2,))


class _Layers(NamedTuple):
    """Layers of the spec, by part."""

    mixers: list[str]
    dense: tuple[int, ...]
    routed: tuple[int, ...]
    bare: tuple[int, ...]


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. ``override`` counts published layers. Raise ConfigError."""
    for name, values in _ONLY.items():
        if facts.get(name) not in (None, *values):
            raise facts.fail(name, f"= {facts.get(name)!r} is not supported by this version")
    facts.get("partial_rotary_factor")  # there is no rotation
    layers = _layers(facts, _parts(facts, override))
    moe = _moe(facts, layers.routed)
    mamba = _mamba(facts, tuple(i for i, kind in enumerate(layers.mixers) if kind == MAMBA))
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    stated = facts.integer("attention_head_dim", 128) if "attention_head_dim" in facts else None
    result = decoder_spec(
        facts,
        family="nemotron_h",
        layers=len(layers.mixers),
        defaults=msgspec.structs.replace(_DEFAULTS, head_dim=stated or 128),
        window=None,
        types=[FULL if kind == ATTENTION else kind for kind in layers.mixers],
        rope=RopeSpec(dim=0, max_position=positions),
        activation="relu2",
        gated=False,
        bare_layers=layers.bare,
        norm_eps=facts.number("layer_norm_epsilon", 1e-5),
        moe=moe,
    )
    if not layers.dense and moe is not None:
        result = msgspec.structs.replace(result, intermediate=moe.intermediate)
    if not mamba.layers:
        return result
    return msgspec.structs.replace(result, mamba=mamba, caches=(*result.caches, mamba_cache(mamba)))


def _parts(facts: Facts, override: int | None) -> list[str]:
    """Return the part of each published layer, of the first ``override`` layers. Raise ConfigError."""
    pattern, names = facts.get("hybrid_override_pattern"), facts.get("layers_block_type")
    names = facts.get("layer_types") if names is None else names
    if names is None:
        if not isinstance(pattern, str) or not pattern or any(one not in _LETTERS for one in pattern):
            raise facts.fail("hybrid_override_pattern", f"must be letters of M, *, - and E, not {pattern!r}")
        parts = [_LETTERS[one] for one in pattern]
    else:
        if not isinstance(names, list) or not names or any(one not in _NAMES for one in names):
            raise facts.fail("layers_block_type", f"must be a list of {', '.join(_NAMES)}, not {names!r}")
        parts = [_NAMES[one] for one in names]
    facts.get("num_hidden_layers")  # follows from the list
    if len(parts) > MOST_PARTS:
        raise facts.fail("layers_block_type", f"has more than {MOST_PARTS} layers")
    if override is not None and not 1 <= override <= len(parts):
        raise facts.fail(
            "layers_block_type",
            f"has {len(parts)} layers, so --num-hidden-layers-override must be between 1 and {len(parts)}",
        )
    return parts[:override]


def _layers(facts: Facts, parts: list[str]) -> _Layers:
    """Return the layers of the spec for the parts of published layers. Raise ConfigError for a feed-forward
    without a mixer before.
    """
    mixers = list[str]()
    behind = dict[int, str]()
    for number, part in enumerate(parts):
        if part in (MAMBA, ATTENTION):
            mixers.append(part)
        elif not mixers or len(mixers) - 1 in behind:
            raise facts.fail(
                "layers_block_type",
                f"has {part} in layer {number} without {MAMBA} or {ATTENTION} directly before; this is not "
                "supported by this version",
            )
        else:
            behind[len(mixers) - 1] = part
    numbers = range(len(mixers))
    return _Layers(
        mixers,
        dense=tuple(i for i in numbers if behind.get(i) == DENSE),
        routed=tuple(i for i in numbers if behind.get(i) == ROUTED),
        bare=tuple(i for i in numbers if i not in behind),
    )


def _mamba(facts: Facts, layers: tuple[int, ...]) -> MambaSpec:
    """Return the Mamba2 spec for ``layers``. Raise ConfigError."""
    heads = facts.integer("mamba_num_heads", 128)
    groups = facts.integer("n_groups", 8)
    if heads % groups:
        raise facts.fail("mamba_num_heads", f"{heads} is not a multiple of n_groups {groups}")
    low, high = time_step_limits(facts)
    return MambaSpec(
        layers=layers,
        heads=heads,
        dim=facts.integer("mamba_head_dim", 64),
        groups=groups,
        state=facts.integer("ssm_state_size", 128),
        conv=facts.integer("conv_kernel", 4, low=2, high=64),
        conv_bias=facts.flag("use_conv_bias", True),
        bias=facts.flag("use_bias", False),
        norm_groups=groups,
        low=low,
        high=high,
    )


def _moe(facts: Facts, routed: tuple[int, ...]) -> MoESpec | None:
    """Return the routed experts, or None if no layer routes. Raise ConfigError."""
    shared_experts = facts.integer("n_shared_experts", 1, low=0)
    if not routed:
        return None
    if shared_experts != 1:
        raise facts.fail("n_shared_experts", f"= {shared_experts} is not supported; there is: 1")
    experts = facts.integer("n_routed_experts", 8, high=MOST_PARTS)
    groups, chosen = facts.integer("n_group", 1), facts.integer("topk_group", 1)
    top_k = facts.integer("num_experts_per_tok", 2)
    if experts % groups or chosen > groups or (groups > 1 and experts // groups < 2):
        raise facts.fail("n_group", f"{groups} does not fit {experts} experts and topk_group {chosen}")
    if top_k > experts // groups * chosen:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than the experts of topk_group {chosen}")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("moe_intermediate_size", 7688),
        renormalize=facts.flag("norm_topk_prob", True),
        layers=routed,
        scoring="sigmoid",
        correction=True,
        groups=groups,
        top_groups=chosen,
        group_rule="top2",
        scale=facts.number("routed_scaling_factor", 1.0),
        shared=facts.integer("moe_shared_expert_intermediate_size", 7688),
        gated=False,
        latent=facts.optional_integer("moe_latent_size") or 0,
    )
