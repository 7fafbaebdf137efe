"""One choice's output as its request reads it: content, thoughts and tool calls, told apart as it comes."""

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
"""How a choice ended, for its client."""
assert "tool_calls" not in get_args(FinishReason)


class Call:
    """A tool call of an output, as far as it came."""

    def __init__(self, id: str, name: str) -> None:
        self.id = id
        """The model's own where it wrote one that no earlier call of the output has, else minted."""
        self.name = name
        self.whole = False
        """Whether the model ended it. One that the output's end cut short is not."""
        self._pieces: list[str] = []

    @property
    def arguments(self) -> str:
        """JSON text, if the call is whole."""
        return _joined(self._pieces)

    def add(self, text: str) -> None:
        """The next piece of its arguments."""
        self._pieces.append(text)


class ChoiceOutput:
    """Feeds a parser with a choice's text and keeps what it found. Not thread-safe."""

    def __init__(self, parser: OutputParser) -> None:
        self.calls: list[Call] = []
        """Those that began, by the number that events have."""
        self._ids: set[str] = set()
        """Of the calls."""
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._closed = False

    def take(self, delta: TextDelta) -> list[OutputEvent]:
        """What became certain with ``delta``, ids of calls filled in. The choice's last delta closes the
        parser.
        """
        found = [*self._parser.feed(delta.text)] if delta.text else []
        if delta.finish_reason is not None and not self._closed:
            self._closed = True
            cut = delta.finish_reason != "stop" or isinstance(delta.stop_reason, str)
            # The end of an output that was cut makes no call whole: more was to come.
            found += [event for event in self._parser.close() if not (cut and isinstance(event, CallEnd))]
        return [self._note(event) for event in found]

    def finish_reason(self, delta: TextDelta) -> OutputFinish | None:
        """How the choice ended with ``delta``, which was taken; None while it goes on."""
        return "tool_calls" if delta.finish_reason == "stop" and self.calls_whole else delta.finish_reason

    @property
    def calls_whole(self) -> bool:
        """Whether there are calls and each of them is whole: a client may carry all of them out."""
        return bool(self.calls) and all(call.whole for call in self.calls)

    @property
    def content(self) -> str:
        """All text for the user so far."""
        return _joined(self._content)

    @property
    def reasoning(self) -> str:
        """All text of thoughts so far."""
        return _joined(self._reasoning)

    def _note(self, event: OutputEvent) -> OutputEvent:
        if isinstance(event, Content):
            self._content.append(event.text)
        elif isinstance(event, Reasoning):
            self._reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            assert event.call == len(self.calls), "calls are numbered in order"
            event = msgspec.structs.replace(event, id=self._id_of(event))
            self.calls.append(Call(event.id, event.name))
        elif isinstance(event, CallArguments):
            self.calls[event.call].add(event.text)
        elif isinstance(event, CallEnd):
            self.calls[event.call].whole = True
        return event

    def _id_of(self, event: CallBegin) -> str:
        own = event.id if event.id not in self._ids else ""
        found = own or "call_" + secrets.token_hex(12)
        self._ids.add(found)
        return found


def _joined(pieces: list[str]) -> str:
    """The pieces as one, which takes their place: so that asking again costs nothing."""
    if len(pieces) > 1:
        pieces[:] = ["".join(pieces)]
    return pieces[0] if pieces else ""
