"""Readers for bodies of Ollama's API. Each body becomes a body of OpenAI's API."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.ollama_request import (
    OllamaBody,
    OllamaChat,
    OllamaEmbed,
    OllamaEmbedding,
    OllamaGenerate,
    untagged,
)
from weft.front.protocol.parse import parse
from weft.front.protocol.turns import renamed
from weft.front.requests.read_pooled import read_embeddings
from weft.front.requests.reading import Job, Reader

NAMES = {
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
    "input": "input",
    **{name: f"options.{name}" for name in ("temperature", "top_p", "top_k", "min_p", "seed", "stop")},
}
"""Parameter of OpenAI's API -> parameter of this API."""
B = TypeVar("B", bound=OllamaBody)


def read_ollama_chat(reader: Reader, body: bytes) -> Job:
    """Read a body of /api/chat. Raises WeftError, NeedsFiles and NeedsProof."""
    return _generates(reader, parse(body, OllamaChat))


def read_ollama_generate(reader: Reader, body: bytes) -> Job:
    """Read a body of /api/generate. Raises the errors of ``read_ollama_chat``."""
    return _generates(reader, parse(body, OllamaGenerate))


def read_ollama_embed(reader: Reader, body: bytes) -> Job:
    """Read a body of /api/embed. Raises WeftError."""
    return _embeds(reader, parse(body, OllamaEmbed))


def read_ollama_embedding(reader: Reader, body: bytes) -> Job:
    """Read a body of /api/embeddings. Raises WeftError."""
    return _embeds(reader, parse(body, OllamaEmbedding))


def _generates(reader: Reader, asked: OllamaChat | OllamaGenerate) -> Job:
    if asked.empty:
        raise InvalidRequest("a request without a prompt generates nothing; send a prompt", param="model")
    asked = _served(reader, asked)
    raw = isinstance(asked, OllamaGenerate) and asked.raw
    try:
        made = asked.openai()
        try:
            return (reader.completions if raw else reader.chat)(msgspec.json.encode(made), clip=True)
        except InvalidRequest as error:
            # Some clients send ``think: false`` by default. A model that cannot stop thinking thinks unseen.
            if error.param != "enable_thinking":
                raise
            unseen = {**made, "enable_thinking": None, "include_reasoning": False}
            return reader.chat(msgspec.json.encode(unseen), clip=True)
    except InvalidRequest as error:
        raise renamed(error, {**NAMES, **asked.beside()}) from None


def _embeds(reader: Reader, asked: OllamaEmbed | OllamaEmbedding) -> Job:
    try:
        return read_embeddings(reader, msgspec.json.encode(_served(reader, asked).openai()))
    except InvalidRequest as error:
        names = {"input": "prompt"} if isinstance(asked, OllamaEmbedding) else {}
        raise renamed(error, names) from None


def _served(reader: Reader, asked: B) -> B:
    """Return ``asked`` with the name of a served model."""
    return msgspec.structs.replace(asked, model=untagged(asked.model, reader.serves))
