"""Digests on a GPU, and caches on a GPU that peers read directly, without a byte in host memory.

    sender     mark of a layer ─► sums of the spans on the device ─► host: 8 bytes per span ─► write
    receiver   landing memory on the GPU ─► gathered ─► sums, and scattered into the blocks ─► the host
               compares ─► answer

A sum is a digest before the seed (``weft.disagg.protocol.digests``). The sum and the copy read the same
gathered bytes. Only a transport whose engine reads device memory can use ``DeviceMemory``. Staged caches of a
GPU use ``DeviceWork`` as ``Copies``: the device adds, and the host only moves bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from weft.common.errors import TransportFailed
from weft.common.log import get_logger
from weft.common.splitmix import mix_array
from weft.disagg.protocol import digests
from weft.disagg.protocol.pushes import Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copies import CudaCopies
from weft.disagg.transport.shared_memory import SharedMemory
from weft.types.transfer import TransferKey

Tensor = torch.Tensor

log = get_logger(__name__)

_NOT_READ = TransportFailed("a rank could not compute the digests of a transfer").info()
_SOONEST_S, _LATEST_S = 0.0005, 0.004
"""Minimum and maximum seconds between checks of digests under way."""
_LOW = 0xFFFFFFFF
_WARM_UP = (7, 16 * digests.WORDS)
"""Bytes of rows that are summed at the start: a row of odd size, and a row with two levels of sums."""


class Sums(NamedTuple):
    """Sums of spans under way."""

    host: Tensor
    """int64 [n], valid after ``event``."""
    event: Any
    places: np.ndarray
    """int64 [n]: number of the span of each sum."""

    def values(self) -> np.ndarray:
        """Return uint64 [n], in the order of the spans. Call after the end of the event."""
        made = np.empty(len(self.places), np.uint64)
        made[self.places] = self.host.numpy().view(np.uint64)
        return made


class DeviceWork(CudaCopies):
    """Sums and copies of spans on a GPU, on a separate stream. ``CudaCopies`` has the stream, the marks and
    the memory for gathered bytes."""

    with_sums = True

    def __init__(self, device: torch.device, most: int) -> None:
        """``most``: maximum bytes of one write."""
        super().__init__(device, most)
        keys = np.stack([digests.KEYS_LOW, digests.KEYS_HIGH]).view(np.int64)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            # [2, 128]: the low and the high half of each key
            self._keys = torch.from_numpy(keys).pin_memory().to(device, non_blocking=True)
            # Load the kernels of the sums, for rows of words and for other rows: see ``CudaCopies._warm_up``.
            rows = [torch.zeros((2, size), dtype=torch.uint8, device=device) for size in _WARM_UP]
            torch.cat([span_sums(each, self._keys) for each in rows])
        self._wait(self._recorded())

    def sums(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], ready: Any) -> Sums:
        """Start the sums of the spans of ``parts`` after the mark ``ready``. The host goes on."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._after(ready)
            made, places, done = list[Tensor](), list[np.ndarray](), 0
            for part in parts:
                order, lengths = by_length(part.spans[:, 2])
                gathered = self._gathered(regions[part.source], part.spans[order][:, ::2])
                made += self._sums(gathered, lengths)
                places.append(done + order)
                done += len(order)
            return self._read_back(made, places)

    def out(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], to: Tensor, ready: Any) -> Sums:
        """See ``Copies.out``. The sums are in the order of the spans."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._after(ready)
            gathered = self._out(regions, parts, to)
            return self._added(gathered, np.concatenate([part.spans[:, 2] for part in parts]))

    def ended(self, copy: Any) -> bool:
        return super().ended(copy.event if isinstance(copy, Sums) else copy)

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> Sums:
        """See ``Copies.into``. The sums, in the order of the spans, are valid after ``settle``."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                return self._added(self._into(source, region, spans), spans[:, 1])
            finally:
                # After an error of the sums, too: the copy to the caches may be under way.
                self._last = self._recorded()

    def take(self, source: Tensor, region: Tensor, spans: np.ndarray) -> np.ndarray:
        """Copy ``spans``, int64 [n, 3], from landing memory to ``region``. Return the sums of the copied
        bytes, uint64 [n]. Blocks until the bytes are there. Raises EngineDead after a time-out."""
        order, lengths = by_length(spans[:, 2])
        spans = spans[order]
        try:
            with torch.inference_mode(), torch.cuda.stream(self._stream):
                gathered = self._gathered(source, spans[:, ::2])
                made = self._sums(gathered, lengths)
                rows, index = self._rows(region, spans[:, 1:], 0)
                rows.index_copy_(0, index, gathered.view(rows.dtype).view(len(index), -1))
                sums = self._read_back(made, [order])
            self._wait(sums.event)
        except BaseException:
            # The copy to the caches may be under way: ``settled`` reports its end.
            self._last = self._recorded()
            raise
        return sums.values()

    def _gathered(self, region: Tensor, spans: np.ndarray) -> Tensor:
        """Return the bytes of ``spans``, int64 [n, 2], back to back: uint8 [bytes] of the common memory."""
        size = int(spans[:, 1].sum())
        through = self._checked(size)[:size]
        rows, index = self._rows(region, spans, 0)
        torch.index_select(rows, 0, index, out=through.view(rows.dtype).view(len(index), -1))
        return through

    def _added(self, gathered: Tensor, lengths: np.ndarray) -> Sums:
        """Start the sums of spans of ``lengths``, int64 [n], that lie back to back."""
        ends = np.flatnonzero(np.diff(lengths, append=-1))
        runs = zip(lengths[ends].tolist(), np.diff(ends, prepend=-1).tolist(), strict=True)
        return self._read_back(self._sums(gathered, runs), [np.arange(len(lengths))])

    def _sums(self, gathered: Tensor, lengths: Iterable[tuple[int, int]]) -> list[Tensor]:
        """Return the sums of spans that lie back to back. ``lengths``: (bytes, count) of equal spans."""
        made, at = list[Tensor](), 0
        for length, count in lengths:
            end = at + length * count
            made.append(span_sums(gathered[at:end].view(count, length), self._keys))
            at = end
        return made

    def _read_back(self, made: Sequence[Tensor], places: Sequence[np.ndarray]) -> Sums:
        sums = torch.cat(list(made))
        host = torch.empty(len(sums), dtype=torch.int64, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        return Sums(host, self._recorded(), np.concatenate(places))


def by_length(lengths: np.ndarray) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return the numbers of the spans in order of length, and (length, count) of each length."""
    order = np.argsort(lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    return order, list(zip(values.tolist(), counts.tolist(), strict=True))


def span_sums(spans: Tensor, keys: Tensor) -> Tensor:
    """Return int64 [n], the digest of each row before the seed.

    spans: uint8 [n, bytes], at least one byte. keys: int64 [2, 128], the halves of each key.
    """
    count, nbytes = spans.shape
    # int64 views need an aligned start: copy rows of odd size, or with an odd start.
    if nbytes % 8 or spans.storage_offset() % 8:
        whole = torch.zeros((count, -(-nbytes // 8) * 8), dtype=torch.uint8, device=spans.device)
        whole[:, :nbytes].copy_(spans)
        spans = whole
    words = spans.view(torch.int64)  # [n, words]
    while True:
        words = _level(words, keys)
        if words.shape[1] == 1:
            return words[:, 0]


def _level(words: Tensor, keys: Tensor) -> Tensor:
    """Return int64 [n, blocks]: one sum for each block of 128 words. int64 wraps as uint64 does."""
    count, size = words.shape
    blocks = -(-size // digests.WORDS)
    words = torch.nn.functional.pad(words, (0, blocks * digests.WORDS - size))
    parts = words.view(count, blocks, digests.WORDS)
    low = (parts + keys[0]) & _LOW
    high = ((parts >> 32) + keys[1]) & _LOW
    terms = low * high + parts
    # A word of padding has a term, too, since its key is not 0.
    terms.view(count, -1)[:, size:].zero_()
    return terms.sum(dim=2)


def seeded(sums: np.ndarray, parts: Sequence[SpanPart], seed: int) -> np.ndarray:
    """Return the digests of the spans of ``parts``, uint64 [n]. ``seed``: see ``digests.ranks_seed``."""
    seeds = [digests.span_seeds(seed, part.target, part.spans[:, 1], part.spans[:, 2]) for part in parts]
    return mix_array(sums ^ np.concatenate(seeds))


class _Reading(NamedTuple):
    write: Write
    sums: Sums
    since: float


class DeviceMemory:
    """``staging_memory.Memory`` over caches on a GPU. Writes from ``ready`` have sums as digests: see
    ``seeded``."""

    staged = True
    shared: Sequence[SharedMemory] = ()

    def __init__(self, regions: Sequence[Tensor], work: DeviceWork) -> None:
        """``regions``: uint8 [bytes] each, on the device of ``work``, which ``close`` closes."""
        self.regions: Sequence[Tensor] = regions
        self.shown: Sequence[Tensor] = regions
        self._work = work
        self._reading: list[_Reading] = []
        self._dropped: set[TransferKey] = set()
        self._failed: list[Written] = []

    def put(self, write: Write) -> Write | None:
        """Start the sums of a write. An error is logged and reported by ``failed``."""
        try:
            sums = self._work.sums(self.regions, write.parts, write.ready)
        except Exception:  # a fault of one write ends only its transfer
            log.exception("the digests of transfer %d/%d could not be computed", *write.key[:2])
            self._failed.append(Written(write.key, write.peer, write.number, _NOT_READ))
        else:
            self._reading.append(_Reading(write, sums, time.monotonic()))
        return None

    def ready(self) -> list[Write]:
        made, under_way = list[Write](), list[_Reading]()
        for one in self._reading:
            if not self._work.ended(one.sums.event):
                under_way.append(one)
            elif one.write.key not in self._dropped:
                made.append(msgspec.structs.replace(one.write, digests=one.sums.values(), ready=None))
        self._reading = under_way
        self._dropped &= {one.write.key for one in under_way}
        return made

    def failed(self) -> list[Written]:
        failed, self._failed = self._failed, []
        return failed

    def patience(self) -> float | None:
        if not self._reading:
            return 0.0 if self._failed else None
        age = time.monotonic() - self._reading[0].since
        return min(max(age / 4, _SOONEST_S), _LATEST_S)

    def ended(self, peer: str, key: TransferKey, number: int) -> None:
        return

    def lost(self, peer: str) -> None:
        return

    def cancel(self, key: TransferKey) -> None:
        """Drop the writes of a transfer. Sums under way read the caches until ``quiet``."""
        if not self.quiet(key):
            self._dropped.add(key)

    def quiet(self, key: TransferKey) -> bool:
        # A take that failed may write the blocks of any transfer.
        return self._work.settled() and all(one.write.key != key for one in self._reading)

    def mark(self) -> Any:
        return self._work.mark()

    def take(self, source: Tensor, region: int, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
        return mix_array(self._work.take(source, self.regions[region], spans) ^ seeds)

    def settle(self) -> None:
        return  # `take` has waited

    def close(self) -> None:
        self._work.close()
        self._reading.clear()
