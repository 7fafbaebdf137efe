"""Logprobs in the shapes that more than one route uses."""

from __future__ import annotations

from collections.abc import Sequence

from weft.front.responses import MIN_LOGPROB, PromptLogprob, PromptLogprobs
from weft.text.logprobs import PositionLogprobs


def bounded(logprob: float) -> float:
    """``logprob``, or the number that stands for minus infinity."""
    return max(logprob, MIN_LOGPROB)


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> PromptLogprobs:
    """One entry a prompt token, candidates by token id. A prompt of one token has only the first, null."""
    return [
        None
        if position is None
        else {
            str(token): PromptLogprob(
                logprob=bounded(found.logprob), rank=found.rank, decoded_token=found.decoded_token
            )
            for token, found in position.items()
        }
        for position in positions or [None]
    ]
