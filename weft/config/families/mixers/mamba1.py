"""Mamba and Falcon Mamba: a Mamba 1 in every layer, no attention and no feed-forward.

Falcon Mamba has RMSNorms without weights for the time step vector, B and C.
Source: arXiv 2312.00752 and 2410.05355; the configuration classes of transformers.
"""

from __future__ import annotations

import math
from typing import Literal

from weft.config.families.common import Defaults, decoder_spec, layer_count
from weft.config.families.declared.build import refuse_others
from weft.config.families.declared.row import Row
from weft.config.families.facts import Facts
from weft.config.families.mixers.state_caches import mamba1_cache
from weft.config.parts.mixers import Mamba1Spec
from weft.config.spec import ModelSpec, RopeSpec

_DEFAULTS = Defaults(max_position=1 << 18, intermediate=1, bos_id=0, eos_ids=(0,))
"""No field limits the context."""
_ROW = Row(
    config="MambaConfig",
    renamed={"layer_norm_epsilon": "rms_norm_eps"},
    # The initialization alone reads the first group. The second group chooses between equal computations.
    # transformers does not read the third group, which files of the first publisher have. Nothing rotates or
    # attends.
    unused=(
        r"time_step_(scale|min|max|init_scheme|floor)|rescale_prenorm_residual",
        r"use_(falcon_)?mambapy|use_associative_scan",
        r"d_inner|d_model|n_layer|ssm_cfg|rms_norm|fused_add_norm|pad_vocab_size_multiple",
        "rope_theta|num_(attention|key_value)_heads|head_dim",
    ),
)
_MOST_HEADS = 16


def build_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec of Mamba. Raise ConfigError."""
    return _spec(given, override, "none")


def build_falcon_spec(given: Facts, override: int | None) -> ModelSpec:
    """Return the spec of Falcon Mamba. Raise ConfigError."""
    return _spec(given, override, "unit")


def _spec(given: Facts, override: int | None, norm: Literal["none", "unit"]) -> ModelSpec:
    """Return the spec. ``norm``: see ``Mamba1Spec``. Raise ConfigError."""
    facts = given.completed(
        {
            "hidden_size": 768,
            "num_hidden_layers": 32,
            "vocab_size": 50280,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
        },
        _ROW.renamed,
    )
    layers = layer_count(facts, override)
    # A stated width replaces the multiple of the hidden size, as in transformers.
    inner = facts.integer("intermediate_size", facts.integer("expand", 2) * facts.integer("hidden_size"))
    mamba = mamba1_spec(
        facts,
        tuple(range(layers)),
        inner=inner,
        names=("state_size", "conv_kernel", "use_conv_bias", "use_bias", "time_step_rank"),
        norm=norm,
        norm_eps=1e-6 if norm == "none" else facts.number("mixer_rms_eps", 1e-6),
    )
    positions = facts.integer("max_position_embeddings", _DEFAULTS.max_position)
    spec = decoder_spec(
        facts,
        family="mamba1",
        layers=layers,
        defaults=_DEFAULTS,
        window=None,
        types=(),
        rope=RopeSpec(dim=0, max_position=positions),
        bare_layers=tuple(range(layers)),
        # No layer attends: the heads of the spec are the parts of the channels.
        heads=mamba.heads,
        kv_heads=mamba.heads,
        head_dim=mamba.dim,
        intermediate=inner,
        mamba1=mamba,
        wide_stream=facts.flag("residual_in_fp32", True),
        caches=(mamba1_cache(mamba),),
    )
    refuse_others(_ROW, facts, {})
    return spec


def mamba1_spec(
    facts: Facts,
    layers: tuple[int, ...],
    *,
    inner: int,
    names: tuple[str, str, str, str, str],
    norm: Literal["none", "unit", "weighted"],
    norm_eps: float,
) -> Mamba1Spec:
    """Return the Mamba 1 spec for ``layers`` with ``inner`` channels. Raise ConfigError.

    names: the family's names of state size, taps, bias of the convolution, bias of projections, and rank of
    the time steps, which may be "auto".
    """
    state, taps, conv_bias, bias, rank = names
    if facts.activation() != "silu":
        raise facts.fail("hidden_act", f"{facts.activation()!r} is not supported in Mamba layers")
    hidden = facts.integer("hidden_size")
    # The number of ranks must divide the number of heads. Few wide heads are faster than many narrow heads.
    heads = math.gcd(inner, _MOST_HEADS)
    return Mamba1Spec(
        layers=layers,
        heads=heads,
        dim=inner // heads,
        state=facts.integer(state, 16),
        rank=-(-hidden // 16) if facts.get(rank) in (None, "auto") else facts.integer(rank),
        conv=facts.integer(taps, 4, low=2, high=64),
        conv_bias=facts.flag(conv_bias, True),
        bias=facts.flag(bias, False),
        norm=norm,
        norm_eps=norm_eps,
    )
