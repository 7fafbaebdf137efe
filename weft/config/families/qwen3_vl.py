"""Qwen3-VL, dense and with routed experts: text model of Qwen3, vision tower in ``vision.py``.

Source: arXiv 2511.21631.
"""

from __future__ import annotations

import msgspec

from weft.config.families.common import FULL, Defaults, decoder_spec, layer_count, text_spec
from weft.config.families.declared.experts import experts_by_step
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec

_SECTIONS = (24, 20, 20)
_DENSE = Defaults(kv_heads=32, head_dim=128, max_position=128000, theta=500000.0, sections=_SECTIONS)
_ROUTED = Defaults(kv_heads=16, max_position=128000, theta=500000.0, sections=_SECTIONS)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of the text model.

    All layers use full attention. Routed variants route like Qwen3-MoE.
    """
    return text_spec(facts, override, _text)


def _text(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of the text model from the fields of ``text_config``. Raise ConfigError."""
    layers = layer_count(facts, override)
    moe = experts_by_step(facts, layers, 60, 4, 1408) if "Moe" in facts.get("architectures")[0] else None
    bias = facts.flag("attention_bias", False)
    spec = decoder_spec(
        facts,
        family="qwen3_vl",
        layers=layers,
        defaults=_DENSE if moe is None else _ROUTED,
        window=None,
        types=[FULL] * layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=moe,
    )
    if moe is None:
        return spec
    # All routers of the family scale the weights of the chosen experts to sum to 1; no field states so.
    return msgspec.structs.replace(spec, moe=msgspec.structs.replace(moe, renormalize=True))
