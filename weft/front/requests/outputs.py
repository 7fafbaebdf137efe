"""Parsed output of one choice: content, reasoning and tool calls, separated as the text arrives."""

from __future__ import annotations

import secrets
from typing import Literal, TypeAlias, get_args

import msgspec

from weft.text.choice import FinishReason, TextDelta
from weft.text.parsing.events import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    Reasoning,
)
from weft.text.parsing.parser import OutputParser

OutputFinish: TypeAlias = FinishReason | Literal["tool_calls"]
"""Finish reason of a choice, as sent to the client."""
assert "tool_calls" not in get_args(FinishReason)


class OutputCall:
    """A tool call of an output, as far as received."""

    def __init__(self, id: str, name: str) -> None:
        self.id = id
        """The model's own id if unique in the output, otherwise a new id."""
        self.name = name
        self.whole = False
        """True if the model completed the call. False for a call cut off by the end of the output."""
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """JSON text, if the call is complete."""
        return _joined(self._pieces)

    def add(self, text: str) -> None:
        """Append a piece of the arguments."""
        self._pieces.append(text)


class ChoiceOutput:
    """Feeds a choice's text to a parser and keeps the result. Not thread-safe."""

    def __init__(self, parser: OutputParser) -> None:
        self.calls: list[OutputCall] = []
        """Begun calls, indexed by the call number of the events."""
        self._ids: set[str] = set()
        """Ids of the calls."""
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._closed = False

    def take(self, delta: TextDelta) -> list[OutputEvent]:
        """Parse ``delta`` and return the new events, with call ids filled in. Adds the events to content,
        reasoning and calls. The choice's last delta closes the parser; a cut output completes no call."""
        found = self._parser.feed(delta.text) if delta.text else []
        if len(found) == 1 and delta.finish_reason is None and isinstance(found[0], Content):
            self._content.append(found[0].text)  # the frequent case
            return found
        found = [*found]
        if delta.finish_reason is not None and not self._closed:
            self._closed = True
            cut = delta.finish_reason != "stop" or isinstance(delta.stop_reason, str)
            # A cut output completes no call: more text would have followed.
            found += [event for event in self._parser.close() if not (cut and isinstance(event, CallEnd))]
        return [self._note(event) for event in found]

    def finish_reason(self, delta: TextDelta) -> OutputFinish | None:
        """Return the finish reason of ``delta``, after ``take``; None for a choice that goes on. "stop"
        becomes "tool_calls" if there are calls and all calls are complete."""
        return "tool_calls" if delta.finish_reason == "stop" and self.calls_whole else delta.finish_reason

    @property
    def calls_whole(self) -> bool:
        """True if there are calls and all calls are complete, so a client may run all calls."""
        return bool(self.calls) and all(call.whole for call in self.calls)

    @property
    def content(self) -> str:
        """All content so far."""
        return _joined(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning so far."""
        return _joined(self._reasoning)

    def _note(self, event: OutputEvent) -> OutputEvent:
        """Add ``event`` to the content, the reasoning or the calls. Return the event; a CallBegin gets its
        final id."""
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            assert event.call == len(self.calls), "tool calls must be numbered in order"
            event = msgspec.structs.replace(event, id=self._id_of(event))
            self.calls.append(OutputCall(event.id, event.name))
        elif isinstance(event, CallArguments):
            self.calls[event.call].add(event.text)
        elif isinstance(event, CallEnd):
            self.calls[event.call].whole = True
        return event

    def _id_of(self, event: CallBegin) -> str:
        """Return the id of a call, and record the id as used. The model's own id is kept if not empty and
        unique in the output; otherwise a random id is made."""
        own = event.id if event.id not in self._ids else ""
        found = own or "call_" + secrets.token_hex(12)
        self._ids.add(found)
        return found


def _joined(pieces: list[str]) -> str:
    """Return the joined pieces, and replace the list's content by the joined text: the next call is cheap."""
    if len(pieces) > 1:
        pieces[:] = ["".join(pieces)]
    return pieces[0] if pieces else ""
