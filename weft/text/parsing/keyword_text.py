"""Read arguments as keywords: ``key=value, ...)``, and the same with other separators and quotes."""

from __future__ import annotations

import re

from weft.text.parsing.call_ends import CallEnds
from weft.text.parsing.declaration import Keywords
from weft.text.parsing.json_text import quoted
from weft.text.parsing.python_text import PythonReader
from weft.text.parsing.tape import Reading, Tape

MAX_KEY = 256
_KEY = re.compile(r"[A-Za-z0-9_.:/\-]*")
_KEY_BEFORE_COLON = re.compile(r"[^:{}\[\]<>,\"'\n]*")


def can_read(spelled: Keywords, key: str) -> bool:
    """Return True if a ``KeywordReader`` reads ``key`` in front of a value."""
    pattern = _KEY_BEFORE_COLON if spelled.assign == ":" else _KEY
    plain = pattern.fullmatch(key) is not None and key == key.strip()
    return plain and 0 < len(key) <= MAX_KEY


class KeywordReader:
    """Reads the keywords of one call and gives the arguments out as JSON."""

    def __init__(self, tape: Tape, spelled: Keywords, ends: CallEnds) -> None:
        """``ends``: texts that may follow the arguments. The cursor stands behind the head of the call."""
        self._tape = tape
        self._spelled = spelled
        self._ends = ends
        self._values = PythonReader(tape, into_call=True, quote=spelled.quote)
        colon = spelled.assign == ":"
        self._pattern = _KEY_BEFORE_COLON if colon else _KEY
        self._quotes = ('"', "'", *((spelled.quote,) if spelled.quote else ())) if colon else ()

    def begins(self) -> Reading[bool]:
        """Return True, with the cursor behind white space, if a keyword or the end of the arguments follows.
        Nothing is given out.
        """
        tape = self._tape
        if not (yield from tape.blank()):
            return False
        start = tape.at
        found = (yield from tape.literal(self._spelled.end)) is not None or bool((yield from self._key()))
        tape.at = start
        return found

    def read(self) -> Reading[bool]:
        """Read the keywords and the end of the arguments. Return False if the arguments break.

        The end of the call, another call or the end of the output may replace the end of the arguments.
        """
        tape = self._tape
        tape.arguments("{")
        count = 0
        while True:
            if not (yield from tape.blank()):
                return False
            if (yield from tape.literal(self._spelled.end)) is not None:
                tape.arguments("}", tape.done)
                tape.skip(tape.at)
                return True
            key = yield from self._key()
            if not key:
                return False
            tape.arguments((", " if count else "") + quoted(key) + ": ")
            count += 1
            if not (yield from self._values.value()) or not (yield from tape.blank()):
                return False
            if (yield from tape.literal(",")) is not None:
                tape.skip(tape.at)
            elif not (yield from self._at_end()):
                return (yield from self._closes())

    def _at_end(self) -> Reading[bool]:
        """Return True if the end of the arguments stands at the cursor, which does not move."""
        start = self._tape.at
        found = (yield from self._tape.literal(self._spelled.end)) is not None
        self._tape.at = start
        return found

    def _closes(self) -> Reading[bool]:
        """Return True, and close the arguments, if the call ends at the cursor without the end of its
        arguments.
        """
        tape = self._tape
        behind = tape.at
        ended = not (yield from tape.peek())
        marks = (*self._ends.closings, *self._ends.openings)
        missing = ended or (yield from tape.literal(*marks)) is not None
        tape.at = behind
        if missing:
            tape.arguments("}", tape.done)
        return missing

    def _key(self) -> Reading[str]:
        """Read a key and the text behind the key. Return the key, or "" for anything else."""
        tape = self._tape
        # Models write JSON quotes around keys before a colon, too.
        quote = (yield from tape.literal(*self._quotes)) if self._quotes else None
        key = yield from tape.run(self._pattern, MAX_KEY)
        if len(key) > MAX_KEY or not key or (quote and (yield from tape.literal(quote)) is None):
            return ""
        if not (yield from tape.blank()):
            return ""
        return key.rstrip() if (yield from tape.literal(self._spelled.assign)) is not None else ""
