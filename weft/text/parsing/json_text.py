"""JSON text, read character by character while the text streams, and written as strict JSON (RFC 8259)."""

from __future__ import annotations

import json
import re
from typing import Literal

MAX_DEPTH = 128
"""Maximum depth of brackets. Deeper arguments count as broken, because JSON readers use recursion."""
MAX_NUMBER = 1024
"""Maximum characters of a number. Python's JSON reader refuses very long integers."""
_PLAIN = {quote: re.compile(rf'[^"{quote}\\\x00-\x1f]*') for quote in "'\""}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {
    "true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
}  # fmt: skip
_DIGITS = frozenset("0123456789")
_STARTS = frozenset("-0123456789")
_HEX = frozenset("0123456789abcdefABCDEF")
_BLANKS = frozenset(" \t\r\n")
_NUMBER_ENDS = frozenset(("zero", "whole", "fraction", "exponent"))

State = Literal[
    "object", "value", "first", "key", "first key", "colon", "after", "string", "escape", "hex", "number",
    "word",
]  # fmt: skip


class JsonObjectScanner:
    """Reads one object and writes the object as JSON. ``take`` accepts the object in any pieces.

    A valid object is written unchanged. Mistakes with a clear meaning are repaired: control characters in
    strings, invalid escapes, strings in single quotes, Python's True, False and None, a comma before a
    closing bracket, and a doubled first brace.
    """

    def __init__(self) -> None:
        self.whole = False
        self.broken = False
        self.doubled = False
        """True if the first brace was doubled. A second closing brace may follow the object."""
        self.work = 0
        self._state: State = "object"
        self._stack: list[str] = []
        self._written: list[str] = []
        self._held: list[str] = []
        """Characters taken but not written yet: a comma with the white space behind the comma, an escape, or
        a word.
        """
        self._quote = '"'
        self._is_key = False
        self._options: tuple[str, ...] = ()
        self._number = ""
        """The last part of the current number: see ``_in_number``."""
        self._length = 0
        """Characters of the current number."""

    def take(self, text: str, start: int) -> int:
        """Read ``text`` from ``start`` and return the index behind the last character taken.

        Reading stops at the end of the text, at the end of the object (sets ``whole``), or at a character
        that cannot be part of the object (sets ``broken``). The JSON text waits for ``written``.
        """
        at = start
        while at < len(text) and not self.whole and not self.broken:
            if self._state == "string":
                # Fast path: the plain part of a string is copied in one step.
                plain = _PLAIN[self._quote].match(text, at)
                if plain is not None and plain[0]:
                    self._written.append(plain[0])
                    at = plain.end()
                if at < len(text):
                    at += self._in_string(text[at])
            else:
                at += self._one(text[at])
        self.work += at - start + 1
        return at

    @property
    def in_string(self) -> bool:
        """True if a string is open."""
        return self._state in ("string", "escape", "hex")

    def written(self) -> str:
        """Return the JSON text written since the last call."""
        text = "".join(self._written)
        self._written.clear()
        return text

    def finish(self) -> bool:
        """Close the open brackets, set ``whole`` and return True.

        Return False, and write nothing, if more than closing brackets is missing.
        """
        # Only an opening bracket, a complete number, a complete value or a comma may stand before the closing
        # brackets.
        after_number = self._state == "number" and self._number in _NUMBER_ENDS
        ends = self._state in ("after", "first", "first key") or self._behind_comma
        if not self._stack or not (after_number or ends):
            return False
        self._drop_comma()
        self._written += ["}" if char == "{" else "]" for char in reversed(self._stack)]
        self._stack.clear()
        self.whole = True
        return True

    def give_up(self) -> None:
        """Write the held characters unchanged, because the object stays incomplete."""
        self._release()

    @property
    def _behind_comma(self) -> bool:
        return self._state in ("key", "value") and bool(self._held)

    def _release(self) -> None:
        self._written += self._held
        self._held.clear()

    def _drop_comma(self) -> None:
        self._held[:1] = []
        self._release()

    def _one(self, char: str) -> int:
        """Take one character outside the plain part of a string.

        Return 1 if taken, else 0: ``char`` is then read again or breaks the object.
        """
        state = self._state
        if state in ("escape", "hex"):
            return self._in_escape(char)
        if state == "word":
            return self._in_word(char)
        if state == "number":
            if self._in_number(char):
                self._length += 1
                self._written.append(char)
                return 1 if self._length <= MAX_NUMBER else self._fail(taken=1)
            if self._number not in _NUMBER_ENDS:
                return self._fail()
            # A number has no end mark: the first other character ends the number and is read again here.
            self._state = state = "after"
        if char in _BLANKS and state != "object":
            (self._held if self._held else self._written).append(char)
            return 1
        if state == "object":
            return self._open(char) if char == "{" else self._fail()
        if state in ("value", "first"):
            if char == "]" and (state == "first" or self._behind_comma):
                return self._close(char)
            return self._begin_value(char)
        if state in ("key", "first key"):
            return self._begin_key(char)
        if state == "colon":
            return self._write(char, "value") if char == ":" else self._fail()
        if char == ",":
            self._held.append(char)
            self._state = "key" if self._stack[-1] == "{" else "value"
            return 1
        return self._close(char)

    def _begin_key(self, char: str) -> int:
        """Begin a key with ``char``, or close the object.

        A second first brace only sets ``doubled``. Return 1 if ``char`` was taken; any other character breaks
        the object.
        """
        if char == "}":
            return self._close(char)  # drops a comma before the brace
        if char == "{" and self._state == "first key" and self._stack == ["{"] and not self.doubled:
            self.doubled = True
            return 1
        if char not in "'\"":
            return self._fail()
        self._is_key = True
        return self._begin_string(char)

    def _begin_value(self, char: str) -> int:
        """Begin a value with ``char``.

        Return 1 if ``char`` was taken; any other character breaks the object.
        """
        if char in "{[":
            return self._open(char)
        if char in "'\"":
            self._is_key = False
            return self._begin_string(char)
        if char in _STARTS:
            self._release()
            self._number = {"-": "sign", "0": "zero"}.get(char, "whole")
            self._length = 1
            return self._write(char, "number")
        self._options = tuple(word for word in _WORDS if word[0] == char)
        if not self._options:
            return self._fail()
        self._release()
        self._held.append(char)
        self._state = "word"
        return 1

    def _begin_string(self, char: str) -> int:
        self._release()
        self._quote = char
        return self._write('"', "string")

    def _open(self, char: str) -> int:
        """Open a bracket and return 1. Break the object at more than ``MAX_DEPTH`` brackets."""
        if len(self._stack) >= MAX_DEPTH:
            return self._fail()
        self._release()
        self._stack.append(char)
        return self._write(char, "first key" if char == "{" else "first")

    def _close(self, char: str) -> int:
        """Close a bracket, drop a comma before the bracket, and return 1.

        Break the object at a wrong bracket. Set ``whole`` at the last bracket.
        """
        if (self._stack[-1], char) not in (("{", "}"), ("[", "]")):
            return self._fail()
        if self._held:
            self._drop_comma()
        self._stack.pop()
        self.whole = not self._stack
        return self._write(char, "after")

    def _in_string(self, char: str) -> int:
        """Take a quote, a backslash or a control character inside a string. Return 1."""
        if char == self._quote:
            return self._write('"', "colon" if self._is_key else "after")
        if char == "\\":
            self._held.append(char)
            self._state = "escape"
        else:
            self._written.append(escaped(char))  # a control character, or the other quote
        return 1

    def _in_escape(self, char: str) -> int:
        """Take a character behind a backslash.

        An invalid escape becomes a literal backslash and character. Return 0 if ``char`` ends an incomplete
        hex escape and is read again.
        """
        if self._state == "escape" and char == "u":
            self._held.append(char)
            self._state = "hex"
            return 1
        if self._state == "escape":
            self._held.clear()
            # Keep a valid escape; ``\'`` needs no backslash in JSON; anything else gets a literal backslash.
            valid = "\\" + char if char in '"\\/bfnrt' else "'" if char == "'" else escaped("\\" + char)
            return self._write(valid, "string")
        if char in _HEX:
            self._held.append(char)
            if len(self._held) == len("\\u0000"):
                self._release()
                self._state = "string"
            return 1
        self._written.append(escaped("".join(self._held)))
        self._held.clear()
        self._state = "string"
        return 0

    def _in_word(self, char: str) -> int:
        """Read a character of a word such as ``true``.

        The word is written in JSON spelling when complete. Any other word breaks the object.
        """
        word = "".join((*self._held, char))
        self._options = tuple(option for option in self._options if option.startswith(word))
        if not self._options:
            return self._fail()
        self._held.append(char)
        if word in _WORDS:
            self._held.clear()
            return self._write(_WORDS[word], "after")
        return 1

    def _in_number(self, char: str) -> bool:
        """Advance ``_number`` by ``char``. Return False if ``char`` cannot continue the number."""
        part = self._number
        if char in _DIGITS:
            # sign -> zero | whole -> point -> fraction -> e -> e sign -> exponent
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

    def _write(self, text: str, state: State) -> int:
        self._written.append(text)
        self._state = state
        return 1

    def _fail(self, taken: int = 0) -> int:
        self.broken = True
        return taken


class StringDecoder:
    """Decodes the content of a JSON string, character by character, for JSON text quoted as a whole."""

    def __init__(self) -> None:
        self._escape = ""

    def push(self, char: str) -> str | None:
        """Return the text completed by ``char``, "" inside an escape; None for an unescaped quote.

        An invalid escape is returned unchanged.
        """
        if not self._escape:
            if char == '"':
                return None
            if char != "\\":
                return char
            self._escape = char
            return ""
        self._escape += char
        if self._escape.startswith("\\u") and len(self._escape) < len("\\u0000"):
            return ""
        whole, self._escape = self._escape, ""
        try:
            text = json.loads(f'"{whole}"')
        except ValueError:
            return whole
        # A ``\u`` escape of a non-ASCII character stays an escape, which also protects lone surrogates. The
        # inner JSON decodes the escape.
        return whole if whole.startswith("\\u") and not text.isascii() else str(text)


def quoted(text: str) -> str:
    """Return ``text`` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def escaped(text: str) -> str:
    """Return ``text`` as the content of a JSON string, without the quotes."""
    return quoted(text)[1:-1]


def is_number(text: str) -> bool:
    """Return True if ``text`` is a JSON number of at most ``MAX_NUMBER`` characters."""
    return len(text) <= MAX_NUMBER and _NUMBER.fullmatch(text) is not None
