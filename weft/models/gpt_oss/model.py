"""GPT-OSS: the layers of Mixtral; windows, sinks and the experts' biases are the spec's."""

from __future__ import annotations

from weft.models.mixtral.model import make_block

__all__ = ["make_block"]
