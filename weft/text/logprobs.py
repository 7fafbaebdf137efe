"""Logprobs as people read them: for each position, token ids to logprob, rank and text."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from weft.text.tokenizer import Tokenizer
from weft.types.messages import LogprobColumns


class Logprob(msgspec.Struct, frozen=True):
    """One token at one position."""

    logprob: float
    rank: int
    """1 for the likeliest."""
    decoded_token: str


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""The position's own token first, then the likeliest ones in order."""


def read_columns(columns: LogprobColumns, tokenizer: Tokenizer) -> list[PositionLogprobs]:
    """A message's columns, one entry a position."""
    ids, values, ranks = columns.arrays()
    made: list[PositionLogprobs] = []
    for row, scores, rank in zip(ids.tolist(), values.tolist(), ranks.tolist(), strict=True):
        entry = {row[0]: Logprob(scores[0], rank, tokenizer.token_text(row[0]))}
        for place, (token, score) in enumerate(zip(row[1:], scores[1:], strict=True), 1):
            if token >= 0 and token not in entry:
                entry[token] = Logprob(score, place, tokenizer.token_text(token))
        made.append(entry)
    return made
