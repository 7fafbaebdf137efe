"""Reasoning in an opaque form, for clients that send back only the opaque form.

The opaque form is the encoded text. Any holder may read and change the text, like any other part of the
conversation.
"""

from __future__ import annotations

import base64
import binascii

_MARK = "weft1."


def sealed(reasoning: str) -> str:
    """Return ``reasoning`` in the opaque form."""
    return _MARK + base64.b64encode(reasoning.encode("utf-8", "replace")).decode()


def unsealed(text: str) -> str:
    """Return the reasoning of the opaque form; "" for text of another server, or invalid text. Never
    raises."""
    if not text.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(text.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
