"""Values in JSON schemas: validity, and the limits of grammars."""

from __future__ import annotations

import json
from typing import Any

from weft.common.errors import InvalidRequest

MAX_COUNT = 100_000
"""Maximum value of minItems, maxLength and similar keywords."""
MAX_EXACT = 2**53
"""Largest integer that every JSON reader represents exactly."""


class Unenforceable(InvalidRequest):
    """The keyword is valid, but no grammar can enforce the keyword."""


def count(value: Any, at: str) -> int:
    """Return ``value`` as a count. Raises InvalidRequest, or Unenforceable beyond ``MAX_COUNT``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"a number of at least 0 is expected (at {at})")
    if value > MAX_COUNT:
        raise Unenforceable(f"a number of at most {MAX_COUNT} is expected (at {at})")
    return value


def bound(value: Any, at: str) -> float:
    """Return ``value`` as a numeric bound. Raises InvalidRequest, or Unenforceable for a value too large or
    too close to 0."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"a number is expected (at {at})")
    if abs(value) > MAX_EXACT or (value != 0 and abs(value) < 1e-12):
        raise Unenforceable(f"the number is too large, or too close to 0 (at {at})")
    return value


def check_constant(value: Any, at: str) -> None:
    """Raise Unenforceable for a number without a unique JSON spelling, at any depth.

    Strings are checked by ``check_text``.
    """
    # An explicit stack: a client's constant may be deep.
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            check_text(one, at)
        elif isinstance(one, float) or (isinstance(one, int) and not isinstance(one, bool)):
            if abs(one) > MAX_EXACT or (one != 0 and abs(one) < 1e-12):
                raise Unenforceable(f"the number is too large, or too close to 0 (at {at})")
        elif isinstance(one, dict):
            stack.extend([*one, *one.values()])
        elif isinstance(one, list):
            stack.extend(one)


def check_text(text: str, at: str) -> None:
    """Raise Unenforceable for a text with control characters or lone surrogates."""
    if any((ord(char) < 0x20 and char not in "\b\f\n\r\t") or char == "\x7f" for char in text):
        raise Unenforceable(f"strings with control characters are not supported (at {at})")
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise Unenforceable(f"a lone surrogate is not valid Unicode (at {at})")


def shown(value: Any) -> str:
    """Return ``value`` as JSON text of at most 60 characters, for errors."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
