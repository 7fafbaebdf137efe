"""Read Python literals as JSON text while the text streams. Nothing is evaluated.

Accepted: strings (with escapes, also in triple quotes), numbers, True, False, None, lists, tuples (as lists)
and dicts. The words of JSON (true, false, null) are accepted too.
"""

from __future__ import annotations

import re

from weft.text.parsing.json_text import MAX_DEPTH, escaped, is_number, quoted
from weft.text.parsing.tape import Reading, Tape, Texts

_WORDS = {
    "True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null",
}  # fmt: skip
_ESCAPES = {
    "n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "a": "\a", "b": "\b", "f": "\f",
    "v": "\v", "\n": "",
}  # fmt: skip
_HEX = {"x": 2, "u": 4, "U": 8}
_NUMBER = re.compile(r"[0-9A-Za-z_.+\-]*")
_WORD = re.compile(r"[A-Za-z0-9_]*")
_BARE_KEY = re.compile(r"[^:{}\[\]<>,\"'\n]*")
_MAX_BARE_KEY = 256
_DIGITS = re.compile(r"[0-9a-fA-F]*")
_PLAIN = {quote: re.compile(f"[^{quote}\\\\\n]*") for quote in "'\""}
_PLAIN_LINES = {quote: re.compile(f"[^{quote}\\\\]*") for quote in "'\""}
_MAX_NUMBER = 400
_SPACE = 1 << 12
"""Maximum white space between two parts of a value."""
_INTEGER = re.compile(r"[+-]?(?:0|[1-9][0-9]*)")
_BASED = re.compile(r"([+-]?)0([xXoObB])([0-9a-fA-F]+)")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)(?:[eE][+-]?[0-9]+)?")
_CLOSES = {"[": "]", "(": ")", "{": "}"}


def python_to_json(text: str) -> str | None:
    """Return ``text`` (a value in Python's or JSON's spelling) as JSON if all of ``text`` is one value, else
    None.
    """
    tape = Tape()
    tape.add(text)
    tape.ended = True
    reader = PythonReader(tape)
    steps = reader.value()
    try:
        next(steps)
    except StopIteration as end:
        return "".join(reader.pieces) if end.value and tape.at == tape.end else None
    return None


class PythonReader:
    """Reads values at a tape's cursor. The JSON text goes to ``pieces``, or to the arguments of the current
    call.
    """

    def __init__(self, tape: Tape, *, into_call: bool = False, quote: str = "") -> None:
        """``quote``: a further text at both ends of strings, see ``Keywords.quote``."""
        self.pieces: list[str] = []
        self._tape = tape
        self._into_call = into_call
        self._quote = quote
        self._quotes = Texts((quote,) if quote else ())

    def value(self) -> Reading[bool]:
        """Read one value and give the value out as JSON.

        Return False, with the cursor there, at the first invalid character; the JSON so far stays given out.
        """
        tape = self._tape
        stack: list[str] = []
        while True:
            if not (yield from self._space()):
                return False
            char = yield from tape.peek()
            # An explicit stack, because recursion would nest generators as deep as the value.
            if char and char in _CLOSES:
                if len(stack) >= MAX_DEPTH:
                    return False
                tape.at += 1
                stack.append(char)
                self._give("{" if char == "{" else "[")
            elif not (yield from self._atom(char)):
                return False
            if not (yield from self._after(stack, opened=bool(char) and char in _CLOSES)):
                return False
            if not stack:
                return True

    def _after(self, stack: list[str], *, opened: bool) -> Reading[bool]:
        """Read the text behind a value or an opening bracket, up to the next value. Return False if the value
        breaks.

        Closing brackets are taken from ``stack``. ``opened``: the last character read was an opening bracket.
        """
        tape = self._tape
        while stack:
            if not (yield from self._space()):
                return False
            separated = False
            if not opened and (yield from tape.literal(",")) is not None:
                separated = True
                if not (yield from self._space()):
                    return False
            # A comma before the closing bracket is allowed and not written.
            if (yield from tape.literal(_CLOSES[stack[-1]])) is not None:
                self._give("}" if stack.pop() == "{" else "]")
                opened = False
                continue
            if not opened and not separated:
                return False
            if separated:
                self._give(", ")
            return (yield from self._key()) if stack[-1] == "{" else True
        return True

    def _key(self) -> Reading[bool]:
        """Read a dict key with the colon.

        A number becomes a string, as JSON requires. With ``quote``, a key is a word or stands in these
        quotes. Return False for any other key or without a colon.
        """
        tape = self._tape
        char = yield from tape.peek()
        if self._quote and char not in ("'", '"'):
            if not (yield from self._bare_key()):
                return False
        elif char in ("'", '"'):
            if not (yield from self._string(char)):
                return False
        else:
            start = tape.at
            digits = yield from tape.run(_NUMBER, _MAX_NUMBER)
            if not digits or not is_number(digits):
                tape.at = start
                return False
            self._give(quoted(digits))
        if not (yield from self._space()) or (yield from tape.literal(":")) is None:
            return False
        self._give(": ")
        return True

    def _atom(self, char: str) -> Reading[bool]:
        """Read a string, a number or a word and give the value out as JSON.

        Return False, with the cursor at the start, for anything else.
        """
        tape = self._tape
        start = tape.at
        if char in ("'", '"'):
            return (yield from self._string(char))
        if char and char == self._quote[:1] and (yield from tape.literal(self._quote)) is not None:
            return (yield from self._between_quotes())
        if char and char in "0123456789+-.":
            found = _number(  # ``_NUMBER`` excludes a comma, so the run ends before the next item
                (yield from tape.run(_NUMBER, _MAX_NUMBER))
            )
        else:
            found = _WORDS.get((yield from tape.run(_WORD, 8)))
        if found is None:
            tape.at = start
            return False
        self._give(found)
        return True

    def _string(self, quote: str) -> Reading[bool]:
        """Read a string in single or triple quotes and give the string out as JSON.

        Return False if the output ends first or an escape is invalid.
        """
        tape = self._tape
        mark = yield from tape.literal(quote * 3, quote)
        assert mark is not None
        plain = (_PLAIN if len(mark) == 1 else _PLAIN_LINES)[quote]
        self._give('"')
        while True:
            # Give out each plain run as soon as the run arrives, so that long strings stream.
            if tape.at >= tape.end and not (yield from tape.more()):
                return False
            piece = tape.match(plain)
            if piece:
                self._give(escaped(piece))
                continue
            if (yield from tape.literal(mark)) is not None:
                self._give('"')
                return True
            char = yield from tape.peek()
            if char == quote:
                tape.at += 1
                self._give(escaped(quote))
            elif char != "\\" or not (yield from self._escape()):
                return False

    def _bare_key(self) -> Reading[bool]:
        """Read a key between ``quote`` or without quotes and give the key out as JSON. Return False without a
        key.
        """
        tape = self._tape
        if (yield from tape.literal(self._quote)) is not None:
            return (yield from self._between_quotes())
        key = yield from tape.run(_BARE_KEY, _MAX_BARE_KEY)
        if not key or len(key) > _MAX_BARE_KEY:
            return False
        self._give(quoted(key.rstrip()))
        return True

    def _between_quotes(self) -> Reading[bool]:
        """Read a string from behind ``quote`` to the next ``quote`` and give the string out as JSON.

        Return False if the output ends first.
        """
        tape = self._tape
        self._give('"')
        while True:
            text = tape.slice(tape.at, tape.end)
            found = self._quotes.pattern.search(text)
            held = 0 if tape.ended else self._quotes.held(text)
            free = len(text) - held if found is None else found.start()
            tape.at += free
            self._give(escaped(text[:free]))
            if found is not None:
                tape.at += len(self._quote)
                self._give('"')
                return True
            if not (yield from tape.more()) and tape.at == tape.end:
                return False

    def _escape(self) -> Reading[bool]:
        """Read an escape and give out the character.

        Return False, with the cursor at the backslash, for an incomplete escape or an invalid code point.
        """
        tape = self._tape
        start = tape.at
        tape.at += 1
        char = yield from tape.peek()
        if not char:
            tape.at = start
            return False
        tape.at += 1
        if char in _ESCAPES:
            self._give(escaped(_ESCAPES[char]))
            return True
        if char not in _HEX:
            self._give(escaped("\\" + char))  # Python keeps the backslash of an unknown escape
            return True
        digits = yield from tape.run(_DIGITS, _HEX[char] - 1)
        code = int(digits, 16) if len(digits) == _HEX[char] else 1 << 31
        if code >= 0x110000 or (char == "U" and 0xD800 <= code < 0xE000):
            tape.at = start
            return False
        self._give(f"\\u{digits}" if char == "u" else escaped(chr(code)))
        return True

    def _space(self) -> Reading[bool]:
        return (yield from self._tape.blank(_SPACE))

    def _give(self, text: str) -> None:
        if self._into_call:
            self._tape.arguments(text)
        else:
            self.pieces.append(text)


def _number(text: str) -> str | None:
    """Return a Python number as a JSON number, or None."""
    # Python allows single underscores between digits.
    plain = text.replace("_", "") if re.fullmatch(r"[^_]+(_[^_]+)*", text) else text
    based = _BASED.fullmatch(plain)
    if based is not None:
        try:
            value = int(based[3], {"x": 16, "o": 8, "b": 2}[based[2].lower()])
        except ValueError:
            return None
        return ("-" if based[1] == "-" else "") + str(value)
    if _INTEGER.fullmatch(plain):
        return plain.removeprefix("+")
    if _FLOAT.fullmatch(plain):
        mantissa, e, exponent = plain.lower().removeprefix("+").partition("e")
        sign = "-" if mantissa.startswith("-") else ""
        whole, _, fraction = mantissa.removeprefix("-").partition(".")
        made = f"{sign}{whole.lstrip('0') or '0'}.{fraction or '0'}" + (f"e{exponent}" if e else "")
        return made if is_number(made) else None
    return None
