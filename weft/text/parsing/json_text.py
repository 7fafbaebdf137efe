"""JSON text, checked character by character while it streams."""

from __future__ import annotations

import json
import re
from typing import Literal

MAX_DEPTH = 128
"""Deeper arguments are broken ones: what reads them does so by recursion."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = ("true", "false", "null")
_DIGITS = frozenset("0123456789")
_STARTS = frozenset("-0123456789")

State = Literal[
    "object",
    "value",
    "first",
    "key",
    "first key",
    "colon",
    "after",
    "string",
    "escape",
    "hex",
    "number",
    "word",
]


class JsonObjectScanner:
    """Follows one JSON object (RFC 8259, strictly). ``take`` may be called with any pieces of it."""

    def __init__(self) -> None:
        self.whole = False
        self.broken = False
        self.work = 0
        self._state: State = "object"
        self._stack: list[str] = []
        self._is_key = False
        self._left = 0
        self._word = ""
        self._number = ""
        """Which part of a number comes next: see ``_in_number``."""

    def take(self, text: str, start: int) -> int:
        """Follows ``text`` from ``start``; returns the index behind what belongs to the object.

        There the text ends, or the object (``whole``), or what stands there cannot be part of it
        (``broken``).
        """
        at = start
        while at < len(text) and not self.whole and not self.broken:
            if self._state == "string":
                plain = _PLAIN.match(text, at)
                at = at if plain is None else plain.end()
                if at < len(text):
                    at += self._in_string(text[at])
            else:
                at += self._one(text[at])
        self.work += at - start + 1
        return at

    def _one(self, char: str) -> int:
        """Takes a character outside of a string's plain part: 1, or 0 where it is not taken."""
        state = self._state
        if state in ("escape", "hex"):
            return self._in_escape(char)
        if state == "word":
            return self._in_word(char)
        if state == "number":
            if self._in_number(char):
                return 1
            if self._number not in ("zero", "whole", "fraction", "exponent"):
                return self._fail()
            self._state = state = "after"
        if char in " \t\r\n" and state != "object":
            return 1
        if state == "object":
            return self._open(char) if char == "{" else self._fail()
        if state in ("value", "first"):
            if char == "]" and state == "first":
                return self._close(char)
            return self._begin_value(char)
        if state in ("key", "first key"):
            if char == "}" and state == "first key":
                return self._close(char)
            self._is_key = True
            return self._to("string") if char == '"' else self._fail()
        if state == "colon":
            return self._to("value") if char == ":" else self._fail()
        if char == ",":
            return self._to("key" if self._stack[-1] == "{" else "value")
        return self._close(char)

    def _begin_value(self, char: str) -> int:
        if char in "{[":
            return self._open(char)
        if char == '"':
            self._is_key = False
            return self._to("string")
        if char in _STARTS:
            self._number = {"-": "sign", "0": "zero"}.get(char, "whole")
            return self._to("number")
        for word in _WORDS:
            if char == word[0]:
                self._word = word[1:]
                return self._to("word")
        return self._fail()

    def _open(self, char: str) -> int:
        if len(self._stack) >= MAX_DEPTH:
            return self._fail()
        self._stack.append(char)
        return self._to("first key" if char == "{" else "first")

    def _close(self, char: str) -> int:
        if (self._stack[-1], char) not in (("{", "}"), ("[", "]")):
            return self._fail()
        self._stack.pop()
        self.whole = not self._stack
        return self._to("after")

    def _in_string(self, char: str) -> int:
        if char == '"':
            return self._to("colon" if self._is_key else "after")
        return self._to("escape") if char == "\\" else self._fail()

    def _in_escape(self, char: str) -> int:
        if self._state == "escape":
            self._left = 4
            if char == "u":
                return self._to("hex")
            return self._to("string") if char in '"\\/bfnrt' else self._fail()
        if char not in "0123456789abcdefABCDEF":
            return self._fail()
        self._left -= 1
        return self._to("hex" if self._left else "string")

    def _in_word(self, char: str) -> int:
        if char != self._word[0]:
            return self._fail()
        self._word = self._word[1:]
        return self._to("word" if self._word else "after")

    def _in_number(self, char: str) -> bool:
        part = self._number
        if char in _DIGITS:
            after = {"sign": "zero" if char == "0" else "whole", "point": "fraction", "e": "exponent"}
            after |= {"e sign": "exponent"}
            self._number = after.get(part, part)
            return part != "zero"
        if char == "." and part in ("zero", "whole"):
            self._number = "point"
            return True
        if char in "eE" and part in ("zero", "whole", "fraction"):
            self._number = "e"
            return True
        if char in "+-" and part == "e":
            self._number = "e sign"
            return True
        return False

    def _to(self, state: State) -> int:
        self._state = state
        return 1

    def _fail(self) -> int:
        self.broken = True
        return 0


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """What stands between the quotes of a JSON string."""
    return quoted(text)[1:-1]


def is_number(text: str) -> bool:
    """Whether ``text`` is a JSON number."""
    return _NUMBER.fullmatch(text) is not None
