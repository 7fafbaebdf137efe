"""Read arguments in tags as one JSON object while the text streams."""

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
    """Reads the parameters of a call. A string value streams. Any other value is given out when the value
    ends.
    """

    def __init__(self, tape: Tape, spelled: Parameters, tool: Tool, ends: CallEnds) -> None:
        """``ends`` recognizes the end of the call.

        The cursor of ``tape`` stands behind the head of the call.
        """
        self._tape = tape
        self._spelled = spelled
        self._tool = tool
        self._ends = ends
        self._keys: set[str] = set()
        """Keys of the parameters read so far."""
        self._misspelled: frozenset[str] = frozenset()
        """Misspelled forms of the closing tag of the current value."""
        self._marks = Texts(())
        """All texts that may end the current value."""
        self._begin = 0
        """Position of the start of the current value."""
        self._scan = 0
        """Position up to which the current value was searched for ``_marks``."""
        self._stems = _stems(spelled.key_open)
        """Texts at the start of an incomplete, unreadable parameter."""
        self._ahead = Texts((spelled.value_close, *ends.openings))
        self._next: tuple[int, str] = (-1, "")
        """Position and text of the next ``_ahead`` match; "" stands for the end of the output."""

    def begins(self) -> Reading[bool]:
        """Return True if a readable parameter, or the end of a call without parameters, stands at the cursor.

        The cursor may move; nothing is given out.
        """
        tape = self._tape
        found = yield from tape.literal(self._spelled.key_open, self._spelled.end)
        if found == self._spelled.key_open:
            return (yield from self._head()) is not None
        return found is not None or (yield from self._ends.here(closed=False)) is True

    def read(self) -> Reading[bool]:
        """Read the parameters up to and including ``end``, and give the arguments out as JSON.

        Return False if the parameters break. After False, the text from ``done`` on is not part of the call.
        """
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
                # The parameters' own end is missing: accept the end of the call instead.
                whole = (yield from self._ends.here(closed=True)) is True
                if whole:
                    tape.arguments("}", tape.done)
                return whole
            if not (yield from self._one()):
                return False

    def _one(self) -> Reading[bool]:
        """Read one parameter behind ``key_open``, up to the end of the value, and give key and value out as
        JSON.

        Return False if the head is unreadable or the value is cut off.
        """
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
        """Return (key, types of the value) and move the cursor from behind ``key_open`` to the value; None if
        unreadable.
        """
        tape = self._tape
        spelled = self._spelled
        key = yield from self._up_to(spelled.key_close)
        if key is None:
            return None
        types = parameter_types(self._tool.parameters, key)
        value_open = spelled.value_open
        if spelled.string_flag:
            flag = yield from self._flag()
            if flag is None:  # no flag: the schema decides, and ``_up_to`` has already read the quote
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
        """Read the string flag and return "true" or "false"; None, with nothing read, without a flag."""
        tape = self._tape
        start = tape.at
        if (yield from tape.literal(self._spelled.string_flag)) is not None:
            flag = yield from tape.literal("true", "false")
            if flag is not None:
                return flag
        tape.at = start
        return None

    def _up_to(self, close: str) -> Reading[str | None]:
        """Return the key and read ``close``.

        Return None for an invalid key: empty, longer than a line or ``MAX_KEY``, or with a tag inside.
        """
        tape = self._tape
        start = tape.at
        while True:
            # Search at most one key, so that a missing ``close`` cannot hold back a long text.
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
        """Stream a string value as JSON, with the closing tag skipped.

        Return False if the output ends first; the JSON string then stays open.
        """
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
        """Gather a value that is not only a string and give the value out as JSON.

        If the output ends first, give out the raw text and return False.
        """
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
            if closed is None:  # cut off: give out the raw text
                tape.arguments("".join(pieces), tape.done)
                return False

    # -- where a value ends

    def _expect_end(self, key: str) -> None:
        """Prepare the search for the end of the value of ``key``, which begins at ``done``."""
        spelled = self._spelled
        self._misspelled = _misspelled(spelled.value_close, key)
        closings = self._ends.closings
        self._marks = Texts((spelled.value_close, spelled.key_open, *closings, *self._misspelled))
        self._begin = self._scan = self._tape.done

    def _piece(self) -> Reading[tuple[str, bool | None]]:
        """Return the next text of a value from ``done``, and True if the value ends there (None: the output
        ends).

        At the end of the value, the cursor stands behind the closing tag. If another mark ended the value,
        the cursor stands at that mark.
        """
        tape = self._tape
        while True:
            match = tape.search(self._marks.pattern, self._scan)
            if match is not None:
                start = tape.position(match.start())
                # Stream the text before a possible end first; the next call decides the mark.
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
        """Return the text up to ``end`` ready to give out. A final line end may belong to a tag and stays."""
        return self._tape.slice(self._tape.done, end).removesuffix("\n")

    def _ending(self, mark: str, start: int) -> Reading[int | None]:
        """Decide if ``mark`` at ``start`` ends the value.

        Return None if ``mark`` is part of the value. Return the position behind the closing tag, or ``start``
        if the closing tag is missing. The cursor moves.
        """
        tape = self._tape
        behind = start + len(mark)
        tape.at = behind
        if mark == self._spelled.value_close or mark in self._misspelled:
            return behind if (yield from self._is_end(mark)) else None
        if mark == self._spelled.key_open:
            return start if (yield from self._is_next(start)) else None
        tape.at = start
        # The remaining marks close or open a call; the closing tag of the value may be missing.
        here = yield from self._ends.here(closed=False)
        if here is None and not (yield from self._closed_behind(behind)):
            here = True
        return start if here else None

    def _is_end(self, mark: str) -> Reading[bool]:
        """Return True if the next parameter or the end of the call follows ``mark``.

        An output cut off inside the following tag counts too. The cursor may move.
        """
        tape = self._tape
        spelled = self._spelled
        behind = tape.at
        yield from tape.blank()
        start = tape.at
        if (yield from tape.literal(spelled.key_open, spelled.end, *self._stems)) is not None:
            return True
        if mark == spelled.value_close and tape.ended:
            rest = tape.slice(start, min(tape.end, start + len(spelled.key_open) + len(spelled.end)))
            # The output ended inside the next tag.
            if spelled.key_open.startswith(rest) or spelled.end.startswith(rest):
                return True
        tape.at = behind
        return (yield from self._ends.here(closed=True)) is True

    def _is_next(self, start: int) -> Reading[bool]:
        """Return True if a new parameter begins at ``start`` without a closing tag of the last parameter.

        The key must be a property of the tool not seen yet. Without ``value_open``, the tag must begin a
        line. A complete parameter inside a value is text: the value continues behind the inner closing tag.
        The cursor moves.
        """
        tape = self._tape
        spelled = self._spelled
        begins_line = start == self._begin if start == tape.done else tape.slice(start - 1, start) == "\n"
        if not spelled.value_open and not begins_line:
            return False
        # The key must be known and new, otherwise the tag is probably quoted text.
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
        """Return True if a closing tag comes before the next call and before the end of the output.

        ``_next`` caches the position, so that each text is searched only once.
        """
        if self._next[0] < start:
            self._next = yield from self._first_ahead(start)
        return self._next[1] == self._spelled.value_close

    def _first_ahead(self, start: int) -> Reading[tuple[int, str]]:
        """Return position and text of the first closing tag, or of the first call opening at the start of a
        line.

        Return (end, "") if the output ends first.
        """
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
    """Return common misspellings of the closing tag ``tag`` for the parameter ``key``."""
    if not tag.startswith("</"):
        return frozenset()
    name = tag[2:-1]
    plain = re.split(r"\W", name)[-1]
    forms = (f"</{name}/>", f"<{name}/>", f"</{name} >", f"</ {name}>", f"</{name}s>", f"</{name[:-4]}>")
    return frozenset((*forms, f"</{name}={key}>", f"</{key}>", f"</{plain}>")) - {tag}
