"""Reading of requests with token ids, and rendering of other requests to such requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.http.answers import to_json
from weft.front.protocol.chat_request import ChatRequest
from weft.front.protocol.completions_request import CompletionRequest
from weft.front.protocol.generate_request import Generate
from weft.front.protocol.parse import parse
from weft.front.protocol.response_formats import JsonObjectFormat, JsonSchemaFormat, TextFormat, tag_of
from weft.front.protocol.tokens_request import GenerateRequest, conversation_of, facts_of
from weft.front.protocol.turns import renamed
from weft.front.requests.reading import Job, Prompt, Reader
from weft.types.sampling import SamplingParams

_NAMES = {"prompt_token_ids": "token_ids"}
"""Conversation parameter -> parameter of this API."""


class Rendered(msgspec.Struct, kw_only=True):
    """A request as token ids: the body of a request for ``/inference/v1/generate``."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str
    stream: bool
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int = 0
    features: None = None
    """Always null: requests with images are refused."""
    reasoning_ended: bool | None = None


def read_generate(reader: Reader, body: bytes) -> Job:
    """Return the job of a request with token ids. Raises WeftError, and NeedsProof for a grammar without a
    verdict."""
    asked = reader.named(parse(body, GenerateRequest))
    sampling = asked.sampling()
    constraint = sampling.constraint()
    first = constraint if asked.reasoning_ended else None
    conversation = conversation_of(asked, sampling, None if first else constraint)
    try:
        job = reader.converse(conversation)
    except InvalidRequest as error:
        raise renamed(error, _NAMES) from None
    if first is not None:
        reader.check_grammar(first.grammar, first.param)
        job = msgspec.structs.replace(job, grammar=first.grammar)
    return msgspec.structs.replace(job, facts=msgspec.json.encode(facts_of(asked)))


def render_chat(reader: Reader, body: bytes) -> bytes:
    """Return the JSON of a chat request as token ids. The request is checked as for an answer. Raises
    WeftError, NeedsFiles and NeedsProof as ``Reader.chat`` does."""
    asked = reader.named(parse(body, ChatRequest))
    job = reader.chat(body)
    if job.pictures:
        raise InvalidRequest(
            "a prompt with images cannot be rendered to token ids; send the request to /v1/chat/completions",
            param="messages",
        )
    if job.grammar is not None and job.output.tools:
        raise InvalidRequest(
            "calls that must follow a schema cannot be rendered to token ids; send the request to "
            "/v1/chat/completions, or leave out tool_choice, strict and output formats",
            param="tools",
        )
    params = asked.sampling()
    more: dict[str, Any] = {}
    if params.stop:
        more["stop_in"] = params.stop_in
    if job.thinking_budget is not None:
        more["thinking_token_budget"] = job.thinking_budget
    (prompt,) = job.prompts
    return to_json(_rendered(asked, "chatcmpl-", prompt, params, more))


def render_completions(reader: Reader, body: bytes) -> bytes:
    """Return the JSON of a completions request as token ids: an array with one request per prompt. Raises
    WeftError and NeedsProof as ``Reader.completions`` does, and InvalidRequest for an answer above
    ``max_response_bytes``."""
    asked = reader.named(parse(body, CompletionRequest))
    if asked.echo:
        raise InvalidRequest("echo cannot be rendered to token ids", param="echo")
    job = reader.completions(body)
    params = asked.sampling()
    first, *others = job.prompts
    made = [_rendered(asked, "cmpl-", first, params, {})]
    _check_copies(made[0], len(job.prompts), reader.max_response_bytes)
    made += [_rendered(asked, "cmpl-", prompt, params, {}) for prompt in others]
    if job.grammar is not None:  # a format of a completion applies from the first token
        made = [msgspec.structs.replace(one, reasoning_ended=True) for one in made]
    return to_json(made)


def _check_copies(first: Rendered, count: int, limit: int) -> None:
    """Raise InvalidRequest if ``count`` rendered requests have more than ``limit`` bytes without their token
    ids, e.g. with a large schema in each. Runs before the other requests are made."""
    size = count * len(to_json(msgspec.structs.replace(first, token_ids=[])))
    if count > 1 and size > limit:
        raise InvalidRequest(
            f"the answer would repeat the parameters for each of the {count} prompts, in {size} bytes; this "
            f"server's limit is {limit} (--max-response-bytes): send fewer prompts, or a smaller schema",
            param="prompt",
            code="response_too_large",
        )


def _rendered(
    asked: Generate, prefix: str, prompt: Prompt, params: SamplingParams, more: Mapping[str, Any]
) -> Rendered:
    """Return the request for one prompt. ``more``: further sampling parameters."""
    given = {
        field.name: getattr(params, field.name)
        for field in msgspec.structs.fields(SamplingParams)
        if field.name != "stop_in" and getattr(params, field.name) != field.default
    }
    if (form := structured_of(asked)) is not None:
        given["structured_outputs"] = form
    options = None if asked.stream_options is None else msgspec.structs.asdict(asked.stream_options)
    return Rendered(
        request_id=prefix + secrets.token_hex(12),
        token_ids=prompt.ids,
        sampling_params={**given, "max_tokens": prompt.max_tokens, **more},
        model=asked.model or "",
        stream=bool(asked.stream),
        stream_options=options,
        cache_salt=asked.cache_salt,
        priority=asked.priority or 0,
    )


def structured_of(asked: Generate) -> dict[str, Any] | None:
    """Return the output format of a checked request as ``structured_outputs``; None without a format.

    A schema that may lose keywords (``strict`` false) becomes a strict schema.
    """
    # At most one of the fields is set: `constraint_of` has refused two formats.
    form = asked.response_format
    if isinstance(form, JsonObjectFormat | JsonSchemaFormat):
        schema = form.named.schema if isinstance(form, JsonSchemaFormat) else form.schema
        return {"json_object": True} if schema is None else {"json": schema}
    if form is not None and not isinstance(form, TextFormat):
        return {"structural_tag": tag_of(form)}
    if asked.structured_outputs is not None:
        given = msgspec.structs.asdict(asked.structured_outputs)
        return {name: value for name, value in given.items() if value is not None and value is not False}
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(asked, f"guided_{name}")) is not None:
            return {name: value}
    return None if asked.structural_tag is None else {"structural_tag": asked.structural_tag}
