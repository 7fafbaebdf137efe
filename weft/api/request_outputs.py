"""Outputs of the Python API."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from weft.common.errors import ErrorInfo
from weft.text.choice import Choice, FinishReason
from weft.text.logprobs import PositionLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """Output of one sequence of a request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    """One entry per element of ``token_ids``; None if not requested, and for ``logprobs=-1``."""
    finish_reason: FinishReason | None
    """None while the sequence runs."""
    stop_reason: str | int | None
    """The request's stop string or stop token at the end of the sequence; None for any other end."""
    error: ErrorInfo | None = None
    """The error if ``finish_reason`` is "error"."""
    num_accepted_drafts: int = 0
    """Number of ``token_ids`` from accepted drafts."""
    num_rejected_drafts: int = 0
    """Number of rejected drafts."""
    routed_experts: np.ndarray | None = None
    """Experts of each token in each routed layer, in order of their weights: uint8 (uint16 with more than 256
    experts) [tokens, layers, experts per token]. The tokens are prompt and output from
    ``routed_experts_prompt_start`` on, without the last token, which the model did not compute. None if not
    requested."""
    all_logprobs: np.ndarray | None = None
    """For ``logprobs=-1``: float32 [tokens, vocabulary]."""


@dataclass(slots=True)
class RequestOutput:
    """Output of a request: the prompt, and the sequences by choice number."""

    request_id: str
    prompt: str | None
    """Text of the prompt, after the chat template for a conversation; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    """One entry per prompt token, None for the first token; None if not requested."""
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    all_prompt_logprobs: np.ndarray | None = None
    """For ``prompt_logprobs=-1``: float32 [prompt tokens - 1, vocabulary], from the second token on."""


@dataclass(slots=True)
class EmbeddingOutput:
    """Embedding of one prompt."""

    request_id: str
    prompt: str | None
    """Text of the prompt; None for a prompt of token ids."""
    prompt_token_ids: list[int]
    embedding: np.ndarray
    """float32 [hidden size]; empty if ``error`` is set."""
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None


@dataclass(slots=True)
class ClassOutput:
    """Classes of one prompt."""

    request_id: str
    prompt_token_ids: list[int]
    probs: np.ndarray
    """float64 [labels], in the order of ``ModelSpec.classify``; empty if ``error`` is set."""
    label: str
    """Name of the label with the largest value in ``probs``."""
    num_cached_tokens: int = 0
    error: ErrorInfo | None = None


@dataclass(slots=True)
class ScoreOutput:
    """Score of one pair of texts."""

    score: float
    """NaN if ``error`` is set."""
    error: ErrorInfo | None = None


def completion_of(choice: Choice, routed: np.ndarray | None = None) -> CompletionOutput:
    """Return the present state of a choice, with copied lists. ``routed``: value of ``routed_experts``."""
    found = choice.logprobs
    every = found is not None and found.every
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        logprobs=None if found is None or every else list(found.read()),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        error=choice.error,
        num_accepted_drafts=choice.accepted,
        num_rejected_drafts=choice.rejected,
        routed_experts=routed,
        all_logprobs=found.rows() if found is not None and every else None,
    )
