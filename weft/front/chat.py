"""POST /v1/chat/completions."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest
from weft.front import responses as r
from weft.front.context import Front
from weft.front.generation import Generation, Prompt
from weft.front.logprobs import bounded, prompt_logprobs
from weft.front.protocol import ChatRequest, parse
from weft.front.serving import Job, handle
from weft.text.choice import Delta
from weft.text.logprobs import PositionLogprobs
from weft.text.tokenizer import Tokenizer


async def chat(front: Front, request: Request) -> Response:
    """Answers a conversation, as a whole or as a stream."""
    return await handle(front, request, prepare)


def prepare(front: Front, body: bytes) -> Job:
    """Reads, renders and tokenizes; runs in a text thread. Raises WeftError."""
    asked = parse(body, ChatRequest)
    front.check_model(asked.model)
    params = asked.sampling()
    continues = bool(asked.continue_final_message)
    opens = not continues if asked.add_generation_prompt is None else asked.add_generation_prompt
    try:
        rendered = front.text.chat.encode(
            asked.messages,
            add_generation_prompt=opens,
            continue_final_message=continues,
            kwargs=asked.chat_template_kwargs,
        )
    except RecursionError:
        message = "chat_template_kwargs are nested too deeply"
        raise InvalidRequest(message, param="chat_template_kwargs") from None
    return Job(
        prompts=[Prompt(ids=rendered.ids)],
        params=params,
        stream=bool(asked.stream),
        continues=continues,
        param="messages",
        shape=functools.partial(ChatShape, front.text.tokenizer, asked),
    )


class ChatShape:
    """Answers of one chat request: one id, time and model throughout."""

    def __init__(self, tokenizer: Tokenizer, asked: ChatRequest, generation: Generation) -> None:
        self._tokenizer = tokenizer
        self._asked = asked
        self._generation = generation
        self._id = "chatcmpl-" + secrets.token_hex(12)
        self._created = int(time.time())

    def opening(self) -> list[r.ChatChunk]:
        """The role of every choice, before any content."""
        chunks = [
            self._chunk([r.ChatChunkChoice(index=choice.index, delta=r.Delta(role="assistant", content=""))])
            for choice in self._generation.choices
        ]
        if self._asked.return_token_ids:
            chunks[0].prompt_token_ids = self._generation.prompts[0].ids
        return chunks

    def chunks(self, delta: Delta) -> list[r.ChatChunk]:
        shown = delta.logprobs is not None or self._asked.return_token_ids
        if not (delta.text or delta.finish_reason or (shown and delta.token_ids)):
            return []
        choice = r.ChatChunkChoice(
            index=delta.index,
            delta=r.Delta(content=delta.text) if delta.text or not delta.finish_reason else r.Delta(),
            logprobs=self._logprobs(delta.token_ids, delta.logprobs) if delta.logprobs else None,
            finish_reason=delta.finish_reason,
            token_ids=list(delta.token_ids) if self._asked.return_token_ids else UNSET,
        )
        return [self._chunk([choice])]

    def closing(self, usage: r.Usage) -> list[r.ChatChunk]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._chunk([])
        chunk.usage = usage
        return [chunk]

    def whole(self, usage: r.Usage) -> r.ChatCompletion:
        choices = []
        for choice in self._generation.choices:
            assert choice.finish_reason is not None
            made = r.ChatChoice(
                index=choice.index,
                message=r.Message(role="assistant", content=choice.text),
                finish_reason=choice.finish_reason,
            )
            if choice.logprobs is not None:
                made.logprobs = self._logprobs(choice.token_ids, choice.logprobs)
            if self._asked.return_token_ids:
                made.token_ids = choice.token_ids
            choices.append(made)
        first = self._generation.choices[0]
        wanted = self._asked.prompt_logprobs is not None
        return r.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=usage,
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs) if wanted else UNSET,
            prompt_token_ids=self._generation.prompts[0].ids if self._asked.return_token_ids else UNSET,
        )

    def _chunk(self, choices: list[r.ChatChunkChoice]) -> r.ChatChunk:
        return r.ChatChunk(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=None if self._asked.usage_in_stream else UNSET,
        )

    def _logprobs(self, ids: Sequence[int], positions: Iterable[PositionLogprobs]) -> r.ChatLogprobs:
        top = self._asked.top_logprobs or 0
        content = []
        for token, found in zip(ids, positions, strict=True):
            ranked = sorted(found.items(), key=lambda item: item[1].rank)
            likeliest = [r.TopLogprob(**self._token(i, lp.logprob)) for i, lp in ranked if lp.rank <= top]
            content.append(r.TokenLogprob(**self._token(token, found[token].logprob), top_logprobs=likeliest))
        return r.ChatLogprobs(content=content)

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": bounded(logprob), "bytes": list(data)}
