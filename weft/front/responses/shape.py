"""Answers of the Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from weft.common.errors import ErrorInfo
from weft.front.http.answers import Usage, to_json
from weft.front.http.streaming import StreamForm
from weft.front.protocol.responses.conversion import kept_items, unpacked
from weft.front.requests.answer_logprobs import chat_logprobs
from weft.front.requests.generation import Generation
from weft.front.requests.outputs import ChoiceOutput
from weft.front.requests.serving import AnswerShape
from weft.front.responses import responses_events as e
from weft.front.responses.content import Items
from weft.front.responses.response_store import ResponseStore, Stored
from weft.text.choice import TextDelta
from weft.text.logprobs import Logprobs
from weft.text.token_counts import cache_creation, reasoning_tokens

FORM = StreamForm(named=True, end=b"")


class _Pending:
    """Logprobs of tokens without text so far.

    A separate object: a method of the shape in ``Items`` would be a cycle of references, so each request,
    with its body, would wait for the garbage collector.
    """

    def __init__(self, generation: Generation) -> None:
        self._tokenizer = generation.tokenizer
        self._top = generation.job.asked.top or 0
        self._waiting: list[tuple[tuple[int, ...], Logprobs]] = []

    def add(self, ids: tuple[int, ...], found: Logprobs) -> None:
        """Add the logprobs of the tokens ``ids``."""
        self._waiting.append((ids, found))

    def take(self) -> bytes:
        """Return the waiting logprobs, as items of a JSON array, and clear the list."""
        waiting, self._waiting = self._waiting, []
        # A JSON array without brackets per delta, joined below.
        made = [
            to_json(chat_logprobs(self._tokenizer, ids, found, self._top).content)[1:-1]
            for ids, found in waiting
        ]
        return b",".join(part for part in made if part)


class ResponsesShape(AnswerShape):
    """Answer of one request: a single response."""

    form = FORM

    def __init__(self, generation: Generation, store: ResponseStore, key: int, *, block: int) -> None:
        """Name the answer in ``generation``. ``store``: receives the response, if requested. ``key``:
        number of the request's API key. ``block``: see ``cache_creation``."""
        self._generation = generation
        self._store = store
        self._key = key
        self._block = block
        self._facts = unpacked(generation.job.facts)
        self._output = ChoiceOutput(generation.parser())
        self._pending = _Pending(generation)
        self._items = Items(self._facts, self._pending.take)
        self._events = 0
        self._opened = False
        self._answer = e.ResponseAnswer(
            id=generation.named("resp_"),
            created_at=int(time.time()),
            model=generation.job.asked.model,
            **self._facts.repeats,
        )

    def opening(self) -> list[e.Event]:
        self._opened = True
        begun = msgspec.Raw(to_json(self._answer))
        return self._numbered(
            [
                e.ResponseLifecycle(type=f"response.{kind}", response=begun)
                for kind in ("created", "in_progress")
            ]
        )

    def weight(self, delta: TextDelta) -> int:
        return 0 if delta.logprobs is None else delta.logprobs.candidates

    def chunks(self, delta: TextDelta) -> list[e.Event]:
        """Add a delta to the items and return the numbered events. Logprobs of tokens without text wait for
        the next text."""
        if delta.logprobs:
            self._pending.add(delta.token_ids, delta.logprobs)
        return self._numbered(
            [event for found in self._output.take(delta) for event in self._items.take(found)]
        )

    def take(self, delta: TextDelta) -> None:
        self.chunks(delta)

    def closing(self, usage: Usage) -> list[e.Event]:
        """Complete the answer, store the response if requested, and return the last events."""
        events = self._end(usage)
        whole = msgspec.Raw(self._kept())
        events.append(e.ResponseLifecycle(type=f"response.{self._answer.status}", response=whole))
        return self._numbered(events)

    def failed(self, error: ErrorInfo) -> list[e.Event]:
        """Return the events of a failed response with the output so far. The response is not stored."""
        before = [] if self._opened else self.opening()
        # The last event repeats the incomplete output, so no events of the open item are needed.
        self._items.close(whole=False)
        answer = self._answer
        answer.output = self._items.done
        answer.status = "failed"
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        answer.error = e.ResponseError(code=code, message=error.message)
        return [*before, *self._numbered([e.ResponseLifecycle(type="response.failed", response=answer)])]

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole response as one piece of JSON. Stores the response if requested."""
        self._end(usage)
        yield self._kept()

    def _end(self, usage: Usage) -> list[e.Event]:
        """Complete the answer with output, status and usage. Return the events of its last item."""
        answer = self._answer
        reason = self._generation.choices[0].finish_reason
        cut = reason != "stop"
        events = self._items.close(whole=not cut)
        answer.output = self._items.done
        answer.status = "incomplete" if cut else "completed"
        answer.incomplete_details = e.IncompleteDetails() if reason == "length" else None
        answer.completed_at = None if cut else int(time.time())
        answer.usage = self._usage(usage)
        return events

    def _kept(self) -> bytes:
        """Return the answer's JSON. Stores the response if requested."""
        made = to_json(self._answer)
        if self._facts.store:
            stored = Stored(
                id=self._answer.id,
                key=self._key,
                answer=made,
                input=self._facts.items,
                output=kept_items(msgspec.json.decode(to_json(self._items.done))),
                output_ids=tuple(item.id for item in self._items.done),
                previous=self._facts.previous,
            )
            self._store.add(stored)
        return made

    def _usage(self, usage: Usage) -> e.ResponseUsage:
        tokens, cached = usage.prompt_tokens, self._generation.choices[0].num_cached
        output = usage.completion_tokens
        thinking = reasoning_tokens(self._generation.tokenizer, self._output.reasoning, output)
        return e.ResponseUsage(
            input_tokens=tokens,
            input_tokens_details=e.InputTokensDetails(
                cached_tokens=cached, cache_write_tokens=cache_creation(tokens, cached, self._block)
            ),
            output_tokens=output,
            output_tokens_details=e.OutputTokensDetails(reasoning_tokens=thinking),
            total_tokens=usage.total_tokens,
        )

    def _numbered(self, events: list[e.Event]) -> list[Any]:
        """Set the sequence numbers of ``events``, which continue over all calls, and return the same list."""
        for event in events:
            event.sequence_number = self._events
            self._events += 1
        return events
