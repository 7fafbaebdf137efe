"""POST /v1/completions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import ErrorInfo
from weft.front.http import answers as r
from weft.front.http import openapi
from weft.front.http.streaming import HOLE, StreamForm, TextEvents
from weft.front.openai.prompt_only import PromptOnly
from weft.front.protocol.completions_request import CompletionRequest
from weft.front.requests.answer_logprobs import completion_logprobs, prompt_logprobs
from weft.front.requests.context import Front
from weft.front.requests.generation import Generation, usage_of_chunk
from weft.front.requests.serving import AnswerShape, handle
from weft.text.choice import Choice, TextDelta
from weft.text.detokenizer import Detokenizer
from weft.text.logprobs import PositionLogprobs
from weft.text.tokenizer import Tokenizer


def add_completions(app: FastAPI, front: Front) -> None:
    """Add the route to ``app``."""

    @app.post(
        "/v1/completions",
        openapi_extra=openapi.generates(CompletionRequest, r.Completion, r.Completion),
    )
    async def create_completion(request: Request) -> Response:
        """Continue a text."""
        return await handle(front, request, "completions", _shape)


def _shape(generation: Generation) -> AnswerShape:
    shape = CompletionShape(generation)
    return PromptOnly(shape, generation) if generation.job.asked.prompt_only else shape


class CompletionShape(AnswerShape):
    """Answers of one completions request, all with the same id, time and model."""

    form = StreamForm()

    def __init__(self, generation: Generation) -> None:
        """Name the answer in ``generation``."""
        self._generation = generation
        self._asked = generation.job.asked
        self._tokenizer = generation.tokenizer
        self._id = generation.named("cmpl-")
        self._created = int(time.time())
        self._echoed: set[int] = set()
        self._offsets: dict[int, _Offsets] = {}
        """Choice index -> text offsets, for choices with logprobs shown."""
        self._texts: dict[int, TextEvents] = {}
        asked = self._asked
        self._plain = not (asked.usage_in_chunks or asked.return_token_ids)
        """True if a chunk of output says nothing but the text, unless the chunk has logprobs."""

    def opening(self) -> list[r.Completion]:
        return []

    def weight(self, delta: TextDelta) -> int:
        """Return the number of logprob candidates in the delta's chunks, with the echoed prompt in a
        choice's first chunk."""
        own = 0 if delta.logprobs is None else delta.logprobs.candidates
        if delta.index in self._echoed or not self._asked.echo:
            return own
        echoed = self._first_of(delta.index).prompt_logprobs
        return own + (0 if echoed is None else echoed.candidates)

    def chunks(self, delta: TextDelta) -> list[r.Completion]:
        """Return the chunks of one delta; [] without anything to show. The first delta of a choice also
        gives a chunk of the prompt, with ``echo`` or token ids."""
        chunks = []
        # The first chunk of each choice repeats the prompt.
        if delta.index not in self._echoed:
            self._echoed.add(delta.index)
            if self._asked.echo or self._asked.return_token_ids:
                chunks.append(self._answer([self._echo(delta.index)]))
        shown = delta.logprobs is not None or self._asked.return_token_ids
        if delta.text or delta.finish_reason or (shown and delta.token_ids):
            completion_choice = r.CompletionChoice(
                index=delta.index, text=delta.text, finish_reason=delta.finish_reason
            )
            if delta.logprobs:
                completion_choice.logprobs = self._logprobs(
                    self._entries(delta.index, delta.token_ids, delta.logprobs)
                )
            if self._asked.return_token_ids:
                completion_choice.token_ids = list(delta.token_ids)
            if delta.finish_reason:
                self._generation.show_weights(completion_choice, delta.index)
            chunks.append(self._answer([completion_choice]))
        return chunks

    def events(self, delta: TextDelta) -> list[bytes]:
        """Return the chunks of one delta as events. Text alone, the frequent case, is put into an event made
        before."""
        plain = self._plain and delta.finish_reason is None and delta.logprobs is None
        if plain and delta.index in self._echoed:
            if not delta.text:
                return []
            if delta.index not in self._texts:
                hole = r.CompletionChoice(index=delta.index, text=HOLE)
                self._texts[delta.index] = TextEvents(self.form.event(self._answer([hole])))
            return [self._texts[delta.index].event(delta.text)]
        return [self.form.event(chunk) for chunk in self.chunks(delta)]

    def failed(self, error: ErrorInfo) -> list[r.ErrorResponse]:
        return [r.error_response(error)]

    def take(self, delta: TextDelta) -> None:
        """Do nothing: the choices keep everything for the whole answer."""

    def closing(self, usage: r.Usage) -> list[r.Completion]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._answer([])
        chunk.usage = usage
        return [chunk]

    def whole(self, usage: r.Usage) -> Iterator[bytes]:
        answer = self._answer([])
        answer.usage = usage
        yield from r.with_choices(answer, map(self._choice, self._generation.choices))

    def _answer(self, choices: list[r.CompletionChoice]) -> r.Completion:
        return r.Completion(
            id=self._id,
            created=self._created,
            model=self._asked.model,
            choices=choices,
            usage=usage_of_chunk(self._generation),
        )

    def _choice(self, choice: Choice) -> r.CompletionChoice:
        """Return a choice of the whole answer. With ``echo``, the text begins with the prompt."""
        prompt = self._generation.prompt_of(choice.index)
        completion_choice = r.CompletionChoice(index=choice.index, text=prompt.text + choice.text)
        completion_choice.finish_reason = choice.finish_reason
        if choice.logprobs is not None:
            completion_choice.logprobs = self._logprobs(self._all_entries(choice))
        if self._asked.prompt_logprobs:
            completion_choice.prompt_logprobs = prompt_logprobs(self._first_of(choice.index).prompt_logprobs)
        if self._asked.return_token_ids:
            completion_choice.token_ids = choice.token_ids
            completion_choice.prompt_token_ids = prompt.ids
        self._generation.show_weights(completion_choice, choice.index)
        return completion_choice

    def _echo(self, index: int) -> r.CompletionChoice:
        """Return the prompt's part of a choice: text and logprobs with ``echo``, token ids if requested."""
        prompt = self._generation.prompt_of(index)
        completion_choice = r.CompletionChoice(index=index, text=prompt.text)
        if self._asked.return_token_ids:
            completion_choice.prompt_token_ids = prompt.ids
        if self._asked.echo and self._asked.top is not None:
            completion_choice.logprobs = self._logprobs(self._prompt_entries(index))
        return completion_choice

    def _all_entries(self, choice: Choice) -> Iterator[_Entry]:
        if self._asked.echo:
            yield from self._prompt_entries(choice.index)
        yield from self._entries(choice.index, choice.token_ids, choice.logprobs or ())

    def _prompt_entries(self, index: int) -> Iterator[_Entry]:
        """Yield the entries of the prompt's tokens. The first token has no logprobs, because no token
        precedes it. At the end the text offsets of the choice move on to the output."""
        prompt = self._generation.prompt_of(index)
        positions = self._first_of(index).prompt_logprobs or ()
        yield from self._entries(index, prompt.ids, itertools.chain((None,), positions))
        self._offsets_of(index).end_prompt(len(prompt.text))

    def _entries(
        self, index: int, ids: Iterable[int], positions: Iterable[PositionLogprobs | None]
    ) -> Iterator[_Entry]:
        """Yield (token id, candidates, text offset) of tokens, which must follow the choice's earlier
        tokens: each token moves the offset on."""
        offsets = self._offsets_of(index)
        for token, position in zip(ids, positions, strict=True):
            yield token, position, offsets.next(token)

    def _logprobs(self, entries: Iterable[_Entry]) -> r.CompletionLogprobs:
        return completion_logprobs(self._tokenizer, entries, self._asked.top or 0)

    def _first_of(self, index: int) -> Choice:
        """Return choice 0 of the same prompt. Only choice 0 has prompt logprobs."""
        return self._generation.choices[index - index % self._generation.job.params.n]

    def _offsets_of(self, index: int) -> _Offsets:
        """Return the offset counter of a choice, created at the first call."""
        if index not in self._offsets:
            skip = self._asked.skip_special_tokens
            self._offsets[index] = _Offsets(self._tokenizer, skip, self._asked.echo)
        return self._offsets[index]


_Entry = tuple[int, PositionLogprobs | None, int]
"""(token id, candidates, text offset of the token)."""


class _Offsets:
    """Text offset of each token: the number of characters decoded for certain before the token."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, echo: bool) -> None:
        self._output = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, continues=True)
        self._detokenizer = Detokenizer(tokenizer) if echo else self._output
        self._at = 0

    def end_prompt(self, length: int) -> None:
        """Continue with the output after an echoed prompt of ``length`` characters."""
        self._detokenizer = self._output
        self._at = length

    def next(self, token: int) -> int:
        """Return the offset of ``token`` and append the token."""
        at = self._at
        self._at += len(self._detokenizer.push(token))
        return at
