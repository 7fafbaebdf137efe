"""Cuts of a text before encoding: at special tokens, at length limits, and with a space in front.

Two kinds of vocabulary need cuts that a tokenizer.json cannot express. SentencePiece puts a space before
each text, but not behind user-defined pieces. Kimi's tokenizer cuts long texts and long runs before byte
merges, and no token crosses a cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Literal

import msgspec


class Segmentation(msgspec.Struct, frozen=True):
    """The rules of one vocabulary. The default changes nothing."""

    prefix: Literal["none", "first", "each"] = "none"
    """Texts with a space in front: none, only the start of the whole text, or each text between special
    tokens.
    """
    longest_text: int = 0
    """Maximum characters of a text before a cut; 0 for no limit."""
    longest_run: int = 0
    """Maximum run of white space, or of other characters, before a cut; 0 for no limit."""


class Segments:
    """Cuts texts by a Segmentation, and at ``marks``, the texts of special tokens."""

    def __init__(self, rules: Segmentation, marks: Iterable[str]) -> None:
        """``marks``: texts that are never cut and never joined with other text."""
        self._rules = rules
        self.trivial = rules == Segmentation()
        """True if no text is ever changed."""
        longest_first = sorted(marks, key=lambda text: (-len(text), text))
        self._marks = (
            re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        )

    def split(self, text: str) -> list[str]:
        """Return the parts of ``text`` to encode separately. The ids of all parts together are the ids of
        ``text``.
        """
        parts = [text] if self._marks is None else self._marks.split(text)
        result: list[str] = []
        for number, part in enumerate(parts):  # every second part is a mark
            if number % 2:
                result.append(part)
            elif part:
                result += self._cut(self._prefix(number) + part)
        return result

    def _prefix(self, number: int) -> str:
        wanted = self._rules.prefix
        return " " if wanted == "each" or (wanted == "first" and number == 0) else ""

    def _cut(self, text: str) -> list[str]:
        """Cut a text without marks at the length limits."""
        step = self._rules.longest_text or len(text)
        chunks = [text[start : start + step] for start in range(0, len(text), step)]
        run = self._rules.longest_run
        return [part for chunk in chunks for part in cut_runs(chunk, run)] if run else chunks


def cut_runs(text: str, longest: int) -> list[str]:
    """Return ``text`` in parts. A run of more than ``longest`` characters is cut every ``longest``
    characters.

    A run is all white space (``str.isspace``) or all other characters.
    """
    short = _short_runs(longest)
    parts: list[str] = []
    start = end = 0
    while len(text) - end > longest:
        long_run = short.match(text, end).end()  # type: ignore[union-attr]  # it matches an empty text, too
        if long_run == len(text):
            break
        end = long_run + longest
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    return parts


@lru_cache(maxsize=4)
def _short_runs(longest: int) -> re.Pattern[str]:
    """Return a pattern for all runs up to the first run longer than ``longest``. Possessive, so linear in the
    text's length.
    """
    space, other = rf"(?>\s{{1,{longest}}})(?!\s)", rf"(?>\S{{1,{longest}}})(?!\S)"
    return re.compile(f"(?:{space}|{other})*+")
