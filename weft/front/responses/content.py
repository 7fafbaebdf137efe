"""Output items of a response, built while the output arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from weft.front.protocol.responses.conversion import ResponsesFacts, new_id
from weft.front.protocol.responses.responses_tools import Named
from weft.front.responses import responses_events as e
from weft.front.sealed_reasoning import sealed
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning

Item = TypeVar("Item", bound=e.Output)


class Items:
    """Output items in output order, and the events for the stream."""

    def __init__(self, facts: ResponsesFacts, logprobs: Callable[[], bytes]) -> None:
        """``logprobs``: returns the logprobs of the text since its last call, as items of a JSON array."""
        self.done: list[e.Output] = []
        """Ended items."""
        self._facts = facts
        self._logprobs = logprobs
        self._open: _Open[Any] | None = None

    def take(self, found: OutputEvent) -> list[e.Event]:
        """Add one parsed output event to the items, and return the events for the stream; [] if there is
        nothing to send. A change of type ends the open item. Each call takes the pending logprobs; only
        text uses the logprobs."""
        if isinstance(found, Content):
            before = self._enter(_Text)
            return [*before, self._piece(found.text, self._logprobs())]
        if isinstance(found, Reasoning):
            # Only text carries logprobs: drop the logprobs of reasoning and calls.
            self._logprobs()
            before = self._enter(_Summary if self._facts.summarizes else _OpenReasoning)
            return [*before, self._piece(found.text, b"")]
        self._logprobs()
        if isinstance(found, CallBegin):
            return [*self.close(whole=True), *self._begin_call(found)]
        if isinstance(found, CallArguments):
            assert self._open is not None
            return self._open.add(found.text, b"") if found.text else []
        assert isinstance(found, CallEnd)
        return self._end(whole=True)

    def close(self, *, whole: bool) -> list[e.Event]:
        """End the open item, append the item to ``done``, and return the events; [] without an open item.
        ``whole``: True if the model completed the item. A call is complete only if the parser reports the
        end of the call."""
        return self._end(whole=whole and not isinstance(self._open, _Call | _CustomCall))

    def _end(self, *, whole: bool) -> list[e.Event]:
        """End the open item, append the item to ``done``, and return the events; [] without an open item."""
        opened, self._open = self._open, None
        if opened is None:
            return []
        events = opened.end(whole)
        self.done.append(opened.item)
        return [
            *events,
            e.ItemEvent(type="response.output_item.done", output_index=opened.at, item=opened.item),
        ]

    def _enter(self, item_class: type[_Open[Any]]) -> list[e.Event]:
        """Open an item of this type, after the end of any other open item, and return the events. Without
        effect if an item of the type is open already."""
        if isinstance(self._open, item_class):
            return []
        return [*self.close(whole=True), *self._start(item_class(len(self.done), self._facts))]

    def _begin_call(self, found: CallBegin) -> list[e.Event]:
        named = self._facts.names.get(found.name, Named(name=found.name))
        item_class: type[_Call | _CustomCall] = _CustomCall if named.custom else _Call
        return self._start(item_class(len(self.done), found.id, named))

    def _start(self, opened: _Open[Any]) -> list[e.Event]:
        """Make ``opened`` the open item, and return the events of its begin."""
        self._open = opened
        # Events are encoded later, and the item may be filled by then: send a copy.
        shown = msgspec.structs.replace(opened.item)
        added = e.ItemEvent(type="response.output_item.added", output_index=opened.at, item=shown)
        return [added, *opened.begin()]

    def _piece(self, text: str, logprobs: bytes) -> e.Event:
        assert self._open is not None
        (event,) = self._open.add(text, logprobs)
        return event


class _Open(Generic[Item]):
    """An item under construction."""

    item: Item

    def __init__(self, at: int, item: Item) -> None:
        """``at``: index of the item in the output. ``item``: filled by ``end``."""
        self.at = at
        self.item = item
        self.pieces: list[str] = []

    def begin(self) -> list[e.Event]:
        """Return the events after the event of the item itself."""
        return []

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        """Append a piece of text and return the events."""
        raise NotImplementedError

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item and return the events before the item's own end event."""
        raise NotImplementedError

    def place(self) -> Mapping[str, Any]:
        return {"item_id": self.item.id, "output_index": self.at}


class _Text(_Open[e.OutputMessage]):
    """A message with one part."""

    def __init__(self, at: int, facts: ResponsesFacts) -> None:
        super().__init__(at, e.OutputMessage(id=new_id("message")))
        self._logprobs: list[bytes] | None = [] if facts.logprobs else None

    def begin(self) -> list[e.Event]:
        part = e.OutputText(text="")
        return [e.PartEvent(type="response.content_part.added", **self.place(), part=part)]

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        """Append a piece of text with its logprobs (items of a JSON array, may be empty) and return its
        event."""
        self.pieces.append(text)
        if self._logprobs is not None and logprobs:
            self._logprobs.append(logprobs)
        return [
            e.PieceEvent(
                type="response.output_text.delta",
                **self.place(),
                content_index=0,
                delta=text,
                logprobs=msgspec.Raw(b"[" + logprobs + b"]"),
            )
        ]

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item's text, logprobs and status, and return the events."""
        text = "".join(self.pieces)
        logprobs = msgspec.Raw(b"[" + b",".join(self._logprobs or ()) + b"]")
        part = e.OutputText(text=text, logprobs=logprobs)
        self.item.content = [part]
        self.item.status = "completed" if whole else "incomplete"
        place = self.place()
        done = e.DoneEvent(
            type="response.output_text.done", **place, content_index=0, text=text, logprobs=logprobs
        )
        return [done, e.PartEvent(type="response.content_part.done", **place, part=part)]


class _Reasoning(_Open[e.ReasoningOutput]):
    def __init__(self, at: int, facts: ResponsesFacts) -> None:
        super().__init__(at, e.ReasoningOutput(id=new_id("reasoning")))
        self._encrypted = facts.encrypted
        if facts.encrypted:
            self.item.encrypted_content = None

    def fill(self, text: str) -> None:
        if self._encrypted:
            self.item.encrypted_content = sealed(text)


class _OpenReasoning(_Reasoning):
    """Reasoning, shown unchanged."""

    def begin(self) -> list[e.Event]:
        part = e.ReasoningText(text="")
        return [e.PartEvent(type="response.content_part.added", **self.place(), part=part)]

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        self.pieces.append(text)
        event_type = "response.reasoning_text.delta"
        return [e.PieceEvent(type=event_type, **self.place(), content_index=0, delta=text)]

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item's text, and the opaque form if requested, and return the events."""
        text = "".join(self.pieces)
        part = e.ReasoningText(text=text)
        self.item.content = [part]
        self.fill(text)
        place = self.place()
        return [
            e.DoneEvent(type="response.reasoning_text.done", **place, content_index=0, text=text),
            e.PartEvent(type="response.content_part.done", **place, part=part),
        ]


class _Summary(_Reasoning):
    """Reasoning, shown unchanged as its own summary."""

    def begin(self) -> list[e.Event]:
        part = e.SummaryText(text="")
        return [e.SummaryPartEvent(type="response.reasoning_summary_part.added", **self.place(), part=part)]

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        self.pieces.append(text)
        event_type = "response.reasoning_summary_text.delta"
        return [e.PieceEvent(type=event_type, **self.place(), summary_index=0, delta=text)]

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item's summary, and the opaque form if requested, and return the events."""
        text = "".join(self.pieces)
        part = e.SummaryText(text=text)
        self.item.summary = [part]
        self.fill(text)
        place = self.place()
        return [
            e.DoneEvent(type="response.reasoning_summary_text.done", **place, summary_index=0, text=text),
            e.SummaryPartEvent(type="response.reasoning_summary_part.done", **place, part=part),
        ]


class _Call(_Open[e.FunctionCallOutput]):
    """A function call."""

    def __init__(self, at: int, call_id: str, named: Named) -> None:
        item = e.FunctionCallOutput(id=new_id("function_call"), call_id=call_id, name=named.name)
        if named.namespace is not None:
            item.namespace = named.namespace
        super().__init__(at, item)

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        self.pieces.append(text)
        event_type = "response.function_call_arguments.delta"
        return [e.PieceEvent(type=event_type, **self.place(), delta=text)]

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item's arguments and status, and return the event."""
        self.item.arguments = "".join(self.pieces)
        self.item.status = "completed" if whole else "incomplete"
        event_type = "response.function_call_arguments.done"
        arguments, name = self.item.arguments, self.item.name
        return [e.DoneEvent(type=event_type, **self.place(), arguments=arguments, name=name)]


class _CustomCall(_Open[e.CustomCallOutput]):
    """A call with a text as input. The model sees a function with a single argument."""

    def __init__(self, at: int, call_id: str, named: Named) -> None:
        item = e.CustomCallOutput(id=new_id("custom_tool_call"), call_id=call_id, name=named.name)
        if named.namespace is not None:
            item.namespace = named.namespace
        super().__init__(at, item)

    def add(self, text: str, logprobs: bytes) -> list[e.Event]:
        """Append a piece of text; no event yet, because the pieces are JSON."""
        self.pieces.append(text)
        return []

    def end(self, whole: bool) -> list[e.Event]:
        """Fill the item's input, taken from the JSON, and the status. Return the whole text as one piece,
        and the end event."""
        self.item.input = _input("".join(self.pieces))
        self.item.status = "completed" if whole else "incomplete"
        event_type, place, text = "response.custom_tool_call_input", self.place(), self.item.input
        piece = [e.PieceEvent(type=event_type + ".delta", **place, delta=text)] if text else []
        return [*piece, e.DoneEvent(type=event_type + ".done", **place, input=text)]


def _input(arguments: str) -> str:
    """Return the text of the single argument ``input``. Arguments of any other form, also invalid JSON, are
    returned unchanged."""
    try:
        value = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(text := value.get("input"), str) and len(value) == 1:
        return text
    return arguments
