"""Why prompts were not found in the prefix cache, as answers show it (``--explain-cache``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.front.answers import ShownMiss
from weft.text.tokenizer import Tokenizer
from weft.types.messages import CacheMiss

HEADER = "x-weft-explain-cache"
SHOWN = 32
"""Tokens of either side of a difference."""


def explains(mode: str, headers: Mapping[str, str]) -> bool:
    """Whether a request with these headers is answered with the reason. ``mode``: of ``--explain-cache``."""
    asked = headers.get(HEADER, "").strip().lower() in ("1", "true", "yes")
    return mode == "all" or (mode == "asked" and asked)


def shown(miss: CacheMiss | None, prompt: bytes, tokenizer: Tokenizer) -> ShownMiss | None:
    """``miss`` of ``prompt`` (int32 ids) with the text of both sides of a difference."""
    if miss is None:
        return None
    if miss.reason != "differs":
        return ShownMiss(reason=miss.reason, position=miss.position)
    ours, theirs = np.frombuffer(prompt, "<i4"), np.frombuffer(miss.theirs, "<i4")
    return ShownMiss(
        reason=miss.reason,
        position=miss.position,
        ours=tokenizer.decode(ours[miss.position : miss.position + SHOWN].tolist()),
        theirs=tokenizer.decode(theirs[:SHOWN].tolist()),
    )
