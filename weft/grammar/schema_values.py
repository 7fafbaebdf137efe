"""Values in JSON schemas that no grammar can hold to, and what is no value at all."""

from __future__ import annotations

import json
from typing import Any

from weft.common.errors import InvalidRequest

MAX_COUNT = 100_000
"""Of minItems, maxLength and the like."""
MAX_EXACT = 2**53
"""Largest integer that every reader of JSON takes exactly."""


class Unheld(InvalidRequest):
    """A keyword is right, and no grammar can hold to it."""


def count(value: Any, at: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidRequest(f"a number from 0 on is expected (at {at})")
    if value > MAX_COUNT:
        raise Unheld(f"a number up to {MAX_COUNT} is expected (at {at})")
    return value


def bound(value: Any, at: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidRequest(f"a number is expected (at {at})")
    if abs(value) > MAX_EXACT or (value != 0 and abs(value) < 1e-12):
        raise Unheld(f"the number is too large, or too close to 0 (at {at})")
    return value


def check_constant(value: Any, at: str) -> None:
    """Values that every spelling of JSON has exactly once."""
    stack = [value]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            check_text(one, at)
        elif isinstance(one, float) or (isinstance(one, int) and not isinstance(one, bool)):
            if abs(one) > MAX_EXACT or (one != 0 and abs(one) < 1e-12):
                raise Unheld(f"the number is too large, or too close to 0 (at {at})")
        elif isinstance(one, dict):
            stack.extend([*one, *one.values()])
        elif isinstance(one, list):
            stack.extend(one)


def check_text(text: str, at: str) -> None:
    if any((ord(char) < 0x20 and char not in "\b\f\n\r\t") or char == "\x7f" for char in text):
        raise Unheld(f"texts with control characters are not supported (at {at})")
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise Unheld(f"half of a surrogate pair is no text (at {at})")


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
