"""POST /v1/chat/completions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

import msgspec
from fastapi import FastAPI, Request
from msgspec import UNSET
from starlette.responses import Response

from weft.common.errors import ErrorInfo
from weft.front.http import answers as r
from weft.front.http import openapi
from weft.front.http.streaming import HOLE, StreamForm, TextEvents
from weft.front.protocol.chat_request import ChatRequest
from weft.front.requests.answer_logprobs import chat_logprobs, prompt_logprobs
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation, usage_of_chunk
from weft.front.requests.outputs import ChoiceOutput
from weft.front.requests.serving import AnswerShape, handle
from weft.text.choice import Choice, TextDelta
from weft.text.parsing.events import CallArguments, CallBegin, CallEnd, Content, OutputEvent, Reasoning
from weft.text.token_counts import reasoning_tokens


def add_chat(app: FastAPI, front: Front) -> None:
    """Add the route to ``app``."""

    @app.post(
        "/v1/chat/completions",
        openapi_extra=openapi.generates(ChatRequest, r.ChatCompletion, r.ChatChunk),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        return await handle(front, request, "chat", ChatShape)


class ChatShape(AnswerShape):
    """Answers of one chat request, all with the same id, time and model."""

    form = StreamForm()

    def __init__(self, generation: Generation) -> None:
        """Name the answer in ``generation``."""
        self._generation = generation
        self._asked = generation.job.asked
        self._tokenizer = generation.tokenizer
        self._id = generation.named("chatcmpl-")
        self._created = int(time.time())
        self._outputs: dict[int, ChoiceOutput] = {}
        """Choice index -> parsed output, for the begun choices of a stream."""
        self._contents: dict[int, TextEvents] = {}
        asked = self._asked
        self._plain = not (asked.usage_in_chunks or asked.return_token_ids)
        """True if a chunk of content says nothing but the text, unless the chunk has logprobs."""

    def opening(self) -> list[r.ChatChunk]:
        """Return the role chunk of every choice, before any content."""
        chunks = [
            self._chunk([r.ChatChunkChoice(index=choice.index, delta=r.Delta(role="assistant", content=""))])
            for choice in self._generation.choices
        ]
        if self._asked.return_token_ids:
            chunks[0].prompt_token_ids = self._generation.job.prompts[0].ids
        return chunks

    def weight(self, delta: TextDelta) -> int:
        return 0 if delta.logprobs is None else delta.logprobs.candidates

    def chunks(self, delta: TextDelta) -> list[r.ChatChunk]:
        """Return the chunks of one delta: one per run of events of the same class and call; [] without
        anything to show. The delta is parsed here, so each delta must come once, in order."""
        output = self._output_of(delta.index)
        return self._chunks(delta, output, output.take(delta))

    def events(self, delta: TextDelta) -> list[bytes]:
        """Return the chunks of one delta as events. Content alone, the frequent case, is put into an event
        made before."""
        output = self._output_of(delta.index)
        found = output.take(delta)
        if self._plain and len(found) == 1 and delta.finish_reason is None and delta.logprobs is None:
            text = found[0]
            if isinstance(text, Content):
                return [self._content_of(delta.index).event(text.text)]
        return [self.form.event(chunk) for chunk in self._chunks(delta, output, found)]

    def _content_of(self, index: int) -> TextEvents:
        """Return the events of a choice's content, created at the first call."""
        if index not in self._contents:
            choice = r.ChatChunkChoice(index=index, delta=r.Delta(content=HOLE))
            self._contents[index] = TextEvents(self.form.event(self._chunk([choice])))
        return self._contents[index]

    def _chunks(self, delta: TextDelta, output: ChoiceOutput, found: list[OutputEvent]) -> list[r.ChatChunk]:
        """Return the chunks of one delta, parsed to ``found``."""
        deltas = list(self._deltas(found))
        shown = delta.logprobs is not None or self._asked.return_token_ids
        # A delta may carry a finish reason, logprobs or token ids without text: send a chunk without text.
        if not deltas and (delta.finish_reason or (shown and delta.token_ids)):
            deltas = [r.Delta() if delta.finish_reason else r.Delta(content="")]
        if not deltas:
            return []
        choices = [r.ChatChunkChoice(index=delta.index, delta=made) for made in deltas]
        # A delta may become several chunks: the finish reason goes into the last, token ids into the first.
        choices[-1].finish_reason = output.finish_reason(delta)
        if choices[-1].finish_reason:
            self._generation.show_weights(choices[-1], delta.index)
        if self._asked.return_token_ids:
            for choice in choices:
                choice.token_ids = []
            choices[0].token_ids = list(delta.token_ids)
        if delta.logprobs:
            top = self._asked.top or 0
            choices[0].logprobs = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, top)
        return [self._chunk([choice]) for choice in choices]

    def _output_of(self, index: int) -> ChoiceOutput:
        """Return the parsed output of a choice, created at the first call."""
        if index not in self._outputs:
            self._outputs[index] = ChoiceOutput(self._generation.parser())
        return self._outputs[index]

    def _deltas(self, events: Iterable[OutputEvent]) -> Iterator[r.Delta]:
        """Yield one delta per run of events of the same class and call, in order. Reasoning that is not
        requested, and ends of calls, are left out."""
        for (event_class, call), stretch in itertools.groupby(events, _class_and_call):
            found = list(stretch)
            text = "".join(getattr(event, "text", "") for event in found)
            if event_class is Content:
                yield r.Delta(content=text)
            elif event_class is Reasoning and self._asked.include_reasoning:
                yield r.Delta(reasoning_content=text, reasoning=text)
            elif event_class is CallArguments:
                function = r.FunctionDelta(arguments=text)
                yield r.Delta(tool_calls=[r.ToolCallDelta(index=call, function=function)])
            elif isinstance(begin := found[0], CallBegin):
                function = r.FunctionDelta(name=begin.name)
                whole = r.ToolCallDelta(index=call, id=begin.id, type="function", function=function)
                yield r.Delta(tool_calls=[whole])

    def failed(self, error: ErrorInfo) -> list[r.ErrorResponse]:
        return [r.error_response(error)]

    def take(self, delta: TextDelta) -> None:
        """Do nothing: the choices keep everything for the whole answer."""

    def closing(self, usage: r.Usage) -> list[r.ChatChunk]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._chunk([])
        chunk.usage = self._with_reasoning(usage)
        return [chunk]

    def whole(self, usage: r.Usage) -> Iterator[bytes]:
        """Yield the answer's JSON: a head, one piece per choice, and the usage."""
        first = self._generation.choices[0]
        ends = [_end_of(choice) for choice in self._generation.choices]
        for end in ends:  # parsed first, because the usage counts the reasoning of all choices
            self._output_of(end.index).take(end)
        answer = r.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=[],
            usage=self._with_reasoning(usage),
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if self._asked.prompt_logprobs else UNSET,
            prompt_token_ids=self._generation.job.prompts[0].ids if self._asked.return_token_ids else UNSET,
        )
        yield from r.with_choices(answer, map(self._choice, self._generation.choices, ends))

    def _with_reasoning(self, usage: r.Usage) -> r.Usage:
        """Return ``usage`` with the number of reasoning tokens, if there is reasoning."""
        count = sum(
            reasoning_tokens(self._tokenizer, output.reasoning, len(self._generation.choices[at].token_ids))
            for at, output in self._outputs.items()
        )
        if not count:
            return usage
        details = usage.completion_tokens_details or r.CompletionTokensDetails()
        made = msgspec.structs.replace(details, reasoning_tokens=count)
        return msgspec.structs.replace(usage, completion_tokens_details=made)

    def _choice(self, choice: Choice, end: TextDelta) -> r.ChatChoice:
        """Return a choice of the whole answer. ``end``: the parsed delta with the choice's full text."""
        output = self._outputs.pop(choice.index)
        reason = output.finish_reason(end)
        assert reason is not None
        chat_choice = r.ChatChoice(index=choice.index, message=self._message(output), finish_reason=reason)
        if choice.logprobs is not None:
            top = self._asked.top or 0
            chat_choice.logprobs = chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs, top)
        if self._asked.return_token_ids:
            chat_choice.token_ids = choice.token_ids
        self._generation.show_weights(chat_choice, choice.index)
        return chat_choice

    def _message(self, output: ChoiceOutput) -> r.Message:
        """Return the message of a parsed output. ``content`` is null for a message with calls and no text."""
        message = r.Message(role="assistant", content=output.content)
        if output.reasoning and self._asked.include_reasoning:
            message.reasoning_content = message.reasoning = output.reasoning
        if output.calls:
            message.content = output.content or None
            message.tool_calls = [
                r.ToolCall(id=call.id, function=r.FunctionCall(name=call.name, arguments=call.arguments))
                for call in output.calls
            ]
        return message

    def _chunk(self, choices: list[r.ChatChunkChoice]) -> r.ChatChunk:
        return r.ChatChunk(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=usage_of_chunk(self._generation),
        )


def _end_of(choice: Choice) -> TextDelta:
    """Return the full text of an ended choice as one delta."""
    return TextDelta(
        index=choice.index,
        text=choice.text,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


def _class_and_call(event: OutputEvent) -> tuple[type[OutputEvent], int]:
    if isinstance(event, CallBegin | CallArguments | CallEnd):
        return type(event), event.call
    return type(event), -1
