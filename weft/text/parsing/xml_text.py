"""Arguments that stand in tags of their own, read as one JSON object while they stream."""

from __future__ import annotations

import re

from weft.text.parsing.declaration import Parameters
from weft.text.parsing.json_text import escaped, quoted
from weft.text.parsing.parser import Tool
from weft.text.parsing.tape import Reading, Tape
from weft.text.parsing.values import ALL_TYPES, parameter_types, to_json

MAX_KEY = 256


class ParameterReader:
    """Reads the parameters of a call that has begun. A string streams; any other value comes when it ends."""

    def __init__(self, tape: Tape, spelled: Parameters, tool: Tool) -> None:
        self._tape = tape
        self._spelled = spelled
        self._tool = tool
        self._count = 0
        self._close = re.compile(re.escape(spelled.value_close))

    def read(self) -> Reading[bool]:
        """Up to and with ``end``. False where it breaks: the rest, from ``done``, is no part of it."""
        tape = self._tape
        spelled = self._spelled
        tape.arguments("{")
        while True:
            yield from tape.blank()
            found = yield from tape.literal(spelled.key_open, spelled.end)
            if found == spelled.end:
                tape.arguments("}", tape.done)
                tape.skip(tape.at)
                return True
            if found is None or not (yield from self._one()):
                return False

    def _one(self) -> Reading[bool]:
        """One parameter behind ``key_open``, with what closes its value."""
        tape = self._tape
        spelled = self._spelled
        start = tape.at
        key = yield from self._up_to(spelled.key_close)
        if key is None:
            return False
        end = start + len(key)
        types = parameter_types(self._tool.parameters, key)
        if spelled.string_flag and (yield from tape.literal(spelled.string_flag)) is not None:
            flag = yield from tape.literal("true", "false")
            if flag is None:
                return False
            types = ("string",) if flag == "true" else _without_string(types)
        if spelled.value_open:
            yield from tape.blank()
            if (yield from tape.literal(spelled.value_open)) is None:
                return False
        if spelled.newlines:
            yield from tape.literal("\n")
        begin = tape.at
        tape.skip(start)
        tape.arguments((", " if self._count else "") + quoted(key) + ": ", end)
        tape.skip(begin)
        self._count += 1
        if types == ("string",):
            return (yield from self._string())
        return (yield from self._other(types))

    def _up_to(self, close: str) -> Reading[str | None]:
        """A key, and reads ``close`` behind it."""
        tape = self._tape
        start = tape.at
        while True:
            text = tape.slice(start, min(tape.end, start + MAX_KEY + len(close)))
            key, found, _ = text.partition(close)
            if "\n" in key or len(key) > MAX_KEY:
                return None
            if found:
                tape.at = start + len(key) + len(close)
                return key
            if len(text) >= MAX_KEY + len(close) or not (yield from tape.more()):
                return None

    def _string(self) -> Reading[bool]:
        tape = self._tape
        tape.arguments('"', tape.done)
        while True:
            piece, closed = yield from self._piece()
            tape.arguments(escaped(piece), tape.done + len(piece))
            if closed is None:
                return False
            if closed:
                tape.arguments('"', tape.done)
                tape.skip(tape.at)
                return True

    def _other(self, types: tuple[str, ...]) -> Reading[bool]:
        tape = self._tape
        pieces: list[str] = []
        while True:
            piece, closed = yield from self._piece()
            pieces.append(piece)
            tape.arguments("", tape.done + len(piece))
            if closed:
                tape.arguments(to_json("".join(pieces), types), tape.done)
                tape.skip(tape.at)
                return True
            if closed is None:  # cut short: what there is of it, as it is
                tape.arguments("".join(pieces), tape.done)
                return False

    def _piece(self) -> Reading[tuple[str, bool | None]]:
        """(the next text of a value from ``done``, whether it ends there). None for the end of the output.

        Where the value ends, the cursor stands behind its closing tag.
        """
        tape = self._tape
        spelled = self._spelled
        tail = "\n" if spelled.newlines else ""
        while True:
            start = tape.done
            match = tape.search(self._close, start)
            if match is not None:
                end = tape.position(match.start())
                tape.at = end + len(spelled.value_close)
                behind = tape.at
                if (yield from self._is_end()):
                    piece = tape.slice(start, end)
                    tape.at = behind
                    return piece.removesuffix(tail) if tail else piece, True
                return tape.slice(start, behind), False
            text = tape.slice(start, tape.end)
            if tape.ended:
                return text, None
            free = len(text) - held(text, tail + spelled.value_close, spelled.value_close)
            if free:
                return text[:free], False
            yield from tape.more()

    def _is_end(self) -> Reading[bool]:
        """Whether the next parameter or the call's end follows here, or the output is cut where it may."""
        tape = self._tape
        spelled = self._spelled
        yield from tape.blank()
        start = tape.at
        if (yield from tape.literal(spelled.key_open, spelled.end)) is not None:
            return True
        if not tape.ended or tape.end - start >= max(len(spelled.key_open), len(spelled.end)):
            return False
        rest = tape.slice(start, tape.end)
        return spelled.key_open.startswith(rest) or spelled.end.startswith(rest)


def _without_string(types: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in types if name != "string") or ALL_TYPES[:-1]


def held(text: str, *marks: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``marks``."""
    longest = 0
    for mark in marks:
        for size in range(min(len(mark) - 1, len(text)), longest, -1):
            if text.endswith(mark[:size]):
                longest = size
                break
    return longest
