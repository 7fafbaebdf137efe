"""Arguments that stand in tags of their own, read as one JSON object while they stream."""

from __future__ import annotations

import re
from collections.abc import Mapping

from weft.text.parsing.call_ends import CallEnds
from weft.text.parsing.declaration import Parameters
from weft.text.parsing.json_text import escaped, quoted
from weft.text.parsing.parser import Tool
from weft.text.parsing.tape import Reading, Tape, Texts
from weft.text.parsing.values import ALL_TYPES, parameter_types, to_json

MAX_KEY = 256


class ParameterReader:
    """Reads the parameters of a call that has begun. A string streams; any other value comes when it ends."""

    def __init__(self, tape: Tape, spelled: Parameters, tool: Tool, ends: CallEnds) -> None:
        self._tape = tape
        self._spelled = spelled
        self._tool = tool
        self._ends = ends
        self._keys: set[str] = set()
        """Of the parameters so far."""
        self._misspelled: frozenset[str] = frozenset()
        """What may stand for the closing tag of the present value."""
        self._marks = Texts(())
        """All that may end the present value."""
        self._begin = 0
        """Where the present value begins."""
        self._scan = 0
        """What was looked through for them, as a position."""
        self._stems = _stems(spelled.key_open)
        """Beginnings of a parameter that cannot be read, because a part of it is missing."""
        self._ahead = Texts((spelled.value_close, *ends.openings))
        self._next: tuple[int, str] = (-1, "")
        """The first of ``_ahead`` behind the present place: position and text. "" for the output's end."""

    def begins(self) -> Reading[bool]:
        """Whether parameters stand at the cursor that can be read, or the end of a call without any."""
        tape = self._tape
        found = yield from tape.literal(self._spelled.key_open, self._spelled.end)
        if found == self._spelled.key_open:
            return (yield from self._head()) is not None
        return found is not None or (yield from self._ends.here(closed=False)) is True

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
            if found is None:
                whole = (yield from self._ends.here(closed=True)) is True
                if whole:
                    tape.arguments("}", tape.done)
                return whole
            if not (yield from self._one()):
                return False

    def _one(self) -> Reading[bool]:
        """One parameter behind ``key_open``, with what closes its value."""
        tape = self._tape
        start = tape.at
        head = yield from self._head()
        if head is None:
            return False
        key, types = head
        begin = tape.at
        tape.skip(start)
        tape.arguments((", " if self._keys else "") + quoted(key) + ": ", start + len(key))
        tape.skip(begin)
        self._keys.add(key)
        self._expect_end(key)
        if types == ("string",):
            return (yield from self._string())
        return (yield from self._other(types))

    def _head(self) -> Reading[tuple[str, tuple[str, ...]] | None]:
        """(key, types of its value). The cursor goes from behind ``key_open`` to the value. None where the
        head cannot be read."""
        tape = self._tape
        spelled = self._spelled
        key = yield from self._up_to(spelled.key_close)
        if key is None:
            return None
        types = parameter_types(self._tool.parameters, key)
        value_open = spelled.value_open
        if spelled.string_flag:
            flag = yield from self._flag()
            if flag is None:  # the schema says the type, and the key's own quote was read
                value_open = value_open.removeprefix(spelled.key_close)
            else:
                types = ("string",) if flag == "true" else _without_string(types)
        if value_open:
            yield from tape.blank()
            if (yield from tape.literal(value_open)) is None:
                return None
        if spelled.newlines:
            yield from tape.literal("\n")
        return key, types

    def _flag(self) -> Reading[str | None]:
        tape = self._tape
        start = tape.at
        if (yield from tape.literal(self._spelled.string_flag)) is not None:
            flag = yield from tape.literal("true", "false")
            if flag is not None:
                return flag
        tape.at = start
        return None

    def _up_to(self, close: str) -> Reading[str | None]:
        """A key, and reads ``close`` behind it. None where none can stand: no text, more
        than a line, or another tag inside."""
        tape = self._tape
        start = tape.at
        while True:
            text = tape.slice(start, min(tape.end, start + MAX_KEY + len(close)))
            key, found, _ = text.partition(close)
            if "\n" in key or len(key) > MAX_KEY:
                return None
            if found:
                tape.at = start + len(key) + len(close)
                return key if key.strip() and "<" not in key else None
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

    # -- where a value ends

    def _expect_end(self, key: str) -> None:
        """A value of ``key`` begins at ``done``."""
        spelled = self._spelled
        self._misspelled = _misspelled(spelled.value_close, key)
        closings = self._ends.closings
        self._marks = Texts((spelled.value_close, spelled.key_open, *closings, *self._misspelled))
        self._begin = self._scan = self._tape.done

    def _piece(self) -> Reading[tuple[str, bool | None]]:
        """(the next text of a value from ``done``, whether the value ends there). None at the output's end.

        Where the value ends, the cursor stands behind the closing tag, or at what ends the value instead.
        """
        tape = self._tape
        while True:
            match = tape.search(self._marks.pattern, self._scan)
            if match is not None:
                start = tape.position(match.start())
                if start > self._scan and (free := self._free(start)):
                    self._scan = start
                    return free, False
                end = yield from self._ending(match[0], start)
                if end is not None:
                    tape.at = start
                    value = tape.slice(tape.done, start)
                    mended = end == start or self._spelled.newlines
                    tape.at = end
                    return value.removesuffix("\n") if mended else value, True
                self._scan = start + len(match[0])
                continue
            if tape.ended:
                return tape.slice(tape.done, tape.end), None
            self._scan = tape.end - self._marks.held(tape.slice(self._scan, tape.end))
            if free := self._free(self._scan):
                return free, False
            yield from tape.more()

    def _free(self, end: int) -> str:
        """The text up to ``end`` that can be given out: a last line end may belong to a tag."""
        return self._tape.slice(self._tape.done, end).removesuffix("\n")

    def _ending(self, mark: str, start: int) -> Reading[int | None]:
        """The position behind the value's closing tag, if ``mark`` at ``start`` ends the value; ``start``
        where the tag is missing. None where ``mark`` is a part of the value."""
        tape = self._tape
        behind = start + len(mark)
        tape.at = behind
        if mark == self._spelled.value_close or mark in self._misspelled:
            return behind if (yield from self._is_end(mark)) else None
        if mark == self._spelled.key_open:
            return start if (yield from self._is_next(start)) else None
        tape.at = start
        here = yield from self._ends.here(closed=False)
        if here is None and not (yield from self._closed_behind(behind)):
            here = True
        return start if here else None

    def _is_end(self, mark: str) -> Reading[bool]:
        """Whether the next parameter or the call's end follows ``mark``, also where the output ends inside of
        the tag that follows."""
        tape = self._tape
        spelled = self._spelled
        behind = tape.at
        yield from tape.blank()
        start = tape.at
        if (yield from tape.literal(spelled.key_open, spelled.end, *self._stems)) is not None:
            return True
        if mark == spelled.value_close and tape.ended:
            rest = tape.slice(start, min(tape.end, start + len(spelled.key_open) + len(spelled.end)))
            if spelled.key_open.startswith(rest) or spelled.end.startswith(rest):
                return True
        tape.at = behind
        return (yield from self._ends.here(closed=True)) is True

    def _is_next(self, start: int) -> Reading[bool]:
        """Whether a parameter begins at ``start`` although the last one was not closed.

        The key must be one of the tool's that did not come yet. A tag without a second one must begin a line.
        A whole parameter inside of a value is text: the value goes on behind its closing tag.
        """
        tape = self._tape
        spelled = self._spelled
        begins_line = start == self._begin if start == tape.done else tape.slice(start - 1, start) == "\n"
        if not spelled.value_open and not begins_line:
            return False
        head = yield from self._head()
        properties = self._tool.parameters.get("properties")
        if head is None or not isinstance(properties, Mapping):
            return False
        if head[0] in self._keys or head[0] not in properties:
            return False
        behind = tape.at
        if not (yield from self._closed_behind(behind)):
            return True
        tape.at = self._next[0] + len(spelled.value_close)
        return (yield from self._is_end(spelled.value_close))

    def _closed_behind(self, start: int) -> Reading[bool]:
        """Whether the first thing from ``start`` on is a closing tag, and not another call or the output's
        end. The place is kept, so that a text is looked through once."""
        if self._next[0] < start:
            self._next = yield from self._first_ahead(start)
        return self._next[1] == self._spelled.value_close

    def _first_ahead(self, start: int) -> Reading[tuple[int, str]]:
        """The first closing tag, or beginning of a call at the start of a line: position and text."""
        tape = self._tape
        while True:
            match = tape.search(self._ahead.pattern, start)
            if match is not None:
                place = tape.position(match.start())
                if match[0] == self._spelled.value_close or tape.slice(place - 1, place) == "\n":
                    return place, match[0]
                start = place + len(match[0])
            elif tape.ended:
                return tape.end, ""
            else:
                start = tape.end - self._ahead.held(tape.slice(start, tape.end))
                yield from tape.more()


def _without_string(types: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in types if name != "string") or ALL_TYPES[:-1]


def _stems(key_open: str) -> tuple[str, ...]:
    name = re.match(r"<([^\s=>]+)", key_open)
    return () if name is None else (name[0], "<" + re.split(r"\W", name[1])[-1])


def _misspelled(tag: str, key: str) -> frozenset[str]:
    """What models write in place of the closing tag ``tag`` of the parameter ``key``."""
    if not tag.startswith("</"):
        return frozenset()
    name = tag[2:-1]
    plain = re.split(r"\W", name)[-1]
    forms = (f"</{name}/>", f"<{name}/>", f"</{name} >", f"</ {name}>", f"</{name}s>", f"</{name[:-4]}>")
    return frozenset((*forms, f"</{name}={key}>", f"</{key}>", f"</{plain}>")) - {tag}
