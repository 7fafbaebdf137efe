"""Logprobs as arrays in JSON, made in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np

from weft.front.protocol.npy import npy_pieces
from weft.types.messages import LogprobColumns

PIECE = 1 << 20
"""About how many bytes of logprobs are encoded at once."""


class BinaryLogprobs(msgspec.Struct, kw_only=True):
    """Logprobs of n consecutive tokens. Each array is base64 of a file in NumPy's format .npy: read the array
    with ``numpy.load(io.BytesIO(base64.b64decode(text)))``.
    """

    token_logprobs: str
    """float [n]: of the tokens themselves."""
    ranks: str
    """int32 [n]: 1 + number of likelier tokens."""
    logprobs: str
    """float [n, alternatives]: of the likeliest tokens in order; for the whole vocabulary [n, vocabulary], in
    order of token ids."""
    token_ids: str | None
    """int32 [n, alternatives]: ids of ``logprobs``; null for the whole vocabulary."""


def binary_pieces(columns: Sequence[LogprobColumns], dtype: str) -> Iterator[bytes]:
    """Yield the JSON of ``BinaryLogprobs`` in pieces. ``dtype``: "float32" or "float16"."""
    code = {"float32": "<f4", "float16": "<f2"}[dtype]
    count = sum(one.positions for one in columns)
    every = bool(columns) and columns[0].every
    width = max((one.width for one in columns), default=1) - 1
    ids = None if every else _array((count, width), "<i4", columns, lambda one: one.arrays()[0][:, 1:])
    for name, pieces in (
        ("token_logprobs", _array((count,), code, columns, lambda one: one.arrays()[1][:, 0])),
        ("ranks", _array((count,), "<i4", columns, lambda one: one.arrays()[2])),
        ("logprobs", _array((count, width), code, columns, lambda one: one.arrays()[1][:, 1:])),
        ("token_ids", ids),
    ):
        yield (b"{" if name == "token_logprobs" else b",") + msgspec.json.encode(name) + b":"
        if pieces is None:
            yield b"null"
            continue
        yield b'"'
        yield from pieces
        yield b'"'
    yield b"}"


def _array(
    shape: tuple[int, ...],
    dtype: str,
    columns: Sequence[LogprobColumns],
    of: Callable[[LogprobColumns], np.ndarray],
) -> Iterator[bytes]:
    """Yield base64 of one array, from a part of each of ``columns``."""

    def data() -> Iterator[bytes]:
        for one in columns:
            rows = of(one)
            step = max(1, PIECE // max(1, 4 * one.width))
            for begin in range(0, len(rows), step):
                yield rows[begin : begin + step].astype(dtype).tobytes()

    return npy_pieces(shape, dtype, data())
