"""Logprobs in readable form: for each position, token id to logprob, rank and text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TypeAlias, overload

import msgspec
import numpy as np

from weft.text.tokenizer import Tokenizer
from weft.types.messages import LogprobColumns


class Logprob(msgspec.Struct, frozen=True):
    """One token at one position."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    decoded_token: str


PositionLogprobs: TypeAlias = dict[int, Logprob]
"""The position's own token first, then the most likely tokens in order."""


class Logprobs(Sequence[PositionLogprobs]):
    """Logprobs of consecutive positions, stored as arrays and converted on access.

    A position with 20 alternatives takes 170 bytes as arrays and several kilobytes after conversion.
    Iteration converts each position and caches nothing.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._columns: list[LogprobColumns] = []
        self._length = 0
        self._read: list[PositionLogprobs] = []

    def add(self, columns: LogprobColumns) -> None:
        """Append the positions of ``columns``."""
        if columns.positions:
            self._columns.append(columns)
            self._length += columns.positions

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(columns.nbytes for columns in self._columns)

    @property
    def candidates(self) -> int:
        """Number of tokens at all positions together."""
        return sum(columns.positions * columns.width for columns in self._columns)

    @property
    def every(self) -> bool:
        """True for logprobs of the whole vocabulary, which are not converted: see ``rows``."""
        return bool(self._columns) and self._columns[0].every

    @property
    def columns(self) -> Sequence[LogprobColumns]:
        """The logprobs as arrays, in order."""
        return self._columns

    def rows(self) -> np.ndarray:
        """Return the logprobs of the whole vocabulary, float32 [positions, vocabulary]."""
        return np.concatenate([columns.arrays()[1][:, 1:] for columns in self._columns])

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PositionLogprobs]:
        for columns in self._columns:
            yield from _positions(columns, self._tokenizer)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, index: slice) -> list[PositionLogprobs]: ...

    def __getitem__(self, index: int | slice) -> PositionLogprobs | list[PositionLogprobs]:
        return self.read()[index]

    def read(self) -> list[PositionLogprobs]:
        """Return all positions, converted and cached. ``add`` extends the list; the caller must not change
        the list.
        """
        if len(self._read) < self._length:
            self._read.extend(itertools.islice(self, len(self._read), None))
        return self._read


def _positions(columns: LogprobColumns, tokenizer: Tokenizer) -> Iterator[PositionLogprobs]:
    """Yield one dict per position: token id to ``Logprob``, with the position's own token first.

    Negative ids are padding and are left out.
    """
    # ids, values: [positions, width]; ranks: [positions]. Column 0 is the position's own token.
    ids, values, ranks = columns.arrays()
    for row, scores, rank in zip(ids, values, ranks.tolist(), strict=True):
        tokens = row.tolist()
        logprobs = scores.tolist()
        entry = {tokens[0]: Logprob(logprobs[0], rank, tokenizer.token_text(tokens[0]))}
        for place, (token, score) in enumerate(zip(tokens[1:], logprobs[1:], strict=True), 1):
            if token >= 0 and token not in entry:
                entry[token] = Logprob(score, place, tokenizer.token_text(token))
        yield entry
