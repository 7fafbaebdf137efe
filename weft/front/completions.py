"""POST /v1/completions."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Iterable, Sequence

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from weft.front import responses as r
from weft.front.context import Front
from weft.front.generation import Generation, Prompt
from weft.front.logprobs import bounded, prompt_logprobs
from weft.front.prompt_only import without_output
from weft.front.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest, parse
from weft.front.serving import Job, handle
from weft.text.choice import Choice, Delta
from weft.text.detokenizer import Detokenizer
from weft.text.logprobs import PositionLogprobs
from weft.text.tokenizer import Tokenizer, check_text
from weft.types.sampling import SamplingParams


async def completions(front: Front, request: Request) -> Response:
    """Continues a text, as a whole or as a stream."""
    return await handle(front, request, prepare)


def prepare(front: Front, body: bytes) -> Job:
    """Reads and tokenizes; runs in a text thread. Raises WeftError."""
    asked = parse(body, CompletionRequest)
    front.check_model(asked.model)
    tokenizer = front.text.tokenizer
    params = asked.sampling()
    prompts = [_prompt(tokenizer, prompt, bool(asked.echo)) for prompt in asked.prompts()]
    shape = functools.partial(CompletionShape, tokenizer, asked)
    return Job(
        prompts=prompts,
        params=_with_default_length(params, prompts, front.limits.max_model_len),
        stream=bool(asked.stream),
        continues=True,
        param="prompt",
        shape=without_output(shape) if asked.prompt_only else shape,
    )


def _prompt(tokenizer: Tokenizer, prompt: str | list[int], echo: bool) -> Prompt:
    if isinstance(prompt, str):
        check_text(prompt, "prompt")
        return Prompt(ids=tokenizer.encode(prompt), text=prompt)
    return Prompt(ids=prompt, text=tokenizer.decode(prompt) if echo else "")


def _with_default_length(params: SamplingParams, prompts: Sequence[Prompt], context: int) -> SamplingParams:
    """OpenAI's default length, cut to what the context leaves to the longest prompt."""
    if params.max_tokens is not None:
        return params
    room = context - max(len(prompt.ids) for prompt in prompts)
    return msgspec.structs.replace(params, max_tokens=min(DEFAULT_COMPLETION_TOKENS, max(room, 1)))


class CompletionShape:
    """Answers of one completions request: one id, time and model throughout."""

    def __init__(self, tokenizer: Tokenizer, asked: CompletionRequest, generation: Generation) -> None:
        self._tokenizer = tokenizer
        self._asked = asked
        self._generation = generation
        self._id = "cmpl-" + secrets.token_hex(12)
        self._created = int(time.time())
        self._echoed: set[int] = set()
        self._offsets = {
            choice.index: _Offsets(tokenizer, asked.skip_special_tokens is not False, bool(asked.echo))
            for choice in generation.choices
        }

    def opening(self) -> list[r.Completion]:
        return []

    def chunks(self, delta: Delta) -> list[r.Completion]:
        chunks = []
        if delta.index not in self._echoed:
            self._echoed.add(delta.index)
            if self._asked.echo or self._asked.return_token_ids:
                chunks.append(self._answer([self._echo(delta.index)]))
        shown = delta.logprobs is not None or self._asked.return_token_ids
        if delta.text or delta.finish_reason or (shown and delta.token_ids):
            made = r.CompletionChoice(index=delta.index, text=delta.text, finish_reason=delta.finish_reason)
            if delta.logprobs:
                made.logprobs = self._logprobs(delta.index, delta.token_ids, delta.logprobs)
            if self._asked.return_token_ids:
                made.token_ids = list(delta.token_ids)
            chunks.append(self._answer([made]))
        return chunks

    def closing(self, usage: r.Usage) -> list[r.Completion]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._answer([])
        chunk.usage = usage
        return [chunk]

    def whole(self, usage: r.Usage) -> r.Completion:
        answer = self._answer([self._choice(choice) for choice in self._generation.choices])
        answer.usage = usage
        return answer

    def _answer(self, choices: list[r.CompletionChoice]) -> r.Completion:
        return r.Completion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=None if self._asked.usage_in_stream else UNSET,
        )

    def _choice(self, choice: Choice) -> r.CompletionChoice:
        made = self._echo(choice.index)
        made.text += choice.text
        made.finish_reason = choice.finish_reason
        if choice.logprobs is not None:
            own = self._logprobs(choice.index, choice.token_ids, choice.logprobs)
            made.logprobs = own if made.logprobs is None else _joined(made.logprobs, own)
        if self._asked.prompt_logprobs is not None:
            made.prompt_logprobs = prompt_logprobs(self._first_of(choice.index).prompt_logprobs)
        if self._asked.return_token_ids:
            made.token_ids = choice.token_ids
        return made

    def _echo(self, index: int) -> r.CompletionChoice:
        """The prompt's part of a choice: its text and logprobs with ``echo``, its ids where asked for."""
        prompt = self._generation.prompts[index // self._generation.params.n]
        made = r.CompletionChoice(index=index, text="")
        if self._asked.return_token_ids:
            made.prompt_token_ids = prompt.ids
        if self._asked.echo:
            made.text = prompt.text
            if self._asked.logprobs is not None:
                positions = self._first_of(index).prompt_logprobs or [None]
                made.logprobs = self._logprobs(index, prompt.ids, positions)
            self._offsets[index].end_prompt(len(prompt.text))
        return made

    def _first_of(self, index: int) -> Choice:
        """Choice 0 of the same prompt, the one whose prompt logprobs are computed."""
        return self._generation.choices[index - index % self._generation.params.n]

    def _logprobs(
        self, index: int, ids: Sequence[int], positions: Iterable[PositionLogprobs | None]
    ) -> r.CompletionLogprobs:
        made = r.CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        tops: list[dict[str, float] | None] = []
        for token, position in zip(ids, positions, strict=True):
            made.tokens.append(self._tokenizer.token_text(token))
            made.text_offset.append(self._offsets[index].next(token))
            made.token_logprobs.append(None if position is None else bounded(position[token].logprob))
            tops.append(None if position is None else _top(position))
        made.top_logprobs = tops if self._asked.logprobs else None
        return made


class _Offsets:
    """Where each token's text begins: characters that were certain before it."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, echo: bool) -> None:
        self._output = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=True)
        self._detokenizer = Detokenizer(tokenizer) if echo else self._output
        self._at = 0

    def end_prompt(self, length: int) -> None:
        """The echoed prompt has ended after ``length`` characters; the output goes on from there."""
        self._detokenizer = self._output
        self._at = length

    def next(self, token: int) -> int:
        """The offset of the next token."""
        at = self._at
        self._at += len(self._detokenizer.push(token))
        return at


def _top(position: PositionLogprobs) -> dict[str, float]:
    """Candidates by their text; of several with the same text the likeliest."""
    made: dict[str, float] = {}
    for found in position.values():
        made[found.decoded_token] = max(bounded(found.logprob), made.get(found.decoded_token, float("-inf")))
    return made


def _joined(prompt: r.CompletionLogprobs, own: r.CompletionLogprobs) -> r.CompletionLogprobs:
    tops = None
    if prompt.top_logprobs is not None and own.top_logprobs is not None:
        tops = prompt.top_logprobs + own.top_logprobs
    return r.CompletionLogprobs(
        tokens=prompt.tokens + own.tokens,
        token_logprobs=prompt.token_logprobs + own.token_logprobs,
        top_logprobs=tops,
        text_offset=prompt.text_offset + own.text_offset,
    )
