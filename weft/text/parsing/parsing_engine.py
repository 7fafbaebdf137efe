"""Execute a declaration: one reader for the reasoning, the tool calls and the channels of one output.

The output is text of the current *region*: content, reasoning, or the body of a channel's message. Text
continues until a mark of the declaration. A mark acts only if the complete construct follows: for example, a
whole call head with a known tool name. A mark without such a construct is ordinary text. White space directly
before a mark belongs to the mark.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import msgspec

from weft.text.parsing.calls import CallReader
from weft.text.parsing.channels import ChannelReader
from weft.text.parsing.declaration import AnswerMarks, OutputFormat, ReasoningMarks
from weft.text.parsing.events import OutputEvent
from weft.text.parsing.parser import OutputSpec
from weft.text.parsing.tape import BLANKS, MAX_BLANK, Reading, Tape, Texts

MAX_AGAIN = 1024
"""Characters of a false start. The engine searches a shorter false start again for marks inside the false
start. A longer false start becomes text at once, which bounds the work per character.
"""

Action: TypeAlias = Literal[
    "open", "close", "answer", "answer end", "call", "section end", "header", "message end"
]


class Mark(msgspec.Struct, frozen=True):
    """A text with a possible markup meaning in a region."""

    text: str
    action: Action
    trims: bool = True
    """True if white space before the mark belongs to the mark."""
    line_start: bool = False


class ParserMarks:
    """All marks of one region, compiled into one regular expression."""

    def __init__(self, marks: Iterable[Mark]) -> None:
        self.by_text = {mark.text: mark for mark in marks}
        self.texts = Texts(self.by_text)
        self.trims = any(mark.trims for mark in self.by_text.values())


class OutputEngine:
    """The ``OutputParser`` for any declaration."""

    def __init__(self, declared: OutputFormat, spec: OutputSpec, tape: Tape | None = None) -> None:
        """``declared`` names the parts to separate, ``spec`` the parts that the request wants.

        ``tape`` may be a subclass that records more; None means a new tape.
        """
        self.tape = Tape() if tape is None else tape
        self._format = declared
        tools = {tool.name: tool for tool in spec.tools} if spec.tool_calls else {}
        self._calls = CallReader(self.tape, tools, parallel=spec.parallel, openings=declared.openings())
        self._tells_calls = bool(tools)
        self._ways = declared.ways(strict=any(tool.strict for tool in tools.values()))
        self._tells_reasoning = spec.reasoning
        self._reasoning: ReasoningMarks | None = None
        self._in_reasoning = spec.in_reasoning and spec.reasoning
        self._channels: ChannelReader | None = None
        if declared.channels is not None:
            self._channels = ChannelReader(
                self.tape,
                declared.channels,
                self._calls,
                reasoning=spec.reasoning and declared.channel_reasoning,
                calls=self._tells_calls and declared.channel_calls,
            )
        self._begins_in_reasoning = self._in_reasoning
        if self._in_reasoning and declared.reasoning:
            self._reasoning = declared.reasoning[0]
        elif declared.channels is not None:
            self._in_reasoning = False  # the header of the first message decides
        self._behind_call = False
        """True if only white space was read since the last call."""
        self._answer: AnswerMarks | None = None
        """The marks around the current answer, or None."""
        self._no_content = True
        """True if the current part has no content yet."""
        self._known: dict[object, ParserMarks] = {}
        self._steps = self._read()
        self._started = False

    def feed(self, text: str) -> list[OutputEvent]:
        """Read the next piece of output and return the events certain so far."""
        if text:
            self.tape.add(text)
            self._go()
        return self.tape.take()

    def close(self) -> list[OutputEvent]:
        """Return the remaining events at the end of the output. Call once."""
        self.tape.ended = True
        self._go()
        return self.tape.take()

    def _go(self) -> None:
        next(self._steps, None)

    @property
    def thinking(self) -> bool:
        """True if the current region is reasoning."""
        if self._channels is not None and self._channels.body is not None:
            return self._channels.body == "reasoning"
        return self._in_reasoning

    def _read(self) -> Reading[None]:
        """Read the whole output: the generator behind ``feed`` and ``close``."""
        tape = self.tape
        if self._reasoning is not None:
            yield from self._enter(self._reasoning)
        if self._channels is not None:
            yield from self._channels.begin(in_reasoning=self._begins_in_reasoning)
        while True:
            found = yield from self._text()
            if found is None:
                return
            mark, start = found
            tape.at = start
            if not (yield from self._act(mark, start)):
                self._no_mark(start)

    def _no_mark(self, start: int) -> None:
        """Give out the first character at ``start`` as text and search the rest again.

        The engine calls this method when ``tape.at`` stands behind a false start. A false start longer than
        ``MAX_AGAIN`` is given out whole.
        """
        tape = self.tape
        far = tape.at - start > MAX_AGAIN
        tape.text(tape.at if far else start + 1, reasoning=self.thinking)
        tape.at = tape.done
        self._behind_call = self._no_content = False

    # -- text up to a mark

    def _text(self) -> Reading[tuple[Mark, int] | None]:
        """Give out text up to the next mark.

        Return the mark and its position, or None at the end of the output, with all text given out. The white
        space before a trimming mark is not given out yet.
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
            # Keep back the text that may still become a mark, together with the white space before that text.
            keep = marks.texts.held(text)
            if marks.trims:
                keep += self._blank_before(tape.end - keep)
            self._give(tape.end - keep)
            yield from tape.more()
        # White space between the last call and the end of the output is markup.
        if self._behind_call and not tape.slice(tape.done, tape.end).strip(BLANKS):
            tape.skip(tape.end)
        self._give(tape.end)
        return None

    def _find(self, marks: ParserMarks) -> tuple[Mark, int] | None:
        """Return (first mark in effect, position), or None. Give out the text before a line-start mark."""
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
            # A line-start mark counts only at the start of a line outside a fenced code block. Give out the
            # text first, so that the tape knows how the current line begins.
            self._give(begin - self._blank_before(begin))
            if self._starts_line(begin):
                return mark, begin
            start = begin + 1
            self._give(start)

    def _starts_line(self, position: int) -> bool:
        """Return True if a line starts at ``position`` outside a fenced code block.

        Only white space may stand between ``tape.done`` and ``position``.
        """
        newline = "\n" in self.tape.slice(self.tape.done, position)
        return (newline or self.tape.line_blank) and not self._fenced_at(newline)

    def _fenced_at(self, newline: bool) -> bool:
        return self.tape.fenced ^ (newline and self.tape.line_is_fence)

    def _blank_before(self, end: int) -> int:
        """Return the length of the white space before ``end``: at most ``MAX_BLANK``, and only characters not
        given out yet.
        """
        start = max(self.tape.done, end - MAX_BLANK)
        text = self.tape.slice(start, end)
        return len(text) - len(text.rstrip(BLANKS))

    def _give(self, end: int) -> None:
        if end > self.tape.done:
            self.tape.text(end, reasoning=self.thinking)
            self._behind_call = self._no_content = False

    def _marks(self) -> ParserMarks:
        """Return the marks of the current region, built once per combination of states."""
        calls = self._tells_calls and self._calls.allowed
        body = None if self._channels is None else self._channels.body
        # Everything ``_marks_now`` depends on.
        key = (self._in_reasoning, self._reasoning, calls, self._calls.section, body, self._answer)
        if key not in self._known:
            self._known[key] = ParserMarks(self._marks_now(calls))
        return self._known[key]

    def _marks_now(self, calls: bool) -> Iterable[Mark]:
        """Yield the marks of the current state: reasoning, calls, section ends and channel headers."""
        declared = self._format
        if self._tells_reasoning and self._reasoning is not None:
            yield Mark(self._reasoning.close, "close")
        elif self._tells_reasoning:
            for reasoning in declared.reasoning:
                yield Mark(reasoning.open, "open", line_start=True)
        if self._tells_reasoning and not self._in_reasoning:
            for answer in declared.answer:
                yield Mark(answer.open, "answer")
            if self._answer is not None:
                yield Mark(self._answer.close, "answer end")
        for call in self._ways if calls else ():
            # A call without tags cannot be recognized inside reasoning: a bracket at the start of a line is
            # common there.
            if self._in_reasoning and call.line_start:
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
        """Apply ``mark`` at ``start``: skip the markup and change the state.

        Return False, with nothing given out, if the text there turns out to be no mark.
        """
        tape = self.tape
        if mark.action == "open":
            tape.skip(start + len(mark.text))
            self._reasoning = next(one for one in self._format.reasoning if one.open == mark.text)
            self._in_reasoning = True
            yield from self._enter(self._reasoning)
        elif mark.action == "close":
            tape.skip(start + len(mark.text))
            self._reasoning = None
            self._in_reasoning = False
            yield from self._blank()
            tape.begin_part()
            self._no_content = True
        elif mark.action in ("answer", "answer end"):
            return (yield from self._answer_mark(mark, start))
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

    def _answer_mark(self, mark: Mark, start: int) -> Reading[bool]:
        """Skip a mark around the answer. Return False, with nothing given out, if the text is content."""
        tape = self.tape
        tape.at = start + len(mark.text)
        if mark.action == "answer":
            if not self._no_content:
                return False
            self._answer = next(one for one in self._format.answer if one.open == mark.text)
        else:
            # The closing mark counts only if the output or the content ends behind the mark.
            yield from tape.blank()
            marks = [one.open for one in self._format.answer]
            marks += [trigger for call in self._ways for trigger in call.triggers]
            if (yield from tape.peek()) and (yield from tape.literal(*marks)) is None:
                return False
            self._answer = None
            self._no_content = True
        tape.skip(start + len(mark.text))
        yield from self._blank()
        tape.begin_part()
        return True

    def _call(self, mark: Mark, start: int) -> Reading[bool]:
        """Read a call at ``start`` with the first declared spelling that fits.

        Return False if none fits; ``tape.at`` then stands at the farthest position of all attempts.
        """
        farthest = start
        for call in self._ways:
            if mark.text not in call.triggers and mark.text != call.own_trigger:
                continue
            self.tape.at = start
            if (yield from self._calls.read(call, mark.text)):
                self._behind_call = self._no_content = True
                return True
            farthest = max(farthest, self.tape.at)
        self.tape.at = farthest
        return False

    def _enter(self, reasoning: ReasoningMarks) -> Reading[None]:
        """Skip white space at the start of a reasoning block.

        Skip the opening tag too, if the output repeats the tag that the prompt already ended with.
        """
        tape = self.tape
        yield from self._blank()
        if tape.done == 0 and (yield from tape.literal(reasoning.open)) is not None:
            tape.skip(tape.at)
            yield from self._blank()

    def _blank(self) -> Reading[None]:
        """Skip the white space beside a tag."""
        tape = self.tape
        tape.at = tape.done
        yield from tape.blank()
        tape.skip(tape.at)
