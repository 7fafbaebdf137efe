"""Executes a declaration: one reader for thoughts, calls and channels of one output.

The output is text in a *region* (content, a thought, the body of a channel's message) until a mark of the
declaration comes up. A mark acts only where what it begins is really there; otherwise it is text like any
other. White space right before a mark goes with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from weft.text.parsing.calls import CallReader
from weft.text.parsing.channels import ChannelReader
from weft.text.parsing.declaration import OutputFormat, Thought
from weft.text.parsing.events import OutputEvent
from weft.text.parsing.parser import OutputSpec
from weft.text.parsing.tape import BLANKS, MAX_BLANK, Reading, Tape, Texts

MAX_AGAIN = 1024
"""A beginning that turned out to be none is looked through again for others up to this length."""

Action: TypeAlias = Literal["open", "close", "call", "section end", "header", "message end"]


class Mark(msgspec.Struct, frozen=True):
    """A text that may be markup in a region."""

    text: str
    action: Action
    trims: bool = True
    """Whether white space before it belongs to it."""
    line_start: bool = False


class Marks:
    """The marks of a region, to be found in one pass."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.by_text = {mark.text: mark for mark in marks}
        self.texts = Texts(self.by_text)
        self.trims = any(mark.trims for mark in self.by_text.values())


class OutputEngine:
    """The ``OutputParser`` of a declaration."""

    def __init__(self, declared: OutputFormat, spec: OutputSpec, tape: Tape | None = None) -> None:
        self.tape = Tape() if tape is None else tape
        self._format = declared
        tools = {tool.name: tool for tool in spec.tools} if spec.tool_calls else {}
        self._calls = CallReader(self.tape, tools, parallel=spec.parallel, openings=declared.openings())
        self._tells_calls = bool(tools)
        self._ways = declared.ways(strict=any(tool.strict for tool in tools.values()))
        self._tells_thoughts = spec.reasoning
        self._thought: Thought | None = None
        self._in_thought = spec.in_reasoning and spec.reasoning
        self._channels: ChannelReader | None = None
        if declared.channels is not None:
            self._channels = ChannelReader(
                self.tape,
                declared.channels,
                self._calls,
                thoughts=spec.reasoning and declared.channel_thoughts,
                calls=self._tells_calls and declared.channel_calls,
            )
        self._begins_in_thought = self._in_thought
        if self._in_thought and declared.thoughts:
            self._thought = declared.thoughts[0]
        elif declared.channels is not None:
            self._in_thought = False  # the channel's body says it
        self._behind_call = False
        """Whether nothing but white space came since the last call."""
        self._known: dict[object, Marks] = {}
        self._steps = self._read()
        self._started = False

    def feed(self, text: str) -> list[OutputEvent]:
        """Takes the next piece; returns what is certain now."""
        if text:
            self.tape.add(text)
            self._go()
        return self.tape.take()

    def close(self) -> list[OutputEvent]:
        """The output has ended, in whatever way. Called once."""
        self.tape.ended = True
        self._go()
        return self.tape.take()

    def _go(self) -> None:
        next(self._steps, None)

    @property
    def thinking(self) -> bool:
        """Whether text is that of a thought now."""
        if self._channels is not None and self._channels.body is not None:
            return self._channels.body == "reasoning"
        return self._in_thought

    def _read(self) -> Reading[None]:
        tape = self.tape
        if self._thought is not None:
            yield from self._enter(self._thought)
        if self._channels is not None:
            yield from self._channels.begin(in_thought=self._begins_in_thought)
        while True:
            found = yield from self._text()
            if found is None:
                return
            mark, start = found
            tape.at = start
            if not (yield from self._act(mark, start)):
                self._no_mark(start)

    def _no_mark(self, start: int) -> None:
        """What began at ``start`` is text: its first character for certain, the rest is looked at again."""
        tape = self.tape
        far = tape.at - start > MAX_AGAIN
        tape.text(tape.at if far else start + 1, thought=self.thinking)
        tape.at = tape.done
        self._behind_call = False

    # -- text up to a mark

    def _text(self) -> Reading[tuple[Mark, int] | None]:
        """Gives out text up to the next mark; (mark, its position), or None at the output's end.

        White space before the mark is not given out yet.
        """
        tape = self.tape
        marks = self._marks()
        while True:
            found = self._find(marks)
            if found is not None:
                mark, start = found
                blank = self._blank_before(start) if mark.trims else 0
                self._give(start - blank)
                return found
            if tape.ended:
                break
            text = tape.slice(tape.done, tape.end)
            keep = marks.texts.held(text)
            if marks.trims:
                keep += self._blank_before(tape.end - keep)
            self._give(tape.end - keep)
            yield from tape.more()
        if self._behind_call and not tape.slice(tape.done, tape.end).strip(BLANKS):
            tape.skip(tape.end)
        self._give(tape.end)
        return None

    def _find(self, marks: Marks) -> tuple[Mark, int] | None:
        """The first mark that is one where it stands."""
        tape = self.tape
        start = tape.done
        while True:
            match = tape.search(marks.texts.pattern, start)
            if match is None:
                return None
            mark = marks.by_text[match[0]]
            begin = tape.position(match.start())
            if not mark.line_start:
                return mark, begin
            self._give(begin - self._blank_before(begin))
            if self._starts_line(begin):
                return mark, begin
            start = begin + 1
            self._give(start)

    def _starts_line(self, position: int) -> bool:
        """Whether a line begins at ``position`` that is no line of code. Before it only white space is
        left.
        """
        newline = "\n" in self.tape.slice(self.tape.done, position)
        return (newline or self.tape.line_blank) and not self._fenced_at(newline)

    def _fenced_at(self, newline: bool) -> bool:
        return self.tape.fenced ^ (newline and self.tape.line_is_fence)

    def _blank_before(self, end: int) -> int:
        """Length of the white space before ``end`` that was not given out, as far as a mark may take it."""
        start = max(self.tape.done, end - MAX_BLANK)
        text = self.tape.slice(start, end)
        return len(text) - len(text.rstrip(BLANKS))

    def _give(self, end: int) -> None:
        if end > self.tape.done:
            self.tape.text(end, thought=self.thinking)
            self._behind_call = False

    def _marks(self) -> Marks:
        """The marks of the present region."""
        calls = self._tells_calls and self._calls.allowed
        body = None if self._channels is None else self._channels.body
        key = (self._in_thought, self._thought, calls, self._calls.section, body)
        if key not in self._known:
            self._known[key] = Marks(self._marks_now(calls))
        return self._known[key]

    def _marks_now(self, calls: bool) -> Iterable[Mark]:
        declared = self._format
        if self._tells_thoughts and self._thought is not None:
            yield Mark(self._thought.close, "close")
        elif self._tells_thoughts:
            for thought in declared.thoughts:
                yield Mark(thought.open, "open", line_start=True)
        for call in self._ways if calls else ():
            if self._in_thought and call.line_start:
                continue
            for trigger in call.triggers:
                yield Mark(trigger, "call", line_start=call.line_start)
            section = self._calls.section
            if section is not None and call.section == section and call.own_trigger:
                yield Mark(call.own_trigger, "call")
        section = self._calls.section
        if section is not None and section.tail:
            yield Mark(next(item for item in reversed(section.tail) if isinstance(item, str)), "section end")
        if self._channels is not None:
            for text in self._channels.openings:
                yield Mark(text, "header", trims=False)
            for text in self._channels.endings:
                yield Mark(text, "message end", trims=False)

    # -- what marks do

    def _act(self, mark: Mark, start: int) -> Reading[bool]:
        """Does what a mark at ``start`` says. False, and nothing was given out, where it is no mark."""
        tape = self.tape
        if mark.action == "open":
            tape.skip(start + len(mark.text))
            self._thought = next(one for one in self._format.thoughts if one.open == mark.text)
            self._in_thought = True
            yield from self._enter(self._thought)
        elif mark.action == "close":
            tape.skip(start + len(mark.text))
            self._thought = None
            self._in_thought = False
            yield from self._blank()
            tape.begin_part()
        elif mark.action == "section end":
            tape.skip(start + len(mark.text))
            self._calls.section = None
        elif mark.action == "call":
            return (yield from self._call(mark, start))
        else:
            assert self._channels is not None
            if mark.action == "message end":
                tape.skip(start + len(mark.text))
                self._channels.end()
                return True
            return (yield from self._channels.header(start))
        return True

    def _call(self, mark: Mark, start: int) -> Reading[bool]:
        """A call at ``start``, in the first of the declared ways that fits."""
        farthest = start
        for call in self._ways:
            if mark.text not in call.triggers and mark.text != call.own_trigger:
                continue
            self.tape.at = start
            if (yield from self._calls.read(call, mark.text)):
                self._behind_call = True
                return True
            farthest = max(farthest, self.tape.at)
        self.tape.at = farthest
        return False

    def _enter(self, thought: Thought) -> Reading[None]:
        """At the start of a thought: white space, and its opening tag where the prompt has opened it too."""
        tape = self.tape
        yield from self._blank()
        if tape.done == 0 and (yield from tape.literal(thought.open)) is not None:
            tape.skip(tape.at)
            yield from self._blank()

    def _blank(self) -> Reading[None]:
        """White space beside a tag goes with it."""
        tape = self.tape
        tape.at = tape.done
        yield from tape.blank()
        tape.skip(tape.at)
