"""The text of one output as it comes in, and what has become of each of its characters.

Positions are absolute: the number of characters before. ``done`` is the first one that has not been accounted
for; all before it were given out, in order, as events or as markup. ``at`` is how far was read. What lies
between may still turn out to be either.

Functions that may have to wait for text are generators: they yield when more is needed, and are resumed when
there is more or the output has ended. What they decide depends on the text alone, never on its pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from weft.text.parsing.declaration import Kind
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""Waits for text by yielding; returns T."""
MAX_BLANK = 64
"""White space beside a mark that may belong to it. More is text."""
_FORGET = 1 << 12
_FENCE = 3
_BLANK = re.compile(r"[ \t\r\n]*")
BLANKS = " \t\r\n"


class Texts:
    """Texts to be found in one pass."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._heads = {text[:size] for text in ordered for size in range(1, len(text))}
        self._longest = max(map(len, ordered), default=1) - 1

    def held(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of one of them."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._heads:
                return size
        return 0


class Tape:
    """What was read and what was given out. ``work`` counts characters that were looked at or copied."""

    def __init__(self) -> None:
        self.at = 0
        self.done = 0
        self.ended = False
        self.work = 0
        self.calls = 0
        """Calls that have begun."""
        self.fenced = False
        """Whether text stands in a block of code: between lines that begin with three backticks."""
        self._line = ""
        """How the present line of text begins, without white space; three characters at most."""
        self._text = ""
        self._base = 0
        self._events: list[OutputEvent] = []
        self._pieces: list[str] = []
        self._kind: tuple[str, int] = ("", 0)

    # -- text in

    def add(self, text: str) -> None:
        """The next piece of the output."""
        kept = self._text
        self._text = ""  # the only reference is ``kept``: Python appends to it in place
        if self.done - self._base > max(_FORGET, len(kept) // 2):
            kept = kept[self.done - self._base :]
            self.work += len(kept)
            self._base = self.done
        kept += text
        self.work += len(text)
        self._text = kept

    @property
    def end(self) -> int:
        """Position behind the last character that is there."""
        return self._base + len(self._text)

    def slice(self, start: int, end: int) -> str:
        """Characters ``start`` to ``end``, not before ``done``."""
        self.work += end - start
        return self._text[start - self._base : end - self._base]

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """The first match from ``start``. Its positions are relative: see ``position``."""
        match = pattern.search(self._text, start - self._base)
        self.work += (self.end if match is None else self.position(match.end())) - start
        return match

    def position(self, index: int) -> int:
        """The absolute position of a match's index."""
        return self._base + index

    # -- reading

    def more(self) -> Reading[bool]:
        """Waits for more text; False when there will be none."""
        if self.ended:
            return False
        before = self.end
        while self.end == before and not self.ended:
            yield
        return self.end > before

    def peek(self) -> Reading[str]:
        """The character at ``at``; "" at the output's end."""
        while self.at >= self.end:
            if not (yield from self.more()):
                return ""
        self.work += 1
        return self._text[self.at - self._base]

    def literal(self, *options: str) -> Reading[str | None]:
        """Reads the longest of ``options`` that stands at ``at``. None, and nothing is read, for none."""
        ordered = sorted(options, key=len, reverse=True)
        while True:
            index = self.at - self._base
            have = len(self._text) - index
            for option in ordered:
                self.work += min(len(option), have)
                if have < len(option):
                    if not self.ended and option.startswith(self._text[index:]):
                        break  # it may still come
                elif self._text.startswith(option, index):
                    self.at += len(option)
                    return option
            else:
                return None
            yield

    def blank(self, limit: int = MAX_BLANK) -> Reading[bool]:
        """Reads white space. False when there is more of it than ``limit``."""
        start = self.at
        while True:
            found = _BLANK.match(self._text, self.at - self._base)
            end = self.at if found is None else self.position(found.end())
            self.work += end - self.at + 1
            self.at = end
            if self.at - start > limit:
                self.at = start + limit
                return False
            if self.at < self.end or not (yield from self.more()):
                return True

    def run(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Reads the longest run of single characters that ``pattern`` (``[...]*``) matches; at most ``limit``
        and one."""
        start = self.at
        while True:
            match = pattern.match(self._text, self.at - self._base, start + limit + 1 - self._base)
            end = self.at if match is None else self.position(match.end())
            self.work += end - self.at + 1
            self.at = end
            if self.at < self.end or self.at - start > limit or not (yield from self.more()):
                return self.slice(start, self.at)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Reads what is there now of a run of characters: more of it may come."""
        found = pattern.match(self._text, self.at - self._base)
        text = "" if found is None else found[0]
        self.work += len(text) + 1
        self.at += len(text)
        return text

    # -- what characters are

    def text(self, end: int, *, thought: bool) -> None:
        """Everything up to ``end`` is text."""
        if end <= self.done:
            return
        piece = self.slice(self.done, end)
        self._follow_lines(piece)
        self._give("reasoning" if thought else "content", piece)
        self.mark("reasoning" if thought else "content", end)

    @property
    def line_blank(self) -> bool:
        """Whether nothing but white space was given out as text since the line, or this part, began."""
        return not self._line

    @property
    def line_is_fence(self) -> bool:
        """Whether the present line begins or ends a block of code."""
        return self._line == "`" * _FENCE

    def begin_part(self) -> None:
        """What follows is a part of its own: its first line begins here, and no block of code goes on."""
        self._line = ""
        self.fenced = False

    def _follow_lines(self, piece: str) -> None:
        first, *others = piece.split("\n")
        self._line = (self._line + (first if self._line else first.lstrip(BLANKS)))[:_FENCE]
        for line in others:
            self.fenced ^= self.line_is_fence
            self._line = line.lstrip(BLANKS)[:_FENCE]

    def skip(self, end: int) -> None:
        """Everything up to ``end`` is markup."""
        self.mark("markup", end)

    def begin(self, name: tuple[int, int], ident: tuple[int, int] | None = None) -> int:
        """A call begins; name and id stand at these positions, all else up to ``at`` is markup."""
        text = self.slice(*name)
        own = "" if ident is None else self.slice(*ident)
        self._push(CallBegin(call=self.calls, name=text, id=own))
        spans: list[tuple[Kind, int, int]] = [("name", *name)]
        if ident is not None and ident[0] <= name[0] and name[1] <= ident[1]:
            spans = [("id", ident[0], name[0]), ("name", *name), ("id", name[1], ident[1])]
        elif ident is not None:
            spans.append(("id", *ident))
        for kind, start, end in sorted(spans, key=lambda span: span[1]):
            self.skip(start)
            self.mark(kind, end)
        self.skip(self.at)
        self.calls += 1
        return self.calls - 1

    def begin_behind(
        self, name: tuple[int, int], ident: tuple[int, int] | None, early: tuple[int, int], text: str
    ) -> None:
        """A call begins whose arguments ``early``, which are ``text``, stand before its name."""
        own = "" if ident is None else self.slice(*ident)
        self._push(CallBegin(call=self.calls, name=self.slice(*name), id=own))
        self.calls += 1
        self._give("arguments", text)
        spans: list[tuple[Kind, tuple[int, int]]] = [("name", name), ("argument", early)]
        if ident is not None:
            spans.append(("id", ident))
        for kind, (start, end) in sorted(spans, key=lambda span: span[1]):
            self.skip(start)
            self.mark(kind, end)

    def arguments(self, text: str, end: int | None = None) -> None:
        """``text`` goes on with the arguments of the last call, made of all up to ``end`` (``at``)."""
        if text:
            self._give("arguments", text)
        self.mark("argument", self.at if end is None else end)

    def whole(self) -> None:
        """The last call is whole."""
        self._push(CallEnd(call=self.calls - 1))

    def mark(self, kind: Kind, end: int) -> None:
        """What the characters from ``done`` to ``end`` are. Tests listen here."""
        if end > self.done:
            self.done = end
            self.at = max(self.at, end)

    # -- events out

    def take(self) -> list[OutputEvent]:
        """The events since the last time."""
        self._flush()
        events = self._events
        self._events = []
        return events

    def _push(self, event: OutputEvent) -> None:
        self._flush()
        self._events.append(event)

    def _give(self, kind: str, piece: str) -> None:
        if self._kind != (kind, self.calls):
            self._flush()
            self._kind = (kind, self.calls)
        self._pieces.append(piece)

    def _flush(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if not text:
            return
        kind, calls = self._kind
        if kind == "arguments":
            self._events.append(CallArguments(call=calls - 1, text=text))
        else:
            self._events.append(Reasoning(text) if kind == "reasoning" else Content(text))
