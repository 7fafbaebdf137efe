"""Read tool calls in the spelling of a declaration.

Nothing is given out until a call has *begun*: the name is complete and known, and the arguments start. A
false start is therefore still text. After the beginning, arguments stream. The reader repairs mistakes with a
clear meaning (docs/outputs.md, "Recovery"). If the arguments break, the arguments given out stay as they are,
the call gets no ``CallEnd``, and the rest is text.

``JsonReader`` reads arguments that are JSON objects.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

from weft.text.parsing.call_ends import CallEnds
from weft.text.parsing.declaration import (
    Blank,
    Call,
    CallObject,
    Identifier,
    JsonArguments,
    Keywords,
    Name,
    Optional,
    Parameters,
    Section,
    Syntax,
)
from weft.text.parsing.json_text import JsonObjectScanner, StringDecoder
from weft.text.parsing.keyword_text import KeywordReader
from weft.text.parsing.parser import Tool
from weft.text.parsing.tape import Reading, Tape, Texts
from weft.text.parsing.xml_text import ParameterReader

MAX_HELD = 8192
"""Maximum characters held back for arguments in front of the name of the call."""
_WINDOW = 512
"""Characters of arguments examined together."""
Span: TypeAlias = tuple[int, int]


class JsonReader:
    """Reads the arguments of begun calls. ``held`` reads arguments in front of a name, before the call has
    begun.
    """

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def read(self, ends: CallEnds) -> Reading[bool]:
        """Read an object and return True if the object is whole.

        The end of the call may replace the last brackets. The text goes to the tape's arguments piece by
        piece, also the text of a broken object. The cursor stands behind everything read.

        An unclosed string ends before a line with the end of the call. Otherwise the string would swallow the
        calls behind.
        """
        tape = self._tape
        scanner = JsonObjectScanner()
        marks = Texts("\n" + text for text in (*ends.closings, *ends.openings) if len(text) > 1)
        while not scanner.whole and not scanner.broken:
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW))
            match = marks.pattern.search(text)
            held = 0 if tape.ended else marks.held(text)
            # Keep back the text that may become the line with the end of the call.
            free = len(text) - held if match is None else match.start()
            if free:
                tape.at += self._take(scanner, text[:free])
                tape.arguments(scanner.written())
            elif match is not None:
                if scanner.in_string and (yield from ends.here(closed=False)):
                    break
                tape.at += self._take(scanner, "\n")
                tape.arguments(scanner.written())
            elif not (yield from tape.more()) and not held:
                break
        whole = scanner.whole or (yield from self._closes(scanner, ends))
        if not whole:
            scanner.give_up()
        tape.arguments(scanner.written(), tape.done)
        if whole and scanner.doubled and (yield from tape.literal("}")) is not None:
            tape.skip(tape.at)
        return whole

    def read_quoted(self) -> Reading[bool]:
        """Read an object quoted as a whole, from behind the opening quote. Return True if the object is
        whole. The text goes to the tape's arguments piece by piece, also the text of a broken object.

        A quote inside the incomplete object is taken as a string quote of the object with a missing
        backslash.
        """
        tape = self._tape
        scanner = JsonObjectScanner()
        decoder = StringDecoder()
        while char := (yield from tape.peek()):
            text = decoder.push(char)
            if text is None and scanner.whole:
                tape.at += 1
                tape.skip(tape.at)
                return True
            # The quote belongs to the object: repair the missing backslash.
            text = '"' if text is None else text
            if text.strip() if scanner.whole else self._take(scanner, text) < len(text):
                break
            tape.at += 1
            tape.arguments(scanner.written())
        scanner.give_up()
        tape.arguments(scanner.written(), tape.done)
        return False

    def held(self) -> Reading[tuple[Span, str] | None]:
        """Read an object of at most ``MAX_HELD`` characters without giving the object out.

        Return ((start, end), JSON text), with the cursor behind the object; None for a broken or longer
        object.
        """
        tape = self._tape
        start = tape.at
        scanner = JsonObjectScanner()
        while True:
            # The bound keeps a client from waiting for an endless object.
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW, start + MAX_HELD))
            tape.at += self._take(scanner, text)
            if scanner.whole:
                if scanner.doubled:
                    yield from tape.literal("}")
                return (start, tape.at), scanner.written()
            if scanner.broken or tape.at - start >= MAX_HELD:
                return None
            if tape.at == tape.end and not (yield from tape.more()):
                return None

    def _take(self, scanner: JsonObjectScanner, text: str) -> int:
        taken = scanner.take(text, 0)
        self._tape.work += scanner.work
        scanner.work = 0
        return taken

    def _closes(self, scanner: JsonObjectScanner, ends: CallEnds) -> Reading[bool]:
        """Close an incomplete object if the output ends here, or the end of the call or another call follows.

        Return True if the object is whole then. The cursor does not move.
        """
        tape = self._tape
        start = tape.at
        here = tape.ended and start == tape.end
        if not here:
            yield from tape.blank()
            here = (yield from tape.literal(*ends.closings, *ends.openings)) is not None
            tape.at = start
        return here and scanner.finish()


MAX_NAME = 128
MAX_KEY = 256
_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:/\-]*")
_NUMBERED = re.compile(r".*?([:._\-]?[0-9]+)")
_PREFIX = "functions"

Outcome: TypeAlias = Literal["none", "broken", "whole"]
"""Result of reading a call: nothing has begun, the call began and broke, or the call is whole."""


class CallReader:
    """Reads the calls of one output."""

    def __init__(
        self, tape: Tape, tools: Mapping[str, Tool], *, parallel: bool, openings: tuple[str, ...] = ()
    ) -> None:
        """``openings``: texts at the start of a call, in any declared spelling."""
        self.section: Section | None = None
        """The open section, or None."""
        self._tape = tape
        self._tools = tools
        self._parallel = parallel
        self._openings = openings
        self._json = JsonReader(tape)
        self._name: Span | None = None
        self._ident: Span | None = None

    @property
    def allowed(self) -> bool:
        """True if one more call is allowed."""
        return self._parallel or self._tape.calls == 0

    def read(self, call: Call, trigger: str) -> Reading[bool]:
        """Read a call at the cursor, where ``trigger`` stands, and the further calls of the same list.

        Return True if a call has begun, even if its arguments broke; the cursor then stands behind everything
        given out. Return False, with nothing given out, if no call stands here. Sets or clears ``section``.
        """
        section = call.section
        outer = section is not None and trigger in section.head
        head = (*section.head, *call.head) if section is not None and outer else call.head
        outcome = yield from self._one(call, head)
        if outcome == "none":
            return False
        if section is not None:
            self.section = section
        # A list: further calls follow behind each separator.
        while outcome == "whole" and section is not None and section.between and self.allowed:
            tape = self._tape
            separator = section.between.strip()  # white space alone separates some lists
            if not (yield from tape.blank()) or (yield from tape.literal(separator)) is None:
                break
            yield from tape.blank()
            outcome = yield from self._one(call, call.head)
        self._tape.at = self._tape.done
        if section is not None and section.between:  # a list that has ended or broken
            if outcome != "broken":
                yield from self.end_section()
            self.section = None
        elif outcome == "whole":
            yield from self.end_section()
        return True

    def arguments_of(self, name: str, start: int, ends: tuple[str, ...]) -> Reading[bool]:
        """Read the arguments of a call with the head already read.

        Return False if no arguments begin at the cursor.

        The name stands at position ``start``. One of ``ends`` follows the arguments. Return True also for
        arguments that break later. The cursor then stands behind everything given out.
        """
        tape = self._tape
        if name not in self._tools or not self.allowed or not (yield from tape.blank()):
            return False
        if (yield from tape.peek()) != "{":
            return False
        self._name, self._ident = (start, start + len(name)), None
        self._begin()
        if (yield from self._json.read(CallEnds(tape, ends, self._openings))):
            tape.whole()
        tape.at = tape.done
        return True

    def ending(self, marks: tuple[str, ...]) -> Reading[bool]:
        """Skip one of ``marks`` at the cursor or behind white space.

        Return False without such a mark; the cursor then goes back behind everything given out.
        """
        tape = self._tape
        yield from tape.blank()
        if (yield from tape.literal(*marks)) is None:
            tape.at = tape.done
            return False
        tape.skip(tape.at)
        return True

    def end_section(self) -> Reading[bool]:
        """Read the tail of the open section, at the cursor or behind white space.

        Return True and close the section if the tail is complete; return False also without an open section
        or without a tail.
        """
        section = self.section
        if section is None or not section.tail:
            return False
        whole = yield from self._tail(section.tail)
        if whole:
            self.section = None
        return whole

    def _one(self, call: Call, head: Syntax) -> Reading[Outcome]:
        """Read one call from head to tail.

        Return the outcome: "none" (no call), "broken" or "whole". Unless the outcome is "none", the cursor
        ends behind everything given out.
        """
        tape = self._tape
        self._name = self._ident = None
        outcome: Outcome = "none"
        if (yield from self._items(head)):
            # A bare head is a weak sign of a call, so ``_object`` is stricter.
            bare = not any(isinstance(item, str) for item in head)
            outcome = yield from self._arguments(call, bare=bare)
        if outcome == "whole":
            tape.whole()
            yield from self._tail(call.tail)
        if outcome != "none":
            tape.at = tape.done
            if outcome == "whole":
                tape.begin_part()
        return outcome

    def _arguments(self, call: Call, *, bare: bool) -> Reading[Outcome]:
        """Read the arguments in the declared spelling, begin the call, and return the outcome; "none" if no
        call has begun.

        ``bare``: no exact text stands before the arguments.
        """
        spelled = call.arguments
        ends = CallEnds(self._tape, call.closings, self._openings)
        if isinstance(spelled, CallObject):
            return (yield from self._object(spelled, ends, bare=bare))
        name = self._name
        if name is None:
            return "none"
        tool = self._tools[self._tape.slice(*name)]
        if isinstance(spelled, JsonArguments):
            if (yield from self._tape.peek()) != "{":
                return "none"
            self._begin()
            return "whole" if (yield from self._json.read(ends)) else "broken"
        if isinstance(spelled, Parameters):
            return (yield from self._parameters(spelled, tool, ends))
        assert isinstance(spelled, Keywords)
        return (yield from self._keywords(spelled, ends))

    def _begin(self) -> None:
        """Begin the call. Everything before the cursor is markup, name or id."""
        assert self._name is not None
        self._tape.begin(self._name, self._ident)

    def _items(self, items: Syntax) -> Reading[bool]:
        """Read ``items`` in order and set the call's name and id.

        Return False at the first missing item, where the cursor stays; optional items may be absent.
        """
        tape = self._tape
        for item in items:
            if isinstance(item, str):
                found = (yield from tape.literal(item)) is not None
            elif isinstance(item, Blank):
                found = yield from tape.blank()
            elif isinstance(item, Name):
                found = yield from self._known_name()
            elif isinstance(item, Identifier):
                found = yield from self._identifier(item)
            else:
                assert isinstance(item, Optional)
                start = tape.at
                if not (yield from self._items(item.items)):
                    tape.at = start
                found = True
            if not found:
                return False
        return True

    def _known_name(self) -> Reading[bool]:
        """Read a name, with or without quotes, and set the call's name.

        Return False unless a known tool has the name.
        """
        tape = self._tape
        quote = yield from tape.literal('"', "'")
        start = tape.at
        name = yield from tape.run(_NAME, MAX_NAME)
        self._name = (start, tape.at)
        return name in self._tools and (quote is None or (yield from tape.literal(quote)) is not None)

    def _identifier(self, item: Identifier) -> Reading[bool]:
        """Read an id and set the id of the call.

        If the format puts the name inside the id, set the name too. Return False for an empty id, or for an
        id without a known tool's name.
        """
        start = self._tape.at
        text = yield from self._tape.run(_IDENTIFIER, MAX_KEY)
        self._ident = (start, self._tape.at)
        if not item.holds_name:
            return bool(text)
        found = self._name_in(text)
        if found is not None:
            self._name = (start + found[0], start + found[1])
        return found is not None

    def _name_in(self, text: str) -> tuple[int, int] | None:
        """Return the (start, end) of a known tool's name in ``functions.NAME:NUMBER``, or None.

        Models also leave out the prefix, the number or a separator, and write other separators.
        """
        # Try every combination of prefix and number; the known tools decide.
        whole = _NUMBERED.fullmatch(text)
        ends = [len(text)] if whole is None else [whole.start(1), whole.end()]
        starts = [size for size in (0, *_prefixes(text)) if size < len(text)]
        spans = [(start, end) for end in ends for start in starts]
        return next((span for span in spans if text[slice(*span)] in self._tools), None)

    def _tail(self, items: Syntax) -> Reading[bool]:
        """Read the items present and skip each exact text as markup. Return True if the last exact text was
        present.
        """
        tape = self._tape
        whole = True
        for item in items:
            if isinstance(item, Blank):
                yield from tape.blank()
            elif isinstance(item, str):
                whole = (yield from tape.literal(item)) is not None
                if whole:
                    tape.skip(tape.at)
            elif isinstance(item, Optional):
                yield from self._tail(item.items)
        tape.at = tape.done
        return whole

    # -- JSON

    def _object(self, spelled: CallObject, ends: CallEnds, *, bare: bool) -> Reading[Outcome]:
        """Read an object with name and arguments, in any order. Accept a doubled first brace.

        Return "none" if nothing has begun, "broken" for a call with broken arguments, else "whole".
        Arguments before the name are given out once the name is known. ``bare``: no exact text stands before
        the object.
        """
        tape = self._tape
        if (yield from tape.literal("{")) is None or not (yield from tape.blank()):
            return "none"
        doubled = (yield from tape.literal("{")) is not None
        early: tuple[Span, str] | None = None
        while True:
            key = yield from self._key(spelled)
            if key is None:
                return "none"
            if key in spelled.arguments:
                if self._name is not None:
                    outcome = yield from self._object_arguments(ends, bare=bare)
                    if outcome == "whole":
                        yield from self._object_rest(spelled, doubled=doubled)
                    return outcome
                # The arguments stand before the name: hold the arguments back until the name is known.
                early = yield from self._json.held()
                if early is None:
                    return "none"
            elif not (yield from self._member(spelled, key)):
                return "none"
            separator = yield from self._separator()
            if separator is None:
                return "none"
            if separator == "}":
                if doubled:
                    yield from tape.literal("}")
                return self._object_ends(early, bare=bare)

    def _object_arguments(self, ends: CallEnds, *, bare: bool) -> Reading[Outcome]:
        """Read the arguments behind their key: an object, a string with a quoted object, or an empty
        value. Begin the call and return the outcome; "none" for any other value.
        """
        tape = self._tape
        if (yield from tape.literal("null", "None", '""', "''")) is not None:
            # Without any tag around the object, an object without arguments is too weak a sign of a call.
            if bare:
                return "none"
            self._begin()
            tape.arguments("{}")
            return "whole"
        if (yield from tape.peek()) == "{":
            self._begin()
            return "whole" if (yield from self._json.read(ends)) else "broken"
        if (yield from tape.literal('"')) is None or not (yield from tape.blank()):
            return "none"
        if (yield from tape.peek()) != "{":
            return "none"
        self._begin()
        return "whole" if (yield from self._json.read_quoted()) else "broken"

    def _object_ends(self, early: tuple[Span, str] | None, *, bare: bool) -> Outcome:
        """Finish an object with the arguments before the name, or without arguments. Begin the call and
        return "whole"; return "none" for an object that is no call.
        """
        tape = self._tape
        name = self._name
        if name is None or (bare and early is None):
            return "none"
        if early is None:
            self._begin()
            tape.arguments("{}")
            return "whole"
        span, text = early
        end = tape.at
        tape.begin_behind(name, self._ident, span, text)
        tape.skip(end)
        return "whole"

    def _key(self, spelled: CallObject) -> Reading[str | None]:
        """Read the next known key with the colon and the white space around.

        Return the key without quotes, or None for anything else.
        """
        tape = self._tape
        if not (yield from tape.blank()):
            return None
        # An unknown key means that the object is no call.
        keys = (spelled.name, *spelled.arguments, spelled.id, *spelled.ignored)
        found = yield from tape.literal(*(quote + key + quote for key in keys for quote in "'\""))
        if found is None or not (yield from tape.blank()) or (yield from tape.literal(":")) is None:
            return None
        return found[1:-1] if (yield from tape.blank()) else None

    def _member(self, spelled: CallObject, key: str) -> Reading[bool]:
        """Read a member with a word as value: the name, the id, or an ignored member. Set the name or the id
        of the call. Return False for an invalid value.
        """
        tape = self._tape
        quote = yield from tape.literal('"', "'")
        if quote is None:
            return False
        start = tape.at
        if key == spelled.name:
            # A second name makes the object invalid.
            if self._name is not None or not (yield from self._known_name()):
                return False
        else:
            text = yield from tape.run(_IDENTIFIER, MAX_KEY)
            if len(text) > MAX_KEY:
                return False
            if key == spelled.id and text and self._ident is None:
                self._ident = (start, tape.at)
        return (yield from tape.literal(quote)) is not None

    def _separator(self) -> Reading[str | None]:
        """Read the separator of two members or the end of the object.

        Return "," or "}", or None for anything else. A comma before the end belongs to the end.
        """
        tape = self._tape
        if not (yield from tape.blank()):
            return None
        found = yield from tape.literal(",", "}")
        behind = tape.at
        if found == "," and (yield from tape.blank()) and (yield from tape.literal("}")) is not None:
            return "}"
        tape.at = behind
        return found

    def _object_rest(self, spelled: CallObject, *, doubled: bool) -> Reading[None]:
        """Read the remaining members and the end of the object behind the arguments. Unexpected content stays
        text.
        """
        tape = self._tape
        # ``_member`` overwrites the name and the id of the call, which has already begun.
        name, ident = self._name, self._ident
        self._ident = None
        while True:
            separator = yield from self._separator()
            if separator == "}":
                if doubled:
                    yield from tape.literal("}")
                # An id behind the arguments comes too late for the call, which has an id of its own.
                end = tape.at
                if self._ident is not None:
                    tape.skip(self._ident[0])
                    tape.mark("id", self._ident[1])
                tape.skip(end)
            if separator != ",":
                break
            key = yield from self._key(spelled)
            if key is None or key in spelled.arguments or key == spelled.name:
                break
            if not (yield from self._member(spelled, key)):
                break
        tape.at = tape.done
        self._name, self._ident = name, ident

    # -- other ways to write arguments

    def _parameters(self, spelled: Parameters, tool: Tool, ends: CallEnds) -> Reading[Outcome]:
        """Read arguments in tags and return the outcome.

        The call begins only if the first parameter or the end is readable; else the outcome is "none".
        """
        tape = self._tape
        if not (yield from tape.blank()):
            return "none"
        start = tape.at
        reader = ParameterReader(
            tape, spelled, tool, CallEnds(tape, (spelled.end, *ends.closings), ends.openings)
        )
        if not (yield from reader.begins()):
            return "none"
        tape.at = start
        self._begin()
        return "whole" if (yield from reader.read()) else "broken"

    def _keywords(self, spelled: Keywords, ends: CallEnds) -> Reading[Outcome]:
        """Read arguments as keywords and return the outcome.

        The call begins only if a keyword or the end of the arguments follows; else the outcome is "none".
        """
        reader = KeywordReader(self._tape, spelled, ends)
        if not (yield from reader.begins()):
            return "none"
        self._begin()
        return "whole" if (yield from reader.read()) else "broken"


def _prefixes(text: str) -> tuple[int, ...]:
    """Return the lengths of the possible prefixes before the name in an id."""
    if not text.startswith(_PREFIX):
        return ()
    size = len(_PREFIX)
    return (size + 1, size) if text[size : size + 1] in (".", ":", "_", "-", "/") else (size,)
