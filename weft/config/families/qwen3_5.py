"""Qwen3.5, dense and with routed experts: the layers of Qwen3-Next with different projection names.

Published checkpoints also contain a vision tower (``...ForConditionalGeneration``): see ``vision.py``.
Source: the model cards of Qwen/Qwen3.5-27B and Qwen3.5-35B-A3B.
"""

from __future__ import annotations

from weft.config.families.common import Defaults, layer_count, text_spec
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.qwen3_next import hybrid_spec, moe_spec, predicting_modules
from weft.config.spec import ModelSpec

_SECTIONS = (11, 11, 10)
_DENSE = Defaults(kv_heads=4, head_dim=256, partial=0.25, sections=_SECTIONS)
_ROUTED = Defaults(kv_heads=2, head_dim=256, partial=0.25, sections=_SECTIONS, intermediate=1)


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec. The architecture decides if layers route: all layers, or none. Raise ConfigError."""
    layers = layer_count(facts, override)
    mtp = predicting_modules(facts, "mtp_num_hidden_layers")
    moe = None
    if "Moe" in facts.get("architectures")[0]:
        experts = facts.integer("num_experts", 256, high=MOST_PARTS)
        moe = moe_spec(facts, tuple(range(layers + mtp)), experts, top_k=8, renormalize=True)
    defaults = _DENSE if moe is None else _ROUTED
    return hybrid_spec(
        facts, family="qwen3_5", layers=layers, mtp=mtp, defaults=defaults, matrices=4, moe=moe
    )


def build_text_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of the text model of a checkpoint with images."""
    return text_spec(facts, override, build_spec)
