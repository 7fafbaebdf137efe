"""Answers of /inference/v1/generate, in the shapes of vLLM. UNSET fields are left out of the JSON."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

import msgspec
from msgspec import UNSET, UnsetType

from weft.common.errors import ErrorInfo
from weft.front.http import answers as r
from weft.front.http.streaming import StreamForm
from weft.front.protocol.npy import to_npy
from weft.front.protocol.tokens_request import TokensFacts
from weft.front.requests.answer_logprobs import bounded, json_array, prompt_logprobs
from weft.front.requests.binary_logprobs import BinaryLogprobs, binary_pieces
from weft.front.requests.generation import Generation
from weft.front.requests.serving import AnswerShape
from weft.text.choice import Choice, TextDelta, routed_experts
from weft.text.logprobs import Logprobs, PositionLogprobs

Mode = Literal["tokens", "text"]


class IdLogprob(msgspec.Struct, kw_only=True):
    """One candidate at one position."""

    token_id: int
    token: str
    """``token_id:`` and the id. With ``output_mode`` text: the token's text."""
    logprob: float
    rank: int
    bytes: list[int] | None = None
    """With ``output_mode`` text: the token's bytes."""


class TokenIdLogprob(IdLogprob, kw_only=True):
    """The output token at one position, with candidates: the output token first, then by rank."""

    top_logprobs: list[IdLogprob]


class TokenIdLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenIdLogprob]


class TokensChoice(msgspec.Struct, kw_only=True):
    """A choice, or the part of a choice in a chunk."""

    index: int
    token_ids: list[int]
    finish_reason: r.FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string, or the stop token of the request, which ended the choice."""
    text: str | UnsetType = UNSET
    logprobs: TokenIdLogprobs | None = None
    binary_logprobs: BinaryLogprobs | UnsetType = UNSET
    """Logprobs of the output, with ``return_binary``."""
    routed_experts: str | UnsetType = UNSET
    """Experts of each token in each routed layer, if requested: base64 of a .npy file, uint8 or uint16
    [tokens, layers, experts per token]. The tokens are prompt and output, without the last token."""


class TokensAnswer(msgspec.Struct, kw_only=True):
    """The answer, if not streamed."""

    request_id: str
    output_mode: Mode
    model: str
    created: int
    choices: list[TokensChoice]
    usage: r.Usage | UnsetType = UNSET
    prompt_logprobs: r.PromptLogprobs | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    binary_prompt_logprobs: BinaryLogprobs | UnsetType = UNSET
    """Logprobs of the prompt from the second token on, with ``return_binary``."""
    kv_transfer_params: None = None
    """Always null: KV caches move only between groups of one server."""


class TokensChunk(msgspec.Struct, kw_only=True):
    """One event of a stream."""

    request_id: str
    output_mode: Mode
    choices: list[TokensChoice]
    usage: r.Usage | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    """In the first chunk, if requested."""


class TokensShape(AnswerShape):
    """Answers of one request, all with the same id."""

    form = StreamForm()

    def __init__(self, generation: Generation) -> None:
        """Name the answer in ``generation``. The answer shows the request's own id, if the request has
        one."""
        self._generation = generation
        self._asked = generation.job.asked
        facts = msgspec.json.decode(generation.job.facts, type=TokensFacts)
        own = generation.named("generate-")
        self._id = facts.request_id or own
        self._mode: Mode = "text" if facts.text else "tokens"
        self._created = int(time.time())
        self._begun = False

    def opening(self) -> list[TokensChunk]:
        return []

    def weight(self, delta: TextDelta) -> int:
        return 0 if delta.logprobs is None else delta.logprobs.candidates

    def chunks(self, delta: TextDelta) -> list[TokensChunk]:
        """Return the chunk of one delta; [] without tokens, text and end."""
        text = delta.text if self._mode == "text" else ""
        if not delta.token_ids and not delta.finish_reason and not text:
            return []
        choice = self._choice(delta.index, delta.token_ids, delta.text)
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        if delta.logprobs:
            choice.logprobs = self._logprobs(delta.token_ids, delta.logprobs)
        chunk = self._chunk([choice])
        if self._asked.usage_in_chunks:
            chunk.usage = self._generation.usage()
        if self._asked.return_token_ids and not self._begun:
            chunk.prompt_token_ids = self._generation.job.prompts[0].ids
        self._begun = True
        return [chunk]

    def failed(self, error: ErrorInfo) -> list[r.ErrorResponse]:
        return [r.error_response(error)]

    def take(self, delta: TextDelta) -> None:
        """Do nothing: the choices keep everything for the whole answer."""

    def closing(self, usage: r.Usage) -> list[TokensChunk]:
        if not self._asked.usage_in_stream:
            return []
        chunk = self._chunk([])
        chunk.usage = usage
        return [chunk]

    def whole(self, usage: r.Usage) -> Iterator[bytes]:
        """Yield the answer's JSON: a head with the usage, then one piece per choice, arrays in smaller
        pieces."""
        first = self._generation.choices[0]
        binary = self._asked.binary
        answer = TokensAnswer(
            request_id=self._id,
            output_mode=self._mode,
            model=self._asked.model,
            created=self._created,
            choices=[],
            usage=usage,
            prompt_logprobs=prompt_logprobs(first.prompt_logprobs)
            if self._asked.prompt_logprobs and not binary
            else None,
            prompt_token_ids=self._generation.job.prompts[0].ids if self._asked.return_token_ids else UNSET,
        )
        if not binary:
            yield from r.with_choices(answer, map(self._whole_choice, self._generation.choices))
            return
        before, after = r.to_json(answer).split(r.NO_CHOICES, 1)
        yield before + r.NO_CHOICES[:-1]
        for number, found in enumerate(self._generation.choices):
            yield b"," if number else b""
            yield from self._with_arrays(self._whole_choice(found), "binary_logprobs", found.logprobs)
        yield r.NO_CHOICES[-1:] + after[:-1]
        if self._asked.prompt_logprobs:
            yield from self._arrays("binary_prompt_logprobs", first.prompt_logprobs)
        yield b"}"

    def _with_arrays(self, made: msgspec.Struct, name: str, found: Logprobs | None) -> Iterator[bytes]:
        """Yield the JSON of ``made`` with the field ``name``, the arrays of ``found``, if there are any."""
        yield r.to_json(made)[:-1]
        if found is not None:
            yield from self._arrays(name, found)
        yield b"}"

    def _arrays(self, name: str, found: Logprobs | None) -> Iterator[bytes]:
        """Yield one more field of an object: the arrays of ``found``."""
        yield b"," + r.to_json(name) + b":"
        yield from binary_pieces(() if found is None else found.columns, self._asked.binary)

    def _whole_choice(self, found: Choice) -> TokensChoice:
        choice = self._choice(found.index, found.token_ids, found.text)
        choice.finish_reason = found.finish_reason
        choice.stop_reason = found.stop_reason
        if found.logprobs is not None and not self._asked.binary:
            choice.logprobs = self._logprobs(found.token_ids, found.logprobs)
        generation = self._generation
        shape, prompt = generation.front.config.spec.routes, generation.job.prompts[0]
        if shape is not None:
            routed = routed_experts(generation.choices[0], found, prompt.count, shape)
            choice.routed_experts = UNSET if routed is None else to_npy(routed)
        return choice

    def _choice(self, index: int, ids: Sequence[int], text: str) -> TokensChoice:
        shown = text if self._mode == "text" else UNSET
        return TokensChoice(index=index, token_ids=list(ids), text=shown)

    def _chunk(self, choices: list[TokensChoice]) -> TokensChunk:
        return TokensChunk(request_id=self._id, output_mode=self._mode, choices=choices)

    def _logprobs(self, ids: Sequence[int], positions: Iterable[PositionLogprobs]) -> TokenIdLogprobs:
        """Return the logprobs of output tokens, each with the token itself and the likeliest candidates, as
        many as requested. Uses up ``positions``."""
        top = self._asked.top or 0

        def entries() -> Iterator[TokenIdLogprob]:
            for number, position in zip(ids, positions, strict=True):
                # A position has its own token first, then the others by rank.
                shown = [one for one, found in position.items() if one == number or found.rank <= top]
                likeliest = [IdLogprob(**self._candidate(one, position)) for one in shown] if top else []
                yield TokenIdLogprob(**self._candidate(number, position), top_logprobs=likeliest)

        return TokenIdLogprobs(content=cast(list[TokenIdLogprob], json_array(entries())))

    def _candidate(self, number: int, position: PositionLogprobs) -> dict[str, Any]:
        """Return the fields of one candidate."""
        found = position[number]
        made = {"token_id": number, "logprob": bounded(found.logprob), "rank": found.rank}
        if self._mode == "tokens":
            return {**made, "token": f"token_id:{number}"}
        data = self._generation.tokenizer.token_bytes(number)
        return {**made, "token": data.decode("utf-8", "replace"), "bytes": list(data)}
