"""Answers of /api/chat, /api/generate and /api/embed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET

from weft.common.errors import ErrorInfo
from weft.front.http.answers import Usage, to_json
from weft.front.http.streaming import StreamForm
from weft.front.ollama import ollama_answers as o
from weft.front.openai.whole_shape import NUMBER_BYTES, WholeShape, check_size
from weft.front.requests.answer_logprobs import chat_logprobs
from weft.front.requests.generation import Generation
from weft.front.requests.outputs import ChoiceOutput, OutputCall
from weft.front.requests.read_pooled import decode_facts
from weft.front.requests.serving import AnswerShape
from weft.text.choice import TextDelta
from weft.text.parsing.events import CallEnd, Content, OutputEvent, Reasoning
from weft.text.scoring import shown

FORM = StreamForm(idle=b"", end=b"", lines=True)


class OllamaShape(AnswerShape):
    """Answer of one request of /api/chat or /api/generate: one choice."""

    form = FORM

    def __init__(self, generation: Generation, *, chat: bool) -> None:
        """Name the answer in ``generation``. ``chat``: text goes into a message."""
        self._generation = generation
        self._chat = chat
        self._asked = generation.job.asked
        generation.named("ollama-")
        self._output = ChoiceOutput(generation.parser())
        self._began = time.monotonic_ns()
        self._first: int | None = None
        """Time of the first token."""

    def opening(self) -> list[Any]:
        return []

    def weight(self, delta: TextDelta) -> int:
        return 0 if delta.logprobs is None else delta.logprobs.candidates

    def take(self, delta: TextDelta) -> None:
        self._parse(delta)

    def chunks(self, delta: TextDelta) -> list[Any]:
        """Return the lines of one delta: one per kind of text, and one per whole call."""
        made = [self._line(**fields) for fields in self._fields(self._parse(delta))]
        if delta.logprobs is not None and delta.token_ids:
            made = made or [self._line()]
            made[0].logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        return made

    def closing(self, usage: Usage) -> list[Any]:
        return [self._ended(self._line(), usage)]

    def failed(self, error: ErrorInfo) -> list[Any]:
        return [o.OllamaError(error=error.message)]

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the whole answer as one piece of JSON."""
        calls = [self._call(number, call) for number, call in enumerate(self._output.calls) if call.whole]
        reasoning = self._output.reasoning if self._asked.include_reasoning else ""
        made = self._line(self._output.content, reasoning, calls)
        choice = self._generation.choices[0]
        if choice.logprobs is not None:
            made.logprobs = self._logprobs(choice.token_ids, choice.logprobs)
        yield to_json(self._ended(made, usage))

    def _parse(self, delta: TextDelta) -> list[OutputEvent]:
        if self._first is None and delta.token_ids:
            self._first = time.monotonic_ns()
        return self._output.take(delta)

    def _fields(self, events: Iterable[OutputEvent]) -> Iterator[dict[str, Any]]:
        """Yield the fields of lines, in order. A call is given out when the model has completed the call."""
        for event in events:
            if isinstance(event, Content):
                yield {"content": event.text}
            elif isinstance(event, Reasoning) and self._asked.include_reasoning:
                yield {"reasoning": event.text}
            elif isinstance(event, CallEnd):
                yield {"calls": [self._call(event.call, self._output.calls[event.call])]}

    def _line(
        self, content: str = "", reasoning: str = "", calls: list[o.OllamaCall] | None = None
    ) -> o.OllamaChatAnswer | o.OllamaGenerateAnswer:
        common: dict[str, Any] = {"model": self._asked.model, "created_at": o.at_time(time.time())}
        if not self._chat:
            return o.OllamaGenerateAnswer(response=content, thinking=reasoning or UNSET, **common)
        message = o.OllamaMessage(content=content, thinking=reasoning or UNSET, tool_calls=calls or UNSET)
        return o.OllamaChatAnswer(message=message, **common)

    def _call(self, number: int, call: OutputCall) -> o.OllamaCall:
        arguments = msgspec.Raw(call.arguments.encode() or b"{}")
        return o.OllamaCall(
            id=call.id, function=o.OllamaFunction(index=number, name=call.name, arguments=arguments)
        )

    def _logprobs(self, ids: Iterable[int], positions: Any) -> Any:
        return chat_logprobs(self._generation.tokenizer, list(ids), positions, self._asked.top or 0).content

    def _ended(self, answer: Any, usage: Usage) -> Any:
        """Return ``answer`` with the reason of the end, the counts and the times."""
        now = time.monotonic_ns()
        first = self._first or now
        answer.done = True
        answer.done_reason = self._generation.choices[0].finish_reason or "stop"
        answer.total_duration = now - self._began
        answer.load_duration = 0
        answer.prompt_eval_count = usage.prompt_tokens
        answer.prompt_eval_duration = first - self._began
        answer.eval_count = usage.completion_tokens
        answer.eval_duration = now - first
        return answer


class OllamaVectors(WholeShape):
    """Answer of one request for embeddings. Never streamed."""

    def __init__(self, generation: Generation, *, one: bool) -> None:
        """``one``: /api/embeddings, which answers one vector. Raises InvalidRequest for an answer above
        ``--max-response-bytes``, by an estimate of the size."""
        front, self._generation = generation.front, generation
        self._one = one
        self._facts = decode_facts(generation.job.facts)
        self._began = time.monotonic_ns()
        dimensions = self._facts.dimensions or front.config.spec.hidden
        size = len(generation.choices) * dimensions * NUMBER_BYTES
        check_size(size, front.section.max_response_bytes, "input", "set dimensions")

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the answer's JSON: a piece per vector, then the counts."""
        if self._one:
            yield to_json(o.OllamaEmbeddingAnswer(embedding=self._vector(0)))
            return
        yield b'{"model":' + to_json(self._generation.job.asked.model) + b',"embeddings":['
        for number in range(len(self._generation.choices)):
            yield (b"," if number else b"") + to_json(self._vector(number))
        took = time.monotonic_ns() - self._began
        yield b'],"total_duration":%d,"load_duration":0,"prompt_eval_count":%d}' % (
            took,
            usage.prompt_tokens,
        )

    def _vector(self, number: int) -> list[float]:
        choice = self._generation.choices[number]
        made: list[float] = np.asarray(
            shown(choice.embedding, self._facts.dimensions, self._facts.normalize)
        ).tolist()
        return made
