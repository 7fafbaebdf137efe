"""Copies and digests of spans: in C++ if the extension is built, else in numpy. Both release Python's lock.

(numpy releases the lock in copies of more than a few hundred elements, and takes the lock again between two
spans.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from weft.disagg.protocol import digests
from weft.disagg.protocol.spans import SpanPart
from weft.ops import cpu

Tensor = torch.Tensor


def digest_spans(memory: Tensor, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return uint64 [n], see ``digests.digest_spans``. memory: uint8 [bytes], on the CPU; seeds: uint64
    [n].

    Raises IndexError for a span outside the memory.
    """
    if cpu.load():
        with _index_errors():
            result = torch.ops.weft_cpu.digest_spans.default(memory, _int64(spans), _int64(seeds))
        return result.numpy().view(np.uint64)
    _check(memory, spans[:, 0], spans[:, 1])
    return digests.digest_spans(memory.numpy(), spans, seeds)


def digest_parts(regions: Sequence[Tensor], parts: Sequence[SpanPart], seed: int) -> np.ndarray:
    """Return uint64, one per span: digests of ``parts``, read from ``regions``. ``seed``: see
    ``digests.ranks_seed``."""
    result = [np.empty(0, np.uint64)]
    for part in parts:
        seeds = digests.span_seeds(seed, part.target, part.spans[:, 1], part.spans[:, 2])
        result.append(digest_spans(regions[part.source], part.spans[:, ::2], seeds))
    return np.concatenate(result)


def copy_spans(source: Tensor, target: Tensor, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Copy spans and return the digests of the copied bytes, uint64 [n].

    source, target: uint8 [bytes], on the CPU. spans: int64 [n, 3], source offset, target offset and length.
    Raises IndexError for a span outside its memory, before any write.
    """
    if cpu.load():
        with _index_errors():
            result = torch.ops.weft_cpu.copy_spans.default(source, target, _int64(spans), _int64(seeds))
        return result.numpy().view(np.uint64)
    _check(source, spans[:, 0], spans[:, 2])
    _check(target, spans[:, 1], spans[:, 2])
    reads, writes = source.numpy(), target.numpy()
    for begin, to, size in spans.tolist():
        writes[to : to + size] = reads[begin : begin + size]
    return digests.digest_spans(writes, np.ascontiguousarray(spans[:, 1:]), seeds)


def gather_spans(source: Tensor, target: Tensor, spans: np.ndarray) -> None:
    """Copy spans without digests. Arguments and errors are those of ``copy_spans``.

    Spans that are neighbours in both memories are one copy.
    """
    _check(source, spans[:, 0], spans[:, 2])
    _check(target, spans[:, 1], spans[:, 2])
    if not len(spans):
        return
    ends = spans[:-1, :2] + spans[:-1, 2:]
    firsts = np.flatnonzero(np.append(True, (spans[1:, :2] != ends).any(axis=1)))
    runs = np.column_stack([spans[firsts, :2], np.add.reduceat(spans[:, 2], firsts)])
    for begin, to, size in runs.tolist():
        target[to : to + size].copy_(source[begin : begin + size])


@contextmanager
def _index_errors() -> Iterator[None]:
    """Convert errors of the C++ operations about a span outside its memory to IndexError."""
    try:
        yield
    except RuntimeError as error:
        if "a span leaves" in str(error):
            raise IndexError(str(error).splitlines()[0]) from error
        raise


def _int64(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array).view(np.int64))


def _check(memory: Tensor, offsets: np.ndarray, lengths: np.ndarray) -> None:
    size = memory.numel()
    if len(offsets) and (
        offsets.min() < 0 or lengths.min() < 0 or lengths.max() > size or (offsets > size - lengths).any()
    ):
        raise IndexError(f"a span leaves its memory of {size} bytes")
