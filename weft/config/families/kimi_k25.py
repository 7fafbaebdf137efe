"""Kimi K2.5: text model of DeepSeek V3, vision tower in ``vision.py``. Source: arXiv 2602.02276."""

from __future__ import annotations

import msgspec

from weft.config.families.common import text_spec
from weft.config.families.deepseek import build_v3
from weft.config.families.facts import Facts
from weft.config.spec import ModelSpec


def build_spec(facts: Facts, override: int | None) -> ModelSpec:
    """Return the spec of the text model. Image tokens take positions like text tokens."""
    return msgspec.structs.replace(text_spec(facts, override, build_v3), family="kimi_k25")
