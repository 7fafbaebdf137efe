"""Reads tool calls as a declaration says they are written.

Until a call has *begun* (its name is complete and known, and its arguments begin) nothing is given out, so
that what turns out to be no call is text. From then on arguments stream. Where they break, they stay what
they are, the call gets no ``CallEnd``, and the rest is text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeAlias

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
from weft.text.parsing.json_text import JsonObjectScanner, quoted
from weft.text.parsing.parser import Tool
from weft.text.parsing.python_text import PythonReader
from weft.text.parsing.tape import Reading, Tape
from weft.text.parsing.xml_text import ParameterReader

MAX_NAME = 128
MAX_KEY = 256
MAX_HELD = 8192
"""Arguments that stand before the name they belong to are held back up to this many characters."""
_WINDOW = 512
"""Characters of arguments that are looked at together."""
_NAME = re.compile(r"[A-Za-z0-9_.:/\-]*")
_IDENTIFIER = re.compile(r"[A-Za-z0-9_.:/\-]*")

Outcome: TypeAlias = Literal["none", "broken", "whole"]
"""Of reading a call: nothing has begun, it has begun and broke, it is whole."""
Span: TypeAlias = tuple[int, int]


class CallReader:
    """Reads the calls of one output."""

    def __init__(self, tape: Tape, tools: Mapping[str, Tool], *, parallel: bool) -> None:
        self.section: Section | None = None
        """The section that was opened and is not closed."""
        self._tape = tape
        self._tools = tools
        self._parallel = parallel
        self._name: Span | None = None
        self._ident: Span | None = None

    @property
    def allowed(self) -> bool:
        """Whether one more call may come."""
        return self._parallel or self._tape.calls == 0

    def read(self, call: Call, trigger: str) -> Reading[bool]:
        """Reads a call, and those that follow in the same list, at the cursor, where ``trigger`` stands.

        False, and nothing was given out, when there is none.
        """
        section = call.section
        outer = section is not None and trigger in section.head
        head = (*section.head, *call.head) if section is not None and outer else call.head
        outcome = yield from self._one(call, head)
        if outcome == "none":
            return False
        if section is not None:
            self.section = section
        while outcome == "whole" and section is not None and section.between and self.allowed:
            tape = self._tape
            if not (yield from tape.blank()) or (yield from tape.literal(section.between)) is None:
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

    def arguments_of(self, name: str, start: int) -> Reading[bool]:
        """A call whose head was read up to the cursor; its name stands at ``start``. False where none
        begins.
        """
        tape = self._tape
        if name not in self._tools or not self.allowed or not (yield from tape.blank()):
            return False
        if (yield from tape.peek()) != "{":
            return False
        self._name, self._ident = (start, start + len(name)), None
        self._begin()
        if (yield from self._json()) == "whole":
            tape.whole()
        tape.at = tape.done
        return True

    def ending(self, marks: tuple[str, ...]) -> Reading[bool]:
        """Reads what ends a message, if it stands at the cursor or behind white space."""
        tape = self._tape
        yield from tape.blank()
        if (yield from tape.literal(*marks)) is None:
            tape.at = tape.done
            return False
        tape.skip(tape.at)
        return True

    def end_section(self) -> Reading[bool]:
        """Reads the end of the open section, if it stands at the cursor or behind white space."""
        section = self.section
        if section is None or not section.tail:
            return False
        whole = yield from self._tail(section.tail)
        if whole:
            self.section = None
        return whole

    def _one(self, call: Call, head: Syntax) -> Reading[Outcome]:
        """One call from its head to its tail. The cursor ends at what comes behind it."""
        tape = self._tape
        self._name = self._ident = None
        outcome: Outcome = "none"
        if (yield from self._items(head)):
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
        spelled = call.arguments
        if isinstance(spelled, CallObject):
            return (yield from self._object(spelled, bare=bare))
        name = self._name
        if name is None:
            return "none"
        tool = self._tools[self._tape.slice(*name)]
        if isinstance(spelled, JsonArguments):
            if (yield from self._tape.peek()) != "{":
                return "none"
            self._begin()
            return (yield from self._json())
        if isinstance(spelled, Parameters):
            return (yield from self._parameters(spelled, tool))
        assert isinstance(spelled, Keywords)
        return (yield from self._keywords())

    def _begin(self) -> None:
        """The call begins. All before the cursor was markup, name and id."""
        assert self._name is not None
        self._tape.begin(self._name, self._ident)

    def _items(self, items: Syntax) -> Reading[bool]:
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
        start = self._tape.at
        name = yield from self._tape.run(_NAME, MAX_NAME)
        self._name = (start, self._tape.at)
        return name in self._tools

    def _identifier(self, item: Identifier) -> Reading[bool]:
        start = self._tape.at
        text = yield from self._tape.run(_IDENTIFIER, MAX_KEY)
        self._ident = (start, self._tape.at)
        if not item.holds_name:
            return bool(text)
        name, _, number = text.rpartition(":")
        if not number.isdecimal():
            return False
        prefix = "functions."
        shift = len(prefix) if name.startswith(prefix) and name not in self._tools else 0
        self._name = (start + shift, start + len(name))
        return name[shift:] in self._tools

    def _tail(self, items: Syntax) -> Reading[bool]:
        """Reads what stands of ``items``; each text of them is markup."""
        tape = self._tape
        for item in items:
            if isinstance(item, Blank):
                yield from tape.blank()
            elif isinstance(item, str):
                if (yield from tape.literal(item)) is None:
                    tape.at = tape.done
                    return False
                tape.skip(tape.at)
            elif isinstance(item, Optional) and not (yield from self._tail(item.items)):
                tape.at = tape.done
        return True

    # -- JSON

    def _json(self) -> Reading[Outcome]:
        """A JSON object as the call's arguments."""
        tape = self._tape
        scanner = JsonObjectScanner()
        while True:
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW))
            taken = scanner.take(text, 0)
            tape.work += scanner.work
            scanner.work = 0
            tape.at += taken
            tape.arguments(text[:taken])
            if scanner.whole:
                return "whole"
            if scanner.broken or (tape.at == tape.end and not (yield from tape.more())):
                return "broken"

    def _held_json(self) -> Reading[Span | None]:
        """A JSON object that is not given out yet."""
        tape = self._tape
        start = tape.at
        scanner = JsonObjectScanner()
        while True:
            text = tape.slice(tape.at, min(tape.end, tape.at + _WINDOW, start + MAX_HELD))
            tape.at += scanner.take(text, 0)
            tape.work += scanner.work
            scanner.work = 0
            if scanner.whole:
                return (start, tape.at)
            if scanner.broken or tape.at - start >= MAX_HELD:
                return None
            if tape.at == tape.end and not (yield from tape.more()):
                return None

    def _object(self, spelled: CallObject, *, bare: bool) -> Reading[Outcome]:
        """An object with name and arguments."""
        tape = self._tape
        if (yield from tape.literal("{")) is None:
            return "none"
        early: Span | None = None
        while True:
            key = yield from self._key(spelled)
            if key is None:
                return "none"
            if key in spelled.arguments:
                if self._name is not None:
                    return (yield from self._object_arguments(spelled, bare=bare))
                early = yield from self._held_json()
                if early is None:
                    return "none"
            elif not (yield from self._member(spelled, key)):
                return "none"
            if not (yield from tape.blank()):
                return "none"
            separator = yield from tape.literal(",", "}")
            if separator is None:
                return "none"
            if separator == "}":
                return self._object_ends(early, bare=bare)

    def _object_arguments(self, spelled: CallObject, *, bare: bool) -> Reading[Outcome]:
        tape = self._tape
        if (yield from tape.literal("null")) is not None:
            if bare:
                return "none"
            self._begin()
            tape.arguments("{}")
        elif (yield from tape.peek()) != "{":
            return "none"
        else:
            self._begin()
            if (yield from self._json()) != "whole":
                return "broken"
        yield from self._object_rest(spelled)
        return "whole"

    def _object_ends(self, early: Span | None, *, bare: bool) -> Outcome:
        """The object ended with arguments before the name, or without any."""
        tape = self._tape
        if self._name is None or (early is None and bare):
            return "none"
        end = tape.at
        if early is None:
            self._begin()
            tape.arguments("{}")
            return "whole"
        text = tape.slice(*early)
        tape.at = early[0]
        name = self._name
        tape.begin_behind(name, self._ident, early, text)
        tape.skip(end)
        return "whole"

    def _key(self, spelled: CallObject) -> Reading[str | None]:
        """The next key with its colon and the white space around."""
        tape = self._tape
        if not (yield from tape.blank()):
            return None
        keys = (spelled.name, *spelled.arguments, spelled.id, *spelled.ignored)
        found = yield from tape.literal(*(quoted(key) for key in keys))
        if found is None or not (yield from tape.blank()) or (yield from tape.literal(":")) is None:
            return None
        return found[1:-1] if (yield from tape.blank()) else None

    def _member(self, spelled: CallObject, key: str) -> Reading[bool]:
        """A member that is a word: the name, the id or one without a meaning."""
        tape = self._tape
        if (yield from tape.literal('"')) is None:
            return False
        start = tape.at
        if key == spelled.name:
            if self._name is not None or not (yield from self._known_name()):
                return False
        else:
            text = yield from tape.run(_IDENTIFIER, MAX_KEY)
            if len(text) > MAX_KEY:
                return False
            if key == spelled.id and text and self._ident is None:
                self._ident = (start, tape.at)
        return (yield from tape.literal('"')) is not None

    def _object_rest(self, spelled: CallObject) -> Reading[None]:
        """What follows the arguments inside of the object, if it is what may follow: otherwise it is text."""
        tape = self._tape
        name, ident = self._name, self._ident
        while True:
            if not (yield from tape.blank()):
                break
            separator = yield from tape.literal(",", "}")
            if separator == "}":
                tape.skip(tape.at)
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

    def _parameters(self, spelled: Parameters, tool: Tool) -> Reading[Outcome]:
        tape = self._tape
        if not (yield from tape.blank()):
            return "none"
        start = tape.at
        if (yield from tape.literal(spelled.key_open, spelled.end)) is None:
            return "none"
        tape.at = start
        self._begin()
        whole = yield from ParameterReader(tape, spelled, tool).read()
        return "whole" if whole else "broken"

    def _keywords(self) -> Reading[Outcome]:
        """``key=value, ...)``: the opening parenthesis stands in the head."""
        tape = self._tape
        if not (yield from tape.blank()):
            return "none"
        start = tape.at
        if (yield from tape.literal(")")) is None and not (yield from self._keyword()):
            return "none"
        tape.at = start
        self._begin()
        tape.arguments("{")
        values = PythonReader(tape, into_call=True)
        count = 0
        while True:
            if not (yield from tape.blank()):
                return "broken"
            if (yield from tape.literal(")")) is not None:
                tape.arguments("}", tape.done)
                tape.skip(tape.at)
                return "whole"
            key = yield from self._keyword()
            if not key:
                return "broken"
            tape.arguments((", " if count else "") + quoted(key) + ": ")
            count += 1
            if not (yield from values.value()) or not (yield from tape.blank()):
                return "broken"
            if (yield from tape.literal(",")) is not None:
                tape.skip(tape.at)
            elif (yield from tape.peek()) != ")":
                return "broken"

    def _keyword(self) -> Reading[str]:
        """``key =``; "" where something else stands."""
        tape = self._tape
        key = yield from tape.run(_NAME, MAX_KEY)
        if len(key) > MAX_KEY or not key or not (yield from tape.blank()):
            return ""
        return key if (yield from tape.literal("=")) is not None else ""
