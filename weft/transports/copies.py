"""Copies between a rank's caches and host memory that peers read or that came from them: on a CPU, on a GPU.

    mark()     on the thread that computes: behind all that it has launched
    out        caches -> a piece of host memory, behind a mark; the host goes on
    into       host memory -> caches; the host goes on
    settle     the host waits for all ``into``

On a GPU they run on a stream of their own, beside the one that computes. Spans lie scattered and are small,
so the device gathers them into one piece of its memory, which one copy then moves, and the other way round.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.transfer.spans import Part
from weft.transports.copying import copy_spans

Tensor = torch.Tensor

_POLL_S = 0.00002
_SETTLE_S = 30.0
_MOST_UNIT = 4096
"""Bytes of a row that a gather moves, at most."""
_SMALL_UNIT = 64
"""Bytes of the smallest rows for whose numbers pinned memory is there from the start."""


class Copies(Protocol):
    """Copies between caches and staging memory. Used from the thread of a rank's transfers, but for
    ``mark``.
    """

    def pin(self, memory: Tensor) -> None:
        """``memory``, uint8 on the host, is what is copied to or from, until ``close``."""

    def mark(self) -> Any:
        """What was launched before this call, from the thread that calls. None: it has been done."""

    def out(self, regions: Sequence[Tensor], parts: Sequence[Part], to: Tensor, ready: Any) -> Any:
        """Copies the spans of ``parts``, one behind the other, to the begin of ``to``, behind the mark
        ``ready``. What ``ended`` is asked with."""

    def ended(self, copy: Any) -> bool:
        """Whether the bytes of an ``out`` are there, and nothing reads the caches for it any more."""

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> None:
        """Copies ``source``, whose bytes lie one behind the other, to ``spans``, int64 [n, 2], of ``region``.
        ``source`` may change behind ``settle``."""

    def settle(self) -> None:
        """Waits until every ``into`` has ended. Raises EngineDead when that takes too long."""

    def close(self) -> None:
        """Waits until nothing is under way any more. Raises EngineDead when that takes too long."""


class HostCopies:
    """Between memory of the host: done when the call returns."""

    def pin(self, memory: Tensor) -> None:
        return

    def mark(self) -> Any:
        return None

    def out(self, regions: Sequence[Tensor], parts: Sequence[Part], to: Tensor, ready: Any) -> Any:
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

    def close(self) -> None:
        return


class CudaCopies:
    """Between a GPU and pinned memory, on one stream of its own.

    INVARIANT: the copies of each direction share one piece of device memory, which is free of races because
    they all run on one stream, in order.
    """

    def __init__(self, device: torch.device, most: int) -> None:
        """``most``: bytes of one copy."""
        self._device, self._most = device, most
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._through = torch.empty(most, dtype=torch.uint8, device=device)
        self._pinned: list[Tensor] = []
        self._last: torch.cuda.Event | None = None
        self._warm_up()

    def pin(self, memory: Tensor) -> None:
        """Raises EngineDead where the system does not let this process lock so much."""
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

    def out(self, regions: Sequence[Tensor], parts: Sequence[Part], to: Tensor, ready: Any) -> Any:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            through, done = self._checked(sum(part.nbytes for part in parts)), 0
            for part in parts:
                rows, index = self._rows(regions[part.source], part.spans[:, ::2], done)
                end = done + part.nbytes
                gathered = through[done:end].view(rows.dtype).view(len(index), -1)
                torch.index_select(rows, 0, index, out=gathered)
                done = end
            to[:done].copy_(through[:done], non_blocking=True)
            return self._recorded()

    def ended(self, copy: Any) -> bool:
        return bool(copy.query())

    def into(self, source: Tensor, region: Tensor, spans: np.ndarray) -> None:
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            through = self._checked(source.numel())
            through[: source.numel()].copy_(source, non_blocking=True)
            rows, index = self._rows(region, spans, 0)
            moved = through[: source.numel()].view(rows.dtype).view(len(index), -1)
            rows.index_copy_(0, index, moved)
            self._last = self._recorded()

    def settle(self) -> None:
        if self._last is not None:
            self._wait(self._last)
            self._last = None

    def close(self) -> None:
        self._wait(self._recorded())
        for memory in self._pinned:
            torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
        self._pinned.clear()

    def _warm_up(self) -> None:
        """The first call of a kernel loads it, and pinned memory of a new size is allocated: either waits
        for all that the device does, so it is done before there is anything.
        """
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            sizes = [8 << power for power in range((self._most // _SMALL_UNIT).bit_length())]
            kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
            del kept  # the allocator keeps them
            index = torch.zeros(1, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)
            for dtype in (torch.uint8, torch.int64):
                rows = torch.zeros((1, 1), dtype=dtype, device=self._device)
                torch.index_select(rows, 0, index, out=torch.empty_like(rows))
                rows.index_copy_(0, index, torch.zeros_like(rows))

    def _checked(self, size: int) -> Tensor:
        """The device's memory for a copy of ``size`` bytes."""
        if size > self._most:
            raise EngineDead(f"a copy of {size} bytes between groups; at most {self._most} were said")
        return self._through

    def _rows(self, region: Tensor, spans: np.ndarray, at: int) -> tuple[Tensor, Tensor]:
        """``region`` as rows of one size, and which of them ``spans``, int64 [n, 2], are, on the device.

        ``at``: where in other memory the same bytes begin, which is to be seen as rows, too.
        """
        unit = unit_of(region.numel(), spans)
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
        while not event.query():
            if time.monotonic() > until:
                raise EngineDead("a GPU did not end a copy between groups in time")
            time.sleep(_POLL_S)


def copies_of(device: torch.device, most: int) -> Copies:
    """For caches on ``device``. ``most``: bytes of one copy."""
    return CudaCopies(device, most) if device.type == "cuda" else HostCopies()


def unit_of(size: int, spans: np.ndarray) -> int:
    """Bytes of which ``size``, and all offsets and lengths of ``spans``, int64 [n, 2], are multiples: as many
    as there are, up to a bound."""
    unit = int(np.gcd.reduce(np.append(spans.ravel(), size)))
    return unit if unit <= _MOST_UNIT else int(np.gcd(unit, _MOST_UNIT))


def rows_of(spans: np.ndarray, unit: int) -> np.ndarray:
    """int64: the numbers of the rows of ``unit`` bytes that ``spans``, int64 [n, 2], are, in their order."""
    firsts, counts = spans[:, 0] // unit, spans[:, 1] // unit
    rows: np.ndarray = np.repeat(firsts - _begins(counts), counts) + np.arange(counts.sum())
    return rows


def _begins(lengths: np.ndarray) -> np.ndarray:
    """Where each begins, one behind the other."""
    begins: np.ndarray = np.cumsum(lengths) - lengths
    return begins
