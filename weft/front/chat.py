"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from weft.front import answers as r
from weft.front.context import Front
from weft.front.generation import Generation
from weft.front.logprobs import chat_logprobs, prompt_logprobs
from weft.front.serving import handle
from weft.text.choice import Choice, TextDelta


async def chat(front: Front, request: Request) -> Response:
    """Answers a conversation, as a whole or as a stream."""
    return await handle(front, request, "chat", ChatShape)


class ChatShape:
    """Answers of one chat request: one id, time and model throughout."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._asked = generation.job.asked
        self._tokenizer = generation.tokenizer
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._created = int(time.time())

    def opening(self) -> list[r.ChatChunk]:
        """The role of every choice, before any content."""
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
        shown = delta.logprobs is not None or self._asked.return_token_ids
        if not (delta.text or delta.finish_reason or (shown and delta.token_ids)):
            return []
        choice = r.ChatChunkChoice(
            index=delta.index,
            delta=r.Delta(content=delta.text) if delta.text or not delta.finish_reason else r.Delta(),
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids) if self._asked.return_token_ids else UNSET,
        )
        if delta.logprobs:
            top = self._asked.top or 0
            choice.logprobs = chat_logprobs(self._tokenizer, delta.token_ids, delta.logprobs, top)
        return [self._chunk([choice])]

    def closing(self, usage: r.Usage) -> list[r.ChatChunk]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._chunk([])
        chunk.usage = usage
        return [chunk]

    def whole(self, usage: r.Usage) -> Iterator[bytes]:
        first = self._generation.choices[0]
        answer = r.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=[],
            usage=usage,
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if self._asked.prompt_logprobs else UNSET,
            prompt_token_ids=self._generation.job.prompts[0].ids if self._asked.return_token_ids else UNSET,
        )
        yield from r.with_choices(answer, map(self._choice, self._generation.choices))

    def _choice(self, choice: Choice) -> r.ChatChoice:
        assert choice.finish_reason is not None
        chat_choice = r.ChatChoice(
            index=choice.index,
            message=r.Message(role="assistant", content=choice.text),
            finish_reason=choice.finish_reason,
        )
        if choice.logprobs is not None:
            top = self._asked.top or 0
            chat_choice.logprobs = chat_logprobs(self._tokenizer, choice.token_ids, choice.logprobs, top)
        if self._asked.return_token_ids:
            chat_choice.token_ids = choice.token_ids
        return chat_choice

    def _chunk(self, choices: list[r.ChatChunkChoice]) -> r.ChatChunk:
        return r.ChatChunk(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=None if self._asked.usage_in_stream else UNSET,
        )
