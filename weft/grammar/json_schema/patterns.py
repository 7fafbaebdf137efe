"""Convert patterns of JSON schemas (ECMA-262, found anywhere in a text) to regular expressions of whole
texts.

Dialects disagree about ``\\d``, ``\\s``, ``.``, ``$`` and about literal characters in a class. The result
uses only syntax with the same meaning in all dialects. The result never accepts a text that some dialect
would reject. Syntax without such a form (look-around, ``\\b``, references, flags) is refused.
"""

from __future__ import annotations

from typing import Never

import msgspec

from weft.common.errors import InvalidRequest

_DIGIT = "0-9"
_WORD = "A-Za-z0-9_"
_ALL_SPACES = "\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
"""Characters taken for white space by at least one dialect."""
_LINE_ENDS = "\n\r\u2028\u2029"
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_MAX_DEPTH = 40
_MAX_COUNT = 65535


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The spelling of dialect-dependent syntax for a backend."""

    anything: str
    """Any text."""
    code: str
    """A character, by code."""
    most_code: int
    """Largest code expressible by ``code``."""
    not_digit: str = ""
    """Content of a negated class: everything some dialect takes for a digit; "" if not expressible."""
    not_word: str = ""
    excluded: str = ""
    """Characters excluded from every negated class, in class syntax. No positive class may contain these
    characters."""
    optional: str = "?"
    """Suffix for zero or one occurrence."""
    space: str = " "
    """Characters taken for white space by every dialect, if allowed in a text."""


RUST = Dialect(
    anything=r"(?s:.*)",
    code=r"\x{%x}",
    most_code=0x10FFFF,
    not_digit=r"\d",
    not_word=r"\w\p{N}",
    space=" \t\n\r\f\v",
)
ECMA = Dialect(anything=r"[^\u0000]*", code=r"\u%04x", most_code=0xFFFF, optional="{0,1}")
JSON_STRING = Dialect(
    anything=r'[^"\\\u0000-\u001f\ud800-\udfff]*',
    code=r"\u%04x",
    most_code=0xFFFF,
    optional="{0,1}",
    excluded=r'"\\\u0000-\u001f\ud800-\udfff',
)
"""For characters that stand for themselves in a JSON string."""


def whole_pattern(pattern: str, dialect: Dialect = RUST) -> str:
    """Return a regular expression for the whole texts in which ``pattern`` is found.

    Raises InvalidRequest, with reason and position, for syntax without the same meaning in all dialects.
    """
    return _PatternReader(pattern, dialect).whole()


class _PatternReader:
    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self._text = pattern
        self._dialect = dialect
        self._at = 0

    def whole(self) -> str:
        """Return all alternatives, each anchored to the ends of the text or open at the ends.

        Every method of this class moves the cursor and raises InvalidRequest for an unsupported construct.
        """
        result = [self._bound()]
        while self._take("|"):
            result.append(self._bound())
        if self._at < len(self._text):
            self._refuse("a closing parenthesis without an opening one")
        return f"(?:{'|'.join(result)})" if len(result) > 1 else result[0]

    def _bound(self) -> str:
        """Read one top-level alternative, with its anchors made explicit. Raises InvalidRequest."""
        start = "" if self._take("^") else self._dialect.anything
        inner = self._sequence(0)
        end = "" if self._take("$") else self._dialect.anything
        if self._at < len(self._text) and self._text[self._at] not in "|)":
            self._refuse("$ anywhere but at the end of an alternative")
        return f"{start}{inner}{end}"

    def _alternatives(self, depth: int) -> str:
        result = [self._sequence(depth)]
        while self._take("|"):
            result.append(self._sequence(depth))
        return "|".join(result)

    def _sequence(self, depth: int) -> str:
        """Return a sequence up to an alternative, a closing parenthesis or a final ``$``.

        Raises InvalidRequest.
        """
        result = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._text[self._at] == "$":
                if depth:
                    self._refuse("$ in a group")
                break
            result += self._repeated(self._atom(depth))
        return result

    def _atom(self, depth: int) -> str:
        """Read one character, class, group or escape and return the pattern without repetition.

        Raises InvalidRequest.
        """
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == ".":
            return self._negated(_LINE_ENDS)
        if char == "\\":
            return self._escape()
        if char == "^":
            self._refuse("^ anywhere but at the start of an alternative")
        if char in "*+?":
            self._refuse(f"{char} with nothing to repeat")
        return self._literal(char)

    def _group(self, depth: int) -> str:
        """Read a group behind its opening parenthesis and return a group that never captures.

        Raises InvalidRequest.
        """
        if depth >= _MAX_DEPTH:
            self._refuse(f"groups nested more than {_MAX_DEPTH} deep")
        if self._take("?"):
            # Accept (?:...), (?<name>...) and (?P<name>...).
            self._take("P")
            if self._take("<") and self._at < len(self._text) and self._text[self._at] not in "=!":
                end = self._text.find(">", self._at)
                if end < 0 or not self._text[self._at : end].isidentifier():
                    self._refuse("a group's name")
                self._at = end + 1
            elif not self._take(":"):
                self._refuse("look-around, a reference or a flag")
        inner = self._alternatives(depth + 1)
        if not self._take(")"):
            self._refuse("an unclosed group")
        return f"(?:{inner})"

    def _repeated(self, atom: str) -> str:
        """Return ``atom`` with the repetition at the cursor, if any. Raises InvalidRequest."""
        if self._at >= len(self._text):
            return atom
        char = self._text[self._at]
        if char in "*+?":
            self._at += 1
            times = self._dialect.optional if char == "?" else char
        elif char == "{" and (found := self._counts()) is not None:
            times = found
        else:
            return atom
        self._take("?")  # a lazy repetition matches the same texts
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            self._refuse("a repetition of a repetition")
        return atom + times

    def _counts(self) -> str | None:
        """Read ``{n}``, ``{n,}`` or ``{n,m}`` and return the counts.

        Return None, with the cursor at the brace, if the brace is a literal. Raises InvalidRequest.
        """
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not least and comma and most.isdecimal():
            self._refuse("a count without a minimum")
        # ECMA-262 reads a brace without valid counts as a literal.
        if not (least.isascii() and least.isdecimal()) or (
            most and not (most.isascii() and most.isdecimal())
        ):
            return None
        # The lengths come first: Python refuses to convert very long numbers.
        if max(len(least), len(most)) > 9 or max(int(least), int(most or 0)) > _MAX_COUNT:
            self._refuse(f"a count above {_MAX_COUNT}")
        if most and int(most) < int(least):
            self._refuse("a count with the minimum above the maximum")
        self._at = end + 1
        return f"{{{int(least)}{comma}{int(most) if most else ''}}}"

    def _escape(self) -> str:
        """Read an escape outside a class, behind its backslash, and return the pattern.

        Raises InvalidRequest.
        """
        char = self._next()
        if char == "d":
            return f"[{_DIGIT}]"
        if char == "w":
            return f"[{_WORD}]"
        if char == "s":
            return f"[{self._coded(self._dialect.space)}]"
        if char == "S":
            return self._negated(_ALL_SPACES)
        if char in "DW":
            found = self._dialect.not_digit if char == "D" else self._dialect.not_word
            return f"[^{found}]" if found else self._refuse(f"\\{char}")
        return self._literal(self._escaped_char(char))

    def _escaped_char(self, char: str) -> str:
        """Return the character of the escape that begins with ``char``.

        Reads hexadecimal digits. Raises InvalidRequest.
        """
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "xu":
            digits = 2 if char == "x" else 4
            code = self._text[self._at : self._at + digits]
            if len(code) < digits or any(digit not in "0123456789abcdefABCDEF" for digit in code):
                self._refuse(f"\\{char} without {digits} hexadecimal digits")
            self._at += digits
            # A lone surrogate is not a character of any text.
            if 0xD800 <= int(code, 16) < 0xE000:
                self._refuse("a lone surrogate")
            return chr(int(code, 16))
        if char.isalnum() and char.isascii():
            self._refuse(f"\\{char}")
        return char

    def _class(self) -> str:
        """Read a class behind its opening bracket and return the class in the dialect.

        Raises InvalidRequest.
        """
        negated = self._take("^")
        if self._at < len(self._text) and self._text[self._at] == "]":
            self._refuse("an empty class")
        items: list[str] = []
        while True:
            if self._at >= len(self._text):
                self._refuse("an unclosed class")
            if self._take("]"):
                inner = "".join(items)
                return f"[^{inner}{self._dialect.excluded}]" if negated else f"[{inner}]"
            low = self._class_item(negated)
            # A hyphen is a range only between two characters; a final hyphen is a literal.
            rest = self._text[self._at : self._at + 2]
            if len(rest) == 2 and rest[0] == "-" and rest[1] != "]":
                self._at += 1
                high = self._class_item(negated)
                if len(low) != 1 or len(high) != 1 or high < low:
                    self._refuse("a range of a class")
                if self._dialect.excluded and not negated and any(low <= char <= high for char in '"\\'):
                    self._refuse("a range with a quotation mark or a backslash")
                items.append(f"{self._in_class(low)}-{self._in_class(high)}")
            else:
                items.append(self._in_class(low) if len(low) == 1 else low)

    def _class_item(self, negated: bool) -> str:
        """Read one item of a class.

        Return one character, or a longer string for a set in class syntax. Raises InvalidRequest.
        """
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        # A negated class excludes each character that any dialect counts as a digit or word character. A
        # positive class includes only the characters on which all dialects agree.
        if char in "dw" and negated:
            found = self._dialect.not_digit if char == "d" else self._dialect.not_word
            return found or self._refuse(f"\\{char} in a negated class")
        if char in "dw":
            return _DIGIT if char == "d" else _WORD
        if char == "s":
            return self._coded(_ALL_SPACES if negated else self._dialect.space)
        if char in "DWS":
            self._refuse(f"\\{char} in a class")
        return self._escaped_char(char)

    def _next(self) -> str:
        if self._at >= len(self._text):
            self._refuse("an escape at the end")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, char: str) -> bool:
        if self._text[self._at : self._at + 1] != char:
            return False
        self._at += 1
        return True

    def _refuse(self, construct: str) -> Never:
        raise InvalidRequest(f"{construct} is not supported in a pattern (at character {self._at})")

    def _negated(self, chars: str) -> str:
        return f"[^{self._coded(chars)}{self._dialect.excluded}]"

    def _coded(self, chars: str) -> str:
        """Return characters, and ranges of characters, in class syntax."""
        return "".join(char if char == "-" else self._code(char) for char in chars)

    def _code(self, char: str) -> str:
        if ord(char) > self._dialect.most_code:
            self._refuse("a character beyond U+FFFF")
        return self._dialect.code % ord(char)

    def _literal(self, char: str) -> str:
        if not char.isprintable():
            return self._code(char)
        return f"\\{char}" if char in r"\.+*?()|[]{}^$/-" else char

    def _in_class(self, char: str) -> str:
        if not char.isprintable() or char in "&~":
            return self._code(char)
        return f"\\{char}" if char in r"\[]^-" else char
