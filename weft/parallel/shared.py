"""Collectives of ranks on one host over shared memory: microseconds instead of the much slower sockets.

``meet`` forms a ring for one group and epoch. The memory is a memfd without a name: rank 0 creates the memfd,
and the other ranks open it through /proc. The kernel frees the memory when the last rank has left in any way,
and no file stays behind. The C++ part is weft/ops/cpu/csrc/collectives.cpp. Without the CPU extension ranks
use gloo.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch

from weft.common.cores import usable_cores
from weft.common.log import get_logger
from weft.ops import cpu
from weft.parallel.launcher import CommLost

Tensor = torch.Tensor

log = get_logger(__name__)

SLOT = 1 << 18
"""Bytes published by a rank at a time. Each rank has two slots; unused parts take no memory."""
SPIN = 50e-6
"""Seconds of busy waiting for other ranks, if each rank has a core of its own."""
MOST_RANKS = 64
"""Maximum number of ranks; the same value as in csrc/segment.h."""
SUMS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes with a one-pass sum."""


class _Place(msgspec.Struct, frozen=True):
    """The process of a rank, and its ability to share memory."""

    able: bool
    host: str
    """Equal for processes that see each other's process ids and have the same rights; "" if unknown."""
    pid: int
    cores: int


class SharedRing:
    """The collectives of one rank in one epoch. A failed collective, and every later one, raises CommLost.

    Calls come one after the other, on any thread. ``abort`` may be called from any thread at any time.
    """

    def __init__(
        self, fd: int, rank: int, places: Sequence[_Place], timeout: float, slot: int = SLOT
    ) -> None:
        """Map the segment of descriptor ``fd``, which the caller closes. Raise RuntimeError.

        ``places``: of all ranks in order; the ranks spin if there are enough cores for all. ``timeout``:
        seconds for each wait. ``slot``: bytes that a rank publishes at a time. The mapping ends with the
        object.
        """
        pids = [place.pid for place in places]
        spin = SPIN if min(place.cores for place in places) >= len(places) else 0.0
        ops = torch.ops.weft_cpu
        self._ring: int = ops.ring_open.default(fd, rank, pids, slot, timeout, spin)
        weakref.finalize(self, ops.ring_close.default, self._ring)
        self._abort = ops.ring_abort.default
        self._gather = ops.ring_gather.default
        self._sum = ops.ring_sum.default
        self._exchange = ops.ring_exchange.default

    def gather(self, x: Tensor) -> Tensor:
        """Return [size, *x.shape], the x of every rank. All ranks pass one shape and dtype."""
        return self._gather(x, self._ring)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, in order of ranks. The dtype of x must be in ``SUMS``."""
        return self._sum(x, self._ring)

    def exchange(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """Exchange rows; see ``Comm.all_to_all``."""
        return self._exchange(x, sends, receives, self._ring)

    def abort(self) -> None:
        """Make every wait fail at once, on all ranks. The memory is freed when all ranks have left."""
        self._abort(self._ring)


def meet(store: Any, rank: int, size: int, timeout: float, slot: int = SLOT) -> SharedRing | None:
    """Form the ring of ``size`` ranks. All ranks must call; either all get a ring, or all get None (use
    gloo).

    ``store`` belongs to this group and epoch alone. ``timeout`` bounds the meeting and each collective, in
    seconds. Raise CommLost if a rank does not come.
    """
    mine = _Place(cpu.load() and size <= MOST_RANKS, host_id(), os.getpid(), usable_cores())
    places = [
        msgspec.msgpack.decode(data, type=_Place)
        for data in all_publish(store, "place", rank, size, mine, timeout)
    ]
    if not all(place.able and place.host and place.host == mine.host for place in places):
        return None
    fd = -1
    ring = None
    try:
        # Rank 0 creates the memory. A negative descriptor announces a failure to the other ranks.
        if rank == 0:
            fd, ring = _map(
                lambda: os.memfd_create("weft-collectives", os.MFD_CLOEXEC), rank, places, timeout, slot
            )
            store.set("segment", str(fd if ring is not None else -1))
        elif (segment := int(_wait_for(store, "segment", timeout))) >= 0:
            path = f"/proc/{places[0].pid}/fd/{segment}"
            fd, ring = _map(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC), rank, places, timeout, slot)
        # One failure to map makes all ranks use gloo.
        mapped = all_agree(store, "mapped", rank, size, ring is not None, timeout)
    finally:  # all ranks have mapped the segment, or given up
        if fd >= 0:
            os.close(fd)
    return ring if mapped else None


def _map(
    opened: Callable[[], int], rank: int, places: Sequence[_Place], timeout: float, slot: int
) -> tuple[int, SharedRing | None]:
    """Open and map the segment.

    Return (descriptor, ring); -1 and None for the part that failed, which is logged. The caller closes the
    descriptor.
    """
    fd = -1
    try:
        fd = opened()
        return fd, SharedRing(fd, rank, places, timeout, slot)
    except (OSError, RuntimeError) as error:
        log.warning("shared memory for collectives is not available: %s", str(error).splitlines()[0])
        return fd, None


def all_publish(store: Any, what: str, rank: int, size: int, mine: Any, timeout: float) -> list[bytes]:
    """Publish ``mine`` under the name ``what``, and return the encoded values of all ranks, in order."""
    store.set(f"{what}{rank}", msgspec.msgpack.encode(mine))
    return [_wait_for(store, f"{what}{other}", timeout) for other in range(size)]


def all_agree(store: Any, what: str, rank: int, size: int, good: bool, timeout: float) -> bool:
    """Publish ``good`` under the name ``what``. Return True if ``good`` is True on all ranks."""
    votes = all_publish(store, what, rank, size, good, timeout)
    return all(msgspec.msgpack.decode(data, type=bool) for data in votes)


def _wait_for(store: Any, key: str, timeout: float) -> bytes:
    """Block until ``key`` is in the store and return the value. Raise CommLost after ``timeout`` seconds."""
    try:
        store.wait([key], timedelta(seconds=timeout))
        return bytes(store.get(key))
    except Exception as error:
        raise CommLost(f"a rank did not connect within {timeout:g} s") from error


def host_id() -> str:
    """Return an id of this boot, its namespaces and the user; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "net")]
        return "/".join([boot, *spaces, str(os.geteuid())])
    except OSError:
        return ""
