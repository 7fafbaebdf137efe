"""The text of one output as text arrives, and the use of each character.

All positions are absolute: the number of characters before the position.

    |  given out, as events or markup  |  read, undecided  |  not read  |
    0                                done                at           end

Functions with a possible wait for text are generators. Such a generator yields when more text is needed, and
its caller resumes the generator when text arrives or the output ends. Decisions depend on the text alone,
never on the division into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeAlias, TypeVar

from weft.text.parsing.declaration import TextUse
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A generator with result T. Each yield waits for more text."""
MAX_BLANK = 64
"""Characters of white space beside a mark that may belong to the mark. Longer white space is text."""
_FORGET = 1 << 12
_FENCE = 3
_BLANK = re.compile(r"[ \t\r\n]*")
BLANKS = " \t\r\n"


class Texts:
    """Several exact texts, compiled for a search in one pass."""

    def __init__(self, texts: Iterable[str]) -> None:
        ordered = sorted(set(texts), key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, ordered)) or "(?!)")
        self._heads = {text[:size] for text in ordered for size in range(1, len(text))}
        self._longest = max(map(len, ordered), default=1) - 1

    def held(self, text: str) -> int:
        """Return the length of the longest end of ``text`` that may be the beginning of a searched text."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size:] in self._heads:
                return size
        return 0


class Tape:
    """The text read so far and the events made of the text. ``work`` counts the characters examined or
    copied.
    """

    def __init__(self) -> None:
        self.at = 0
        self.done = 0
        self.ended = False
        self.work = 0
        self.calls = 0
        """Number of calls begun."""
        self.fenced = False
        """True inside a fenced code block (between two lines with three backticks)."""
        self._line = ""
        """The first characters of the current line of text, without leading white space; at most three."""
        self._text = ""
        self._base = 0
        self._events: list[OutputEvent] = []
        self._pieces: list[str] = []
        self._gathered: tuple[str, int] = ("", 0)
        """(event, number of calls) that ``_pieces`` belong to."""

    # -- text in

    def add(self, text: str) -> None:
        """Append the next piece of the output. Decided text may be dropped from memory."""
        kept = self._text
        self._text = ""  # leave ``kept`` as the only reference: Python then appends in place
        # Drop decided text only when the dropped part is large, so that all copies together stay linear.
        if self.done - self._base > max(_FORGET, len(kept) // 2):
            kept = kept[self.done - self._base :]
            self.work += len(kept)
            self._base = self.done
        kept += text
        self.work += len(text)
        self._text = kept

    @property
    def end(self) -> int:
        """Position behind the last character received."""
        return self._base + len(self._text)

    def slice(self, start: int, end: int) -> str:
        """Return the characters from ``start`` to ``end``. ``start`` must not lie before ``done``."""
        self.work += end - start
        return self._text[start - self._base : end - self._base]

    def search(self, pattern: re.Pattern[str], start: int) -> re.Match[str] | None:
        """Return the first match from ``start``. The positions of the match are relative: see
        ``position``.
        """
        match = pattern.search(self._text, start - self._base)
        self.work += (self.end if match is None else self.position(match.end())) - start
        return match

    def position(self, index: int) -> int:
        """Return the absolute position for an index of a match."""
        return self._base + index

    # -- reading

    def more(self) -> Reading[bool]:
        """Wait for more text. Return False at the end of the output."""
        if self.ended:
            return False
        before = self.end
        while self.end == before and not self.ended:
            yield
        return self.end > before

    def peek(self) -> Reading[str]:
        """Return the character at ``at``, or "" at the end of the output."""
        while self.at >= self.end:
            if not (yield from self.more()):
                return ""
        self.work += 1
        return self._text[self.at - self._base]

    def literal(self, *options: str) -> Reading[str | None]:
        """Read the longest of ``options`` at ``at`` and return the option.

        Return None and read nothing if no option matches. Waits for more text while a longer option may still
        match.
        """
        ordered = sorted(options, key=len, reverse=True)
        while True:
            index = self.at - self._base
            have = len(self._text) - index
            for option in ordered:
                self.work += min(len(option), have)
                if have < len(option):
                    if not self.ended and option.startswith(self._text[index:]):
                        break  # the rest of this longer option may still arrive
                elif self._text.startswith(option, index):
                    self.at += len(option)
                    return option
            else:
                return None
            yield

    def blank(self, limit: int = MAX_BLANK) -> Reading[bool]:
        """Read white space and move ``at`` behind.

        Return False, with the cursor behind ``limit`` characters, if more than ``limit`` characters follow.
        Waits for more text at the end of the text so far.
        """
        start = self.at
        while True:
            found = _BLANK.match(self._text, self.at - self._base)
            end = self.at if found is None else self.position(found.end())
            self.work += end - self.at + 1
            self.at = end
            # Leave the rest unread, so that the caller can give the blanks out as text.
            if self.at - start > limit:
                self.at = start + limit
                return False
            if self.at < self.end or not (yield from self.more()):
                return True

    def run(self, pattern: re.Pattern[str], limit: int) -> Reading[str]:
        """Read the longest run of characters for ``pattern`` (``[...]*``): at most ``limit + 1`` characters.

        A result longer than ``limit`` tells the caller that the run is too long.
        """
        start = self.at
        while True:
            match = pattern.match(self._text, self.at - self._base, start + limit + 1 - self._base)
            end = self.at if match is None else self.position(match.end())
            self.work += end - self.at + 1
            self.at = end
            if self.at < self.end or self.at - start > limit or not (yield from self.more()):
                return self.slice(start, self.at)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Read the part of a run of characters received so far, "" for none, and move ``at`` behind.

        More of the run may follow.
        """
        found = pattern.match(self._text, self.at - self._base)
        text = "" if found is None else found[0]
        self.work += len(text) + 1
        self.at += len(text)
        return text

    # -- what characters are

    def text(self, end: int, *, reasoning: bool) -> None:
        """Give out everything up to ``end`` as reasoning (``reasoning``) or content, and move ``done`` there.

        Do nothing if ``end`` is not behind ``done``.
        """
        if end <= self.done:
            return
        piece = self.slice(self.done, end)
        self._follow_lines(piece)
        self._give("reasoning" if reasoning else "content", piece)
        self.mark("reasoning" if reasoning else "content", end)

    @property
    def line_blank(self) -> bool:
        """True if the current line, or the current part, has only white space as text so far."""
        return not self._line

    @property
    def line_is_fence(self) -> bool:
        """True if the current line starts or ends a fenced code block."""
        return self._line == "`" * _FENCE

    def begin_part(self) -> None:
        """Start a new part: the next character starts a line, outside any fenced code block."""
        self._line = ""
        self.fenced = False

    def _follow_lines(self, piece: str) -> None:
        """Update ``fenced`` and the start of the current line with text given out."""
        first, *others = piece.split("\n")
        self._line = (self._line + (first if self._line else first.lstrip(BLANKS)))[:_FENCE]
        for line in others:
            self.fenced ^= self.line_is_fence
            self._line = line.lstrip(BLANKS)[:_FENCE]

    def skip(self, end: int) -> None:
        """Mark everything up to ``end`` as markup."""
        self.mark("markup", end)

    def begin(self, name: tuple[int, int], ident: tuple[int, int] | None = None) -> int:
        """Begin a call, add its event, count the call in ``calls`` and return the number of the call.

        ``name`` and ``ident`` are the (start, end) of the tool name and of the id. Every other undecided
        character up to ``at`` is markup. ``done`` moves to ``at``.
        """
        text = self.slice(*name)
        own = "" if ident is None else self.slice(*ident)
        self._push(CallBegin(call=self.calls, name=text, id=own))
        spans: list[tuple[TextUse, int, int]] = [("name", *name)]
        # The id contains the name (``functions.NAME:NUMBER``): split the id around the name.
        if ident is not None and ident[0] <= name[0] and name[1] <= ident[1]:
            spans = [("id", ident[0], name[0]), ("name", *name), ("id", name[1], ident[1])]
        elif ident is not None:
            spans.append(("id", *ident))
        for use, start, end in sorted(spans, key=lambda span: span[1]):
            self.skip(start)
            self.mark(use, end)
        self.skip(self.at)
        self.calls += 1
        return self.calls - 1

    def begin_behind(
        self, name: tuple[int, int], ident: tuple[int, int] | None, early: tuple[int, int], text: str
    ) -> None:
        """Begin a call with arguments before the name, add its events, and count the call in ``calls``.

        ``early`` is the (start, end) of the arguments, ``text`` their JSON. ``done`` moves behind the last of
        the spans.
        """
        own = "" if ident is None else self.slice(*ident)
        self._push(CallBegin(call=self.calls, name=self.slice(*name), id=own))
        self.calls += 1
        self._give("arguments", text)
        spans: list[tuple[TextUse, tuple[int, int]]] = [("name", name), ("argument", early)]
        if ident is not None:
            spans.append(("id", ident))
        for use, (start, end) in sorted(spans, key=lambda span: span[1]):
            self.skip(start)
            self.mark(use, end)

    def arguments(self, text: str, end: int | None = None) -> None:
        """Append ``text`` to the arguments of the last call. The source of ``text`` is everything up to
        ``end`` (default: ``at``).
        """
        if text:
            self._give("arguments", text)
        self.mark("argument", self.at if end is None else end)

    def whole(self) -> None:
        """Mark the last call as complete."""
        self._push(CallEnd(call=self.calls - 1))

    def mark(self, use: TextUse, end: int) -> None:
        """Advance ``done`` to ``end``; ``use`` is the use of the characters passed. Subclasses override this
        method to observe the uses.
        """
        if end > self.done:
            self.done = end
            self.at = max(self.at, end)

    # -- events out

    def take(self) -> list[OutputEvent]:
        """Return the events since the last call."""
        self._flush()
        events = self._events
        self._events = []
        return events

    def _push(self, event: OutputEvent) -> None:
        self._flush()
        self._events.append(event)

    def _give(self, event: str, piece: str) -> None:
        # Join pieces of the same event and call into one event.
        if self._gathered != (event, self.calls):
            self._flush()
            self._gathered = (event, self.calls)
        self._pieces.append(piece)

    def _flush(self) -> None:
        """Turn the gathered pieces into one event and forget the pieces; do nothing without text."""
        text = "".join(self._pieces)
        self._pieces.clear()
        if not text:
            return
        event, calls = self._gathered
        if event == "arguments":
            self._events.append(CallArguments(call=calls - 1, text=text))
        else:
            self._events.append(Reasoning(text) if event == "reasoning" else Content(text))
