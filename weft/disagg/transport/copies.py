"""Copies between a rank's caches and the host memory of transfers, on a CPU or a GPU.

    mark()     on the computing thread: a mark for all work launched so far
    out        caches -> a piece of host memory, after a mark; the host goes on
    into       host memory -> caches; the host goes on
    settle     the host waits for all ``into``

On a GPU the copies run on a separate stream, beside the compute stream. Spans are scattered and small. So
the device gathers the spans into one piece of device memory, and one copy moves the piece to the host.
``into`` works in reverse.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copying import copy_spans

Tensor = torch.Tensor

_POLL_S = 0.00002
_SETTLE_S = 30.0
_MOST_UNIT = 4096
"""Maximum bytes of a row in a gather."""
_SMALL_UNIT = 64
"""Smallest row, in bytes, for whose index pinned memory is allocated at the start."""
_COUNTS, _WIDTHS = (1, 64), (1, 2)
"""Rows and elements per row that are gathered at the start. torch has kernels of their own for up to 16 rows,
and for rows of one element."""
_MANY_ROWS = 1 << 31
"""Rows of a region for which torch's gather counts with 64 bits, in a kernel of its own."""


class Copies(Protocol):
    """Copies between caches and staging memory. All methods except ``mark`` are called from the rank's
    transfer thread."""

    @property
    def with_sums(self) -> bool:
        """True if ``out`` and ``into`` return ``device_memory.Sums``: digests of the spans before the seed.
        Then spans of equal length should be neighbours."""

    def pin(self, memory: Tensor) -> None:
        """Prepare ``memory``, uint8 on the host, as source or target of copies, until ``close``."""

    def mark(self) -> Any:
        """Return a mark for all device work launched so far by the calling thread; None if the work is
        done."""

    def out(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], to: Tensor, ready: Any) -> Any:
        """Start a copy of the spans of ``parts``, back to back, to the start of ``to``. The copy waits for
        the mark ``ready``. Return a handle for ``ended``."""

    def ended(self, copy: Any) -> bool:
        """Return True if the copy of an ``out`` has ended: the bytes are there, and the caches are no
        longer read."""

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> Any:
        """Start a copy of ``source``, whose bytes lie back to back, to ``spans``, int64 [n, 2], of
        ``region``. ``source`` must not change before ``settle``."""

    def settle(self) -> None:
        """Block until every ``into`` has ended. Raises EngineDead after a time-out."""

    def settled(self) -> bool:
        """Return True if no ``into`` writes the caches, also after an error or a time-out."""

    def close(self) -> None:
        """Block until no copy is under way. Raises EngineDead after a time-out."""


class HostCopies:
    """Copies between host memory; each copy is done when the call returns."""

    with_sums = False

    def pin(self, memory: Tensor) -> None:
        return

    def mark(self) -> Any:
        return None

    def out(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], to: Tensor, ready: Any) -> Any:
        done = 0
        for part in parts:
            spans = part.spans.copy()
            spans[:, 1] = done + _begins(part.spans[:, 2])
            copy_spans(regions[part.source], to, spans, np.zeros(len(spans), np.uint64))
            done += part.nbytes
        return None

    def ended(self, copy: Any) -> bool:
        return True

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> None:
        moves = np.stack([_begins(spans[:, 1]), spans[:, 0], spans[:, 1]], axis=1)
        copy_spans(source, region, moves, np.zeros(len(spans), np.uint64))

    def settle(self) -> None:
        return

    def settled(self) -> bool:
        return True

    def close(self) -> None:
        return


class CudaCopies:
    """Copies between a GPU and pinned memory, on a separate stream.

    INVARIANT: all copies share one piece of device memory. No race is possible, because all copies run in
    order on one stream.
    """

    with_sums = False

    def __init__(self, device: torch.device, most: int) -> None:
        """``most``: maximum bytes of one copy."""
        self._device, self._most = device, most
        self._stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.stream(
            self._stream
        ):  # or earlier work of the compute stream may still use the memory
            self._through = torch.empty(most, dtype=torch.uint8, device=device)
        self._pinned: list[Tensor] = []
        self._last: torch.cuda.Event | None = None
        """End of the last copy to the caches, until the host has seen the end."""
        self._warm_up()

    def pin(self, memory: Tensor) -> None:
        """See ``Copies.pin``. Raises EngineDead if the process may not lock so much memory."""
        if memory.numel():
            with torch.cuda.device(self._device):
                status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
            if int(status):
                raise EngineDead(
                    f"CUDA cannot pin {memory.numel() >> 20} MiB of host memory for transfers between groups "
                    f"(error {int(status)}): raise the limit of locked memory (ulimit -l)"
                )
            self._pinned.append(memory)

    def mark(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def out(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], to: Tensor, ready: Any) -> Any:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._after(ready)
            self._out(regions, parts, to)
            return self._recorded()

    def ended(self, copy: Any) -> bool:
        return bool(copy.query())

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> Any:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            try:
                self._into(source, region, spans)
            finally:
                self._last = self._recorded()  # after an error, too: a part of the copy may be under way

    def settle(self) -> None:
        if self._last is not None:
            self._wait(self._last)
            self._last = None

    def settled(self) -> bool:
        if self._last is not None and self.ended(self._last):
            self._last = None
        return self._last is None

    def close(self) -> None:
        self._wait(self._recorded())
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()

    def _warm_up(self) -> None:
        """Load the kernels and fill the allocator's cache of pinned memory. The first launch of a kernel,
        and a new size of pinned memory, wait for all work of the device, so do both before any transfer."""
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            sizes = [8 << power for power in range((self._most // _SMALL_UNIT).bit_length())]
            kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            del kept  # the allocator keeps the freed blocks
            for dtype, count, width in itertools.product((torch.uint8, torch.int64), _COUNTS, _WIDTHS):
                index = torch.zeros(count, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
                rows = torch.zeros((2, width), dtype=dtype, device=self._device)
                moved = torch.empty((count, width), dtype=dtype, device=self._device)
                torch.index_select(rows, 0, index, out=moved)
                torch.index_select(rows[:1].expand(_MANY_ROWS, width), 0, index, out=moved)
                rows.index_copy_(0, index, moved)

    def _out(self, regions: Sequence[Tensor], parts: Sequence[SpanPart], to: Tensor) -> Tensor:
        """Start ``out`` on the current stream. Return the gathered bytes on the device, uint8 [bytes]."""
        through, done = self._checked(sum(part.nbytes for part in parts)), 0
        for part in parts:
            # rows: [region bytes / unit, unit]; index: rows of the spans, in order
            rows, index = self._rows(regions[part.source], part.spans[:, ::2], done)
            end = done + part.nbytes
            gathered = through[done:end].view(rows.dtype).view(len(index), -1)
            torch.index_select(rows, 0, index, out=gathered)
            done = end
        to[:done].copy_(through[:done], non_blocking=True)
        return through[:done]

    def _into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> Tensor:
        """Start ``into`` on the current stream. Return the bytes on the device, uint8 [bytes]."""
        through = self._checked(source.numel())[: source.numel()]
        through.copy_(source, non_blocking=True)
        rows, index = self._rows(region, spans, 0)
        # [rows of the spans, unit]
        rows.index_copy_(0, index, through.view(rows.dtype).view(len(index), -1))
        return through

    def _after(self, ready: Any) -> None:
        """Let later work of the stream wait for a mark."""
        if ready is not None:
            self._stream.wait_event(ready)

    def _checked(self, size: int) -> Tensor:
        """Return the device memory for a copy of ``size`` bytes. Raises EngineDead for more than ``most``
        bytes."""
        if size > self._most:
            raise EngineDead(f"a copy of {size} bytes between groups; the limit is {self._most}")
        return self._through

    def _rows(self, region: Tensor, spans: np.ndarray, at: int) -> tuple[Tensor, Tensor]:
        """Return ``region`` as rows of equal size, and the row numbers of ``spans``, int64 [n, 2], on the
        device.

        ``at``: offset of the same bytes in other memory, which must be divisible into the same rows.
        """
        unit = unit_of(region.numel(), spans)
        # Words of 8 bytes, if the alignment allows: fewer elements per row.
        dtype = torch.int64 if (unit | at) % 8 == 0 else torch.uint8
        rows = region.view(dtype).view(-1, unit // dtype.itemsize)
        numbers = torch.from_numpy(rows_of(spans, unit))
        return rows, numbers.pin_memory().to(self._device, non_blocking=True)

    def _recorded(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def _wait(self, event: torch.cuda.Event) -> None:
        until = time.monotonic() + _SETTLE_S
        # A blocking wait would hold the thread without a time-out.
        while not event.query():
            if time.monotonic() > until:
                raise EngineDead("a GPU did not finish a copy between groups in time")
            time.sleep(_POLL_S)


def copies_of(device: torch.device, most: int) -> Copies:
    """Return the copies for caches on ``device``. ``most``: maximum bytes of one copy."""
    return CudaCopies(device, most) if device.type == "cuda" else HostCopies()


def unit_of(size: int, spans: np.ndarray) -> int:
    """Return the largest common divisor of ``size`` and all offsets and lengths of ``spans``, int64 [n, 2],
    limited to ``_MOST_UNIT`` or a divisor of it."""
    unit = int(np.gcd.reduce(np.append(spans.ravel(), size)))
    return unit if unit <= _MOST_UNIT else int(np.gcd(unit, _MOST_UNIT))


def rows_of(spans: np.ndarray, unit: int) -> np.ndarray:
    """Return int64: the numbers of the rows of ``unit`` bytes in ``spans``, int64 [n, 2], in order."""
    firsts, counts = spans[:, 0] // unit, spans[:, 1] // unit
    rows: np.ndarray = np.repeat(firsts - _begins(counts), counts) + np.arange(counts.sum())
    return rows


def _begins(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each length in a back-to-back layout."""
    begins: np.ndarray = np.cumsum(lengths) - lengths
    return begins
