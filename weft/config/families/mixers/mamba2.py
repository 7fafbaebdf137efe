"""Mamba2 alone: a Mamba2 in every layer, no attention and no feed-forward.

Source: arXiv 2405.21060; the model card of mistralai/Mamba-Codestral-7B-v0.1.
"""

from __future__ import annotations

from weft.config.families.common import Defaults, decoder_spec, layer_count
from weft.config.families.declared.build import refuse_others
from weft.config.families.declared.row import Row
from weft.config.families.facts import Facts
from weft.config.families.mixers.state_caches import mamba_cache, time_step_limits
from weft.config.parts.mixers import MambaSpec
from weft.config.spec import ModelSpec, RopeSpec

_DEFAULTS = Defaults(max_position=1 << 18, intermediate=1, bos_id=0, eos_ids=(2,))
"""No field limits the context. Codestral Mamba was tested with up to 256 thousand tokens."""
_ROW = Row(
    config="Mamba2Config",
    # No layer attends: the heads of the spec are those of Mamba2.
    renamed={"layer_norm_epsilon": "rms_norm_eps", "num_heads": "num_attention_heads"},
    # Kernels or the initialization alone read the first group. Nothing rotates. transformers does not read
    # the last group.
    unused=(
        r"chunk_size|time_step_(rank|min|max|floor)|rescale_prenorm_residual",
        "rope_theta",
        "norm_before_gate|rms_norm",
    ),
)


def build_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec. Raise ConfigError."""
    facts = given.completed(
        {
            "num_attention_heads": 128,
            "hidden_size": 4096,
            "head_dim": 64,
            "num_hidden_layers": 64,
            "vocab_size": 32768,
            "rms_norm_eps": 1e-5,
        },
        _ROW.renamed,
    )
    layers = layer_count(facts, override)
    mamba = _mamba(facts, layers)
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    spec = decoder_spec(
        facts,
        family="mamba2",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=(),
        rope=RopeSpec(dim=0, max_position=positions),
        bare_layers=tuple(range(layers)),
        intermediate=mamba.heads * mamba.dim,
        mamba=mamba,
        wide_stream=facts.flag("residual_in_fp32", True),
        caches=(mamba_cache(mamba),),
    )
    refuse_others(_ROW, facts, {})
    return spec


def _mamba(facts: Facts, layers: int) -> MambaSpec:
    """Return the Mamba2 spec of all layers. Raise ConfigError."""
    heads, dim = facts.integer("num_attention_heads"), facts.integer("head_dim")
    groups = facts.integer("n_groups", 8)
    if heads % groups:
        raise facts.fail("num_heads", f"{heads} is not a multiple of n_groups {groups}")
    inner = facts.integer("expand", 2) * facts.integer("hidden_size")
    if inner != heads * dim:
        raise facts.fail("num_heads", f"{heads} times head_dim {dim} is not expand * hidden_size = {inner}")
    if facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in Mamba layers")
    low, high = time_step_limits(facts)
    return MambaSpec(
        layers=tuple(range(layers)),
        heads=heads,
        dim=dim,
        groups=groups,
        state=facts.integer("state_size", 128),
        conv=facts.integer("conv_kernel", 4, low=2, high=64),
        conv_bias=facts.flag("use_conv_bias", True),
        bias=facts.flag("use_bias", False),
        norm_groups=groups,
        low=low,
        high=high,
    )
