"""What a chat template may spend, and how much a string operation would make, found out before it runs."""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError

MAX_SECONDS = 2.0
MAX_CHARS = 16 << 20
"""Longest string or list."""
MAX_COUNT = 1 << 16
"""Largest width, count or exponent that a template may ask for."""
MAX_BITS = 4096
"""Largest integer that multiplication may make."""

_UNSAFE_FORMAT = re.compile(r"\d{4,}|:[^{}]*\{")
_UNSAFE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)")


class TemplateLimit(TemplateError):
    """The template spent more than it may."""


class Budget:
    """What one rendering may still spend. Charged from one thread."""

    def __init__(self, seconds: float = MAX_SECONDS, chars: int = MAX_CHARS) -> None:
        self._deadline = time.monotonic() + seconds
        self._chars = chars
        self._ticks = 0
        self._written = 0

    def tick(self) -> None:
        """Counts one operation; looks at the clock at every 64th. Raises TemplateLimit past the deadline."""
        self._ticks += 1
        if not self._ticks & 63 and time.monotonic() > self._deadline:
            raise TemplateLimit("the chat template took too long")

    def size(self, length: int) -> None:
        """Raises TemplateLimit when one string or list would be longer than allowed."""
        if length > self._chars:
            raise TemplateLimit("the chat template makes too much text")

    def write(self, length: int) -> None:
        """Charges text that is written, to the output or to a block that is set aside."""
        self._written += length
        self.size(self._written // 4)

    def result(self, value: Any) -> Any:
        """``value``, if it is not too long."""
        if isinstance(value, str | list | tuple):
            self.size(len(value))
        return value


_current: contextvars.ContextVar[Budget] = contextvars.ContextVar("template budget")


def current() -> Budget:
    """The budget of the rendering that runs in this thread."""
    return _current.get()


def under(budget: Budget) -> contextvars.Token[Budget]:
    """Makes ``budget`` the current one until ``over`` is called with the result."""
    return _current.set(budget)


def over(token: contextvars.Token[Budget]) -> None:
    """Ends what ``under`` began."""
    _current.reset(token)


def check_counts(values: Iterable[Any]) -> None:
    """Raises TemplateLimit for an integer that is too large to be a width or a count."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise TemplateLimit("the chat template asks for too large a number")


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Raises when an operator's result would be too large, or a ``%`` format can be."""
    sequence = str | list | tuple
    if operator == "+" and isinstance(left, sequence) and isinstance(right, sequence):
        current().size(len(left) + len(right))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, sequence) and isinstance(times, int):
                current().size(len(many) * max(times, 0))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str) and _UNSAFE_PERCENT.search(left):
        raise SecurityError("formats with large widths are not allowed")


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TemplateLimit("the chat template asks for too large a number")


def check_method(function: Any, args: tuple[Any, ...]) -> None:
    """Raises when a method of a string would make too long a string."""
    function = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    subject = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if isinstance(subject, list) and name == "append":
        current().size(len(subject) + 1)
    if not isinstance(subject, str):
        return
    if name in ("format", "format_map") and _UNSAFE_FORMAT.search(subject):
        raise SecurityError("formats with large widths are not allowed")
    estimate = _ESTIMATES.get(name)
    if estimate is not None:
        current().size(estimate(subject, *args))


def replaced(text: Any, old: Any = "", new: Any = "", *_: Any) -> int:
    """Upper bound of the length of ``text`` with ``old`` replaced."""
    subject = str(text)
    gone = str(old)
    added = str(new)
    return len(subject) + subject.count(gone) * max(len(added) - len(gone), 0)


def joined(separator: Any, values: Any = (), *_: Any) -> int:
    """Length of ``values`` joined; 0 where it can't be known without consuming them."""
    if not isinstance(values, list | tuple):
        return 0
    return sum(len(str(value)) + len(str(separator)) for value in values)


def _translated(text: str, table: Any = None, *_: Any) -> int:
    values = table.values() if isinstance(table, dict) else ()
    longest = max((len(value) for value in values if isinstance(value, str)), default=1)
    return len(text) * max(longest, 1)


def _untabbed(text: str, size: Any = 8, *_: Any) -> int:
    return len(text) + text.count("\t") * (size if isinstance(size, int) else 8)


_ESTIMATES: dict[str, Callable[..., int]] = {
    "replace": replaced,
    "join": joined,
    "translate": _translated,
    "expandtabs": _untabbed,
}
