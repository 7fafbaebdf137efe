"""What the Python API returns."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weft.common.errors import ErrorInfo
from weft.text.choice import Choice, FinishReason
from weft.text.logprobs import PositionLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    """One entry for each of ``token_ids``, when asked for."""
    finish_reason: FinishReason | None
    """None while it runs."""
    stop_reason: str | int | None
    """The stop string or stop token of the request that ended it; None for anything else."""
    error: ErrorInfo | None = None
    """What went wrong when ``finish_reason`` is "error"."""
    num_accepted_drafts: int = 0
    """Of ``token_ids``, those that a drafter had proposed."""
    num_rejected_drafts: int = 0
    """Drafts that did not become tokens."""


@dataclass(slots=True)
class RequestOutput:
    """A request: its prompt and its sequences by choice number."""

    request_id: str
    prompt: str | None
    """The prompt's text (a conversation's as the template wrote it); None for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One entry a prompt token, None for the first, when asked for."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens whose cache was found instead of computed."""


@dataclass(slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    request_id: str
    prompt: str | None
    """The prompt's text; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    embedding: np.ndarray
    """float32 [hidden size]; empty when ``error`` says what went wrong."""
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None


def completion_of(choice: Choice) -> CompletionOutput:
    """A choice as it stands. Its lists are copies."""
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        logprobs=None if choice.logprobs is None else list(choice.logprobs.read()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        error=choice.error,
        num_accepted_drafts=choice.accepted,
        num_rejected_drafts=choice.rejected,
    )
