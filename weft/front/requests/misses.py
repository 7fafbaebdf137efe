"""Reasons for prefix cache misses, as shown in answers (``--explain-cache``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.front.http.answers import ShownMiss
from weft.text.tokenizer import Tokenizer
from weft.types.messages import CacheMiss

HEADER = "x-weft-explain-cache"
SHOWN = 32
"""Tokens shown of either side of a difference."""


def explains(mode: str, headers: Mapping[str, str]) -> bool:
    """Return True if the answer to a request with ``headers`` includes the reason. ``mode``: value of
    ``--explain-cache``; "all" explains every request, "asked" requests with the header ``HEADER``."""
    asked = headers.get(HEADER, "").strip().lower() in ("1", "true", "yes")
    return mode == "all" or (mode == "asked" and asked)


def shown(miss: CacheMiss | None, prompt: bytes, tokenizer: Tokenizer) -> ShownMiss | None:
    """Return ``miss`` of ``prompt`` (int32 ids) for an answer; None for no miss. For reason "differs" the
    result has up to ``SHOWN`` tokens of text of both sides."""
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
