"""Answers of Ollama's API. UNSET fields are left out."""

from __future__ import annotations

import datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class OllamaFunction(msgspec.Struct, kw_only=True):
    index: int
    name: str
    arguments: Any
    """An object."""


class OllamaCall(msgspec.Struct, kw_only=True):
    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class _Answer(msgspec.Struct, kw_only=True):
    """Fields of a whole answer, and of a line of a stream. Times are in nanoseconds. Counts and times are in
    the last line only."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: Any | UnsetType = UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    message: OllamaMessage


class OllamaGenerateAnswer(_Answer, kw_only=True):
    response: str = ""
    thinking: str | UnsetType = UNSET


class OllamaEmbedAnswer(msgspec.Struct, kw_only=True):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingAnswer(msgspec.Struct, kw_only=True):
    embedding: list[float]


class OllamaError(msgspec.Struct, kw_only=True):
    """Body of an error answer, and last line of a failed stream."""

    error: str


class OllamaDetails(msgspec.Struct, kw_only=True):
    parent_model: str = ""
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(msgspec.Struct, kw_only=True):
    """A model of /api/tags."""

    name: str
    model: str
    modified_at: str
    size: int
    """Bytes of the weights on disk."""
    digest: str
    details: OllamaDetails


class OllamaTags(msgspec.Struct, kw_only=True):
    models: list[OllamaModel]


class OllamaRunning(msgspec.Struct, kw_only=True):
    """A loaded model of /api/ps."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(msgspec.Struct, kw_only=True):
    models: list[OllamaRunning]


class OllamaShown(msgspec.Struct, kw_only=True):
    """Answer of /api/show."""

    modelfile: str = ""
    parameters: str = ""
    template: str = ""
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, kw_only=True):
    version: str


def at_time(seconds: float) -> str:
    """Return a time since the epoch in the form of RFC 3339, in UTC."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
