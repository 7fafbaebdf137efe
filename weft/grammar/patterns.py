"""Patterns of JSON schemas (ECMA-262, found anywhere in a text) as regular expressions of whole texts.

Dialects differ: what ``\\d``, ``\\s``, ``.`` and ``$`` mean, what stands for itself in a class. What comes
out is written in the part that all dialects read alike, and is at most what each of them would accept. What
has no such form (look-around, ``\\b``, references, flags) is refused.
"""

from __future__ import annotations

from typing import Never

from weft.common.errors import InvalidRequest

_DIGIT = "0-9"
_WORD = "A-Za-z0-9_"
_SPACE = r" \t\n\r\f\v"
_ALL_SPACES = (
    r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}\x{feff}"
)
"""What any dialect takes for white space."""
_NOT_DIGIT = r"[^\d]"
_NOT_WORD = r"[^\w\p{N}]"
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_CONTROLS = {"t": r"\t", "n": r"\n", "r": r"\r", "f": r"\f", "v": r"\v"}
_MAX_DEPTH = 40
_MAX_COUNT = 65535
_ANYTHING = r"(?s:.*)"


def whole_pattern(pattern: str) -> str:
    """A regular expression that matches the whole of just those texts in which ``pattern`` is found.

    Raises InvalidRequest for what has no such form in all dialects, saying what and where.
    """
    return _Reader(pattern).whole()


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0

    def whole(self) -> str:
        """The alternatives, each bound to the ends of the text or free to them."""
        result = [self._bound()]
        while self._take("|"):
            result.append(self._bound())
        if self._at < len(self._text):
            self._refuse("a closing parenthesis without an opening one")
        return f"(?:{'|'.join(result)})" if len(result) > 1 else result[0]

    def _bound(self) -> str:
        start = "" if self._take("^") else _ANYTHING
        inner = self._sequence(0)
        end = "" if self._take("$") else _ANYTHING
        if self._at < len(self._text) and self._text[self._at] not in "|)":
            self._refuse("$ anywhere but at the end of an alternative")
        return f"{start}{inner}{end}"

    def _alternatives(self, depth: int) -> str:
        result = [self._sequence(depth)]
        while self._take("|"):
            result.append(self._sequence(depth))
        return "|".join(result)

    def _sequence(self, depth: int) -> str:
        result = ""
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            if self._text[self._at] == "$":
                if depth:
                    self._refuse("$ in a group")
                break
            result += self._repeated(self._atom(depth))
        return result

    def _atom(self, depth: int) -> str:
        char = self._next()
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._class()
        if char == ".":
            return _DOT
        if char == "\\":
            return self._escape()
        if char == "^":
            self._refuse("^ anywhere but at the start of an alternative")
        if char in "*+?":
            self._refuse(f"{char} with nothing to repeat")
        return _literal(char)

    def _group(self, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            self._refuse(f"groups nested more than {_MAX_DEPTH} deep")
        if self._take("?"):
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
            self._refuse("a group that is not closed")
        return f"(?:{inner})"

    def _repeated(self, atom: str) -> str:
        if self._at >= len(self._text):
            return atom
        char = self._text[self._at]
        if char in "*+?":
            self._at += 1
            times = char
        elif char == "{" and (found := self._counts()) is not None:
            times = found
        else:
            return atom
        self._take("?")  # lazy: the same texts
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            self._refuse("two repetitions of one thing")
        return atom + times

    def _counts(self) -> str | None:
        """``{n}``, ``{n,}`` or ``{n,m}``; None where the brace stands for itself."""
        end = self._text.find("}", self._at)
        least, comma, most = self._text[self._at + 1 : end].partition(",") if end > 0 else ("", "", "")
        if not least and comma and most.isdecimal():
            self._refuse("a count without its smaller number")
        if not (least.isascii() and least.isdecimal()) or (
            most and not (most.isascii() and most.isdecimal())
        ):
            return None
        if int(least) > _MAX_COUNT or int(most or 0) > _MAX_COUNT or (most and int(most) < int(least)):
            self._refuse(f"a count over {_MAX_COUNT}, or out of order")
        self._at = end + 1
        return f"{{{int(least)}{comma}{int(most) if most else ''}}}"

    def _escape(self) -> str:
        char = self._next()
        named = {
            "d": f"[{_DIGIT}]",
            "w": f"[{_WORD}]",
            "s": f"[{_SPACE}]",
            "D": _NOT_DIGIT,
            "W": _NOT_WORD,
            "S": f"[^{_ALL_SPACES}]",
        }
        return named[char] if char in named else _literal(self._escaped_char(char))

    def _escaped_char(self, char: str) -> str:
        """The character that an escape stands for."""
        if char in _CONTROLS:
            return {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}[char]
        if char in "xu":
            digits = 2 if char == "x" else 4
            code = self._text[self._at : self._at + digits]
            if len(code) < digits or any(digit not in "0123456789abcdefABCDEF" for digit in code):
                self._refuse(f"\\{char} without {digits} hexadecimal digits")
            self._at += digits
            if 0xD800 <= int(code, 16) < 0xE000:
                self._refuse("half of a surrogate pair")
            return chr(int(code, 16))
        if char.isalnum() and char.isascii():
            self._refuse(f"\\{char}")
        return char

    def _class(self) -> str:
        negated = self._take("^")
        if self._at < len(self._text) and self._text[self._at] == "]":
            self._refuse("an empty class")
        items: list[str] = []
        while True:
            if self._at >= len(self._text):
                self._refuse("a class that is not closed")
            if self._take("]"):
                return f"[{'^' if negated else ''}{''.join(items)}]"
            low = self._class_item(negated)
            rest = self._text[self._at : self._at + 2]
            if len(rest) == 2 and rest[0] == "-" and rest[1] != "]":
                self._at += 1
                high = self._class_item(negated)
                if len(low) != 1 or len(high) != 1 or high < low:
                    self._refuse("a range of a class")
                items.append(f"{_in_class(low)}-{_in_class(high)}")
            else:
                items.append(_in_class(low) if len(low) == 1 else low)

    def _class_item(self, negated: bool) -> str:
        """One character, or (longer) a set as it stands in a class."""
        char = self._next()
        if char != "\\":
            return char
        char = self._next()
        sets = {
            "d": r"\d" if negated else _DIGIT,
            "w": r"\w\p{N}" if negated else _WORD,
            "s": _ALL_SPACES if negated else _SPACE,
        }
        if char in sets:
            return sets[char]
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

    def _refuse(self, what: str) -> Never:
        raise InvalidRequest(f"{what} is not supported in a pattern (at character {self._at})")


def _literal(char: str) -> str:
    return _coded(char) if not char.isprintable() else f"\\{char}" if char in r"\.+*?()|[]{}^$#&-~/" else char


def _in_class(char: str) -> str:
    return _coded(char) if not char.isprintable() else f"\\{char}" if char in r"\[]^-&~" else char


def _coded(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"
