"""GPT-OSS: the layers of Mixtral. The spec enables windows, sinks and biases of experts."""

from __future__ import annotations

from weft.models.declared.model import make_block

__all__ = ["make_block"]
