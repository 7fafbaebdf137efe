"""Jamba: Mamba 1 in most layers, grouped-query attention without rotation in the others; a dense feed-forward
or routed experts in every layer.

Source: arXiv 2403.19887; the configuration class of transformers.
"""

from __future__ import annotations

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count
from weft.config.families.declared.build import refuse_others
from weft.config.families.declared.row import Row
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.mixers.mamba1 import mamba1_spec
from weft.config.families.mixers.state_caches import mamba1_cache
from weft.config.spec import ModelSpec, MoESpec, RopeSpec

MAMBA = "linear_attention"

_DEFAULTS = Defaults(kv_heads=8, max_position=262144, intermediate=14336, bos_id=1, eos_ids=(2,))
_ROW = Row(
    config="JambaConfig",
    only={"mamba_inner_layernorms": (True, None), "sliding_window": (None,)},
    # Choices between equal computations, the number of prompt logits, the context of the first release.
    # Nothing rotates.
    unused=(
        "use_mamba_kernels|use_mambapy|use_associative_scan",
        "num_logits_to_keep",
        "n_ctx",
        "rope_theta",
    ),
)


def build_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Raise ConfigError."""
    facts = given.completed({"hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 65536}, {})
    layers = layer_count(facts, override)
    types = [FULL if attends else MAMBA for attends in _every(facts, "attn", layers, 8, 4)]
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    spec = decoder_spec(
        facts,
        family="jamba",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=types,
        rope=RopeSpec(dim=0, max_position=positions),
        moe=_experts(facts, layers),
    )
    recurrent = tuple(i for i, kind in enumerate(types) if kind == MAMBA)
    mamba = mamba1_spec(
        facts,
        recurrent,
        inner=facts.integer("mamba_expand", 2) * spec.hidden,
        names=("mamba_d_state", "mamba_d_conv", "mamba_conv_bias", "mamba_proj_bias", "mamba_dt_rank"),
        norm="weighted",
        norm_eps=spec.norm_eps,
    )
    refuse_others(_ROW, facts, {})
    if not recurrent:
        return spec
    return msgspec.structs.replace(spec, mamba1=mamba, caches=(*spec.caches, mamba1_cache(mamba)))


def _every(facts: Facts, part: str, layers: int, period: int, offset: int) -> list[bool]:
    """Return True for each layer with the part: number ``offset`` of every ``period`` layers.

    period, offset: defaults of ``{part}_layer_period`` and ``{part}_layer_offset``. Raise ConfigError.
    """
    period = facts.integer(f"{part}_layer_period", period)
    offset = facts.integer(f"{part}_layer_offset", offset, low=0)
    if offset >= period:
        raise facts.fail(f"{part}_layer_offset", f"{offset} is not below {part}_layer_period {period}")
    return [layer % period == offset for layer in range(layers)]


def _experts(facts: Facts, layers: int) -> MoESpec | None:
    """Return the routed experts, or None without routing layers. Raise ConfigError."""
    experts = facts.integer("num_experts", 16, high=MOST_PARTS)
    top_k = facts.integer("num_experts_per_tok", 2)
    routed = tuple(i for i, routes in enumerate(_every(facts, "expert", layers, 2, 1)) if routes)
    if experts == 1 or not routed:
        return None
    if top_k > experts:
        raise facts.fail("num_experts_per_tok", f"{top_k} is more than num_experts {experts}")
    return MoESpec(
        experts=experts,
        top_k=top_k,
        intermediate=facts.integer("intermediate_size", _DEFAULTS.intermediate),
        renormalize=False,
        layers=routed,
    )
