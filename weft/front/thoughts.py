"""Thoughts in the opaque form that clients carry back who keep nothing else of an answer.

It is the text, encoded: whoever holds it may read and change it, as any other part of their conversation.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "weft1."


def sealed(thought: str) -> str:
    """``thought`` in that form."""
    return _MARK + base64.b64encode(thought.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """The thought in it; "" where another server wrote it, or nobody."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
