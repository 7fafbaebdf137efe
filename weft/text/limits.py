"""Cost limits of a chat template. The size of a string operation is estimated before the operation runs."""

from __future__ import annotations

import contextvars
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError

MAX_SECONDS = 2.0
MAX_CHARS = 16 << 20
"""Maximum length of a string or list."""
MAX_COUNT = 1 << 16
"""Maximum width, count or exponent in a template."""
MAX_BITS = 4096
"""Maximum bits of an integer made by multiplication."""

_UNSAFE_FORMAT = re.compile(r"\d{4,}|:[^{}]*\{")
_UNSAFE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{4,}|\*)")


class TemplateLimit(TemplateError):
    """The template exceeded a limit."""


class Budget:
    """The remaining budget of one rendering. Used by one thread."""

    def __init__(self, seconds: float = MAX_SECONDS, chars: int = MAX_CHARS) -> None:
        self._deadline = time.monotonic() + seconds
        self._chars = chars
        self._ticks = 0
        self._written = 0

    def tick(self) -> None:
        """Count one operation and check the clock at every 64th. Raises TemplateLimit past the deadline."""
        self._ticks += 1
        if not self._ticks & 63 and time.monotonic() > self._deadline:
            raise TemplateLimit("the chat template took too long")

    def size(self, length: int) -> None:
        """Raise TemplateLimit for a string or list of more than the allowed length."""
        if length > self._chars:
            raise TemplateLimit("the chat template produces too much text")

    def write(self, length: int) -> None:
        """Charge text written to the output or into a block. Raises TemplateLimit beyond four times the
        allowed length.
        """
        self._written += length
        self.size(self._written // 4)

    def result(self, value: Any) -> Any:
        """Return ``value``. Raise TemplateLimit if ``value`` is too long."""
        if isinstance(value, str | list | tuple):
            self.size(len(value))
        return value


_current: contextvars.ContextVar[Budget] = contextvars.ContextVar("template budget")


def current() -> Budget:
    """Return the budget of the rendering in this thread."""
    return _current.get()


def under(budget: Budget) -> contextvars.Token[Budget]:
    """Make ``budget`` the current budget. Return the token for ``over``."""
    return _current.set(budget)


def over(token: contextvars.Token[Budget]) -> None:
    """Restore the budget from before ``under``."""
    _current.reset(token)


def check_counts(values: Iterable[Any]) -> None:
    """Raise TemplateLimit for an integer too large for a width or a count."""
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_COUNT:
            raise TemplateLimit("the chat template computes too large a number")


def check_binop(operator: str, left: Any, right: Any) -> None:
    """Raise TemplateLimit if an operator's result would be too large, SecurityError for a ``%`` format with a
    large width.
    """
    sequence = str | list | tuple
    if operator == "+" and isinstance(left, sequence) and isinstance(right, sequence):
        current().size(len(left) + len(right))
    elif operator == "*":
        # A sequence times a number, in either order.
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
        raise TemplateLimit("the chat template computes too large a number")


def check_method(function: Any, args: tuple[Any, ...]) -> None:
    """Raise TemplateLimit if a string or list method would make too large a result, SecurityError for large
    format widths.
    """
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
    """Return an upper bound of the length of ``text`` after replacing ``old`` by ``new``."""
    subject = str(text)
    gone = str(old)
    added = str(new)
    return len(subject) + subject.count(gone) * max(len(added) - len(gone), 0)


def joined(separator: Any, values: Any = (), *_: Any) -> int:
    """Return an upper bound of the length of ``values`` joined; 0 for an iterator, which must not be
    consumed.
    """
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
