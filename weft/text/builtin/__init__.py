"""Conversation formats of models whose publishers ship no chat template."""

from __future__ import annotations

from importlib import resources

_FILES = {"deepseek_v32": "deepseek_v32.jinja", "deepseek_v4": "deepseek_v4.jinja"}
"""``model_type`` of config.json -> template."""


def builtin_template(model_type: str) -> str | None:
    """Return the chat template for models of ``model_type``; None without a template of Weft."""
    name = _FILES.get(model_type)
    return None if name is None else (resources.files(__package__) / name).read_text(encoding="utf-8")
