"""Marks that keep the text of a request from spelling special tokens; ``chat.py`` describes their use.

A ``Word`` is a string that a template compares as plain text, but writes with marks around.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from typing import Any


class Word(str):
    """A string that is the start, the end or the middle of a special token.

    A template may compare ``type == "object"`` although the tokenizer has ``<|object_ref_start|>``.
    Comparisons, hashes and tests therefore see the plain text. Any conversion to text uses ``str(word)``,
    which has marks on both sides and cannot form a special token with its neighbours. String methods return
    words again. The text must not spell a whole special token: see ``Marks.around``.
    """

    __slots__ = ("_mark",)
    _mark: str

    def __new__(cls, plain: str, mark: str) -> Word:
        made = super().__new__(cls, plain)
        made._mark = mark
        return made

    def __str__(self) -> str:
        return f"{self._mark}{str.__str__(self)}{self._mark}"

    def __repr__(self) -> str:
        return repr(str(self))

    def __format__(self, form: str) -> str:
        return format(str(self), form)

    def __add__(self, other: str) -> str:
        return f"{self}{other}"

    def __radd__(self, other: str) -> str:
        return f"{other}{self}"

    def __iter__(self) -> Iterator[str]:
        return (Word(char, self._mark) for char in str.__str__(self))


def _deriving(name: str) -> Callable[..., Any]:
    """Return the method ``name`` of ``str`` for words: each string of the result becomes a word with the same
    mark.
    """
    plain_method = getattr(str, name)

    def method(self: Word, *args: Any, **kwargs: Any) -> Any:
        return _again(plain_method(str.__str__(self), *args, **kwargs), self._mark)

    method.__name__ = name
    return method


def _again(value: Any, mark: str) -> Any:
    """Return ``value``, the result of a string method, with each string as a word."""
    if isinstance(value, str):
        return Word(value, mark) if value else value
    if isinstance(value, list | tuple):
        return type(value)(_again(item, mark) for item in value)
    return value


for _name in (
    *(
        "__getitem__",
        "__mul__",
        "__rmul__",
        "capitalize",
        "casefold",
        "center",
        "expandtabs",
        "ljust",
        "lower",
    ),
    *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rjust", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "strip", "swapcase", "title", "translate", "upper", "zfill"),
):
    setattr(Word, _name, _deriving(_name))


def written(value: Any) -> Any:
    """Return ``value`` with each word as its marked text, at any depth, for operations that make text."""
    if type(value) is Word:
        return str(value)
    if isinstance(value, list | tuple):
        return [written(item) for item in value]
    if isinstance(value, dict):
        return {written(key): written(item) for key, item in value.items()}
    return value


def sent(value: Any, tag: str) -> Any:
    """Return ``value`` with each word as a plain string behind ``tag``, for JSON; see ``received``.

    ``tag`` must be a secret: no other string of ``value`` may start with ``tag``.
    """
    if type(value) is Word:
        return f"{tag}{value._mark} {str.__str__(value)}"
    if isinstance(value, list | tuple):
        return [sent(item, tag) for item in value]
    if isinstance(value, dict):
        return {sent(key, tag): sent(item, tag) for key, item in value.items()}
    return value


def received(value: Any, tag: str) -> Any:
    """Return the original of a value made by ``sent``, including words."""
    if isinstance(value, str):
        if not value.startswith(tag):
            return value
        mark, _, plain = value[len(tag) :].partition(" ")
        return Word(plain, mark)
    if isinstance(value, list):
        return [received(item, tag) for item in value]
    if isinstance(value, dict):
        return {received(key, tag): received(item, tag) for key, item in value.items()}
    return value


_DIGITS = 40


def secret_digits() -> str:
    """Return a random string of digits that clients cannot guess. All such strings have the same length.

    Digits survive every normalizer, ``upper``, ``lower``, ``trim`` and JSON escaping.
    """
    return str(secrets.randbelow(9 * 10 ** (_DIGITS - 1)) + 10 ** (_DIGITS - 1))


class Marks:
    """Finds special tokens in strings and keeps user text from spelling special tokens."""

    def __init__(self, special: tuple[str, ...]) -> None:
        """``special``: the texts of all special tokens."""
        self._special = special
        longest_first = sorted(special, key=lambda text: (-len(text), text))
        escaped = "|".join(map(re.escape, longest_first)) if special else "(?!)"
        self._any = re.compile(escaped)
        # A lookahead finds overlapping tokens too; the group is the first character of each.
        self._overlapping = re.compile(f"(?=(?:{escaped}))(.)", re.DOTALL)
        self._single = "".join(re.escape(text) for text in special if len(text) == 1)
        # All proper prefixes and suffixes of special tokens.
        self._heads = frozenset(text[:cut] for text in special for cut in range(1, len(text)))
        self._tails = frozenset(text[cut:] for text in special for cut in range(1, len(text)))
        self._longest = max(map(len, special), default=0)

    def find(self, text: str) -> str | None:
        """Return the special token at the start of ``text``, or None."""
        match = self._any.match(text)
        return None if match is None else match[0]

    def all_with_places(self, text: str) -> Iterator[tuple[str, int]]:
        """Return the special tokens in ``text``, in order, each with its position."""
        return ((match[0], match.start()) for match in self._any.finditer(text))

    def inside(self, value: Any, mark: str) -> Any:
        """Return ``value`` with a mark inside every spelled special token of all strings, at any depth."""
        if isinstance(value, str):
            return (
                self._overlapping.sub(lambda found: found[1] + mark, value)
                if self._any.search(value)
                else value
            )
        if isinstance(value, list):
            return [self.inside(item, mark) for item in value]
        if isinstance(value, dict):
            return {self.inside(key, mark): self.inside(item, mark) for key, item in value.items()}
        return value

    def everywhere(self, value: Any, mark: str) -> Any:
        """Return a copy of ``value`` with all strings marked by ``around``, at any depth, keys of dicts too.
        A tuple becomes a list.
        """
        if isinstance(value, str):
            return self.around(value, mark)
        if isinstance(value, list | tuple):
            return [self.everywhere(item, mark) for item in value]
        if isinstance(value, dict):
            return {self.everywhere(key, mark): self.everywhere(item, mark) for key, item in value.items()}
        return value

    def around(self, text: str, mark: str) -> str:
        """Return ``text`` with marks inside. Return a ``Word`` if ``text`` could only become a part of a
        special token.
        """
        reach = range(1, min(self._longest, len(text) + 1))
        # The text may end, begin or be the middle of a special token made with its neighbours.
        within = len(text) < self._longest and any(text in special for special in self._special)
        before = within or any(text[:size] in self._tails for size in reach)
        after = within or any(text[-size:] in self._heads for size in reach)
        marked: str = self.inside(text, mark)
        if not text or not (before or after):
            return marked
        if marked == text:
            return Word(text, mark)
        return (mark if before else "") + marked + (mark if after else "")

    def rewrite(self, rendered: str, mark: str, name: Any) -> str:
        """Return ``rendered`` without marks and with ``name(text)`` in place of each special token of the
        template.

        Special tokens spelled by users have a mark inside, so these tokens stay text.
        """
        if self._single:  # a token of one character has the mark behind: it has no inside
            pattern = re.compile(f"(?:{self._any.pattern})(?!(?<=[{self._single}]){mark})")
        else:
            pattern = self._any
        return pattern.sub(lambda match: name(match[0]), rendered).replace(mark, "")
