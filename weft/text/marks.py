"""Marks that keep the text of a request from spelling special tokens; ``chat.py`` describes their use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from weft.text.words import Word


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
        """Return ``value`` with all strings marked by ``around``, at any depth."""
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
