"""Collectives of ranks on one host, over memory that they share: microseconds where sockets take far more.

``meet`` forms it for one group and epoch. The memory has no name (a memfd, which rank 0 makes and the others
open by way of /proc): it is freed when the last rank has left it, whatever way, and no file stays behind.
The C++ part is weft/ops/cpu/csrc/collectives.cpp; without the CPU extension ranks use gloo.
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
"""Bytes that a rank shows the others at a time. There are two slots a rank; unused parts take no memory."""
SPIN = 50e-6
"""Seconds that a rank waits awake for others, where each has a core of its own."""
MOST_RANKS = 64
"""As in csrc/segment.h."""
SUMS = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that are summed in one go."""


class _Place(msgspec.Struct, frozen=True):
    """Where a rank runs, and whether it can share memory."""

    able: bool
    host: str
    """Equal for processes that see each other's ids and have the same rights."""
    pid: int
    cores: int


class SharedRing:
    """The collectives of one rank in one epoch. Raises CommLost out of each that fails, and from then on.

    Calls come one after the other, on any thread; ``abort`` from any at any time.
    """

    def __init__(
        self, fd: int, rank: int, places: Sequence[_Place], timeout: float, slot: int = SLOT
    ) -> None:
        """Maps the segment. Raises RuntimeError."""
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
        """[size, *x.shape] of every rank's x; one shape and dtype on all."""
        return self._gather(x, self._ring)

    def sum(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, in order of ranks. x: a dtype of ``SUMS``."""
        return self._sum(x, self._ring)

    def exchange(self, x: Tensor, sends: list[int], receives: list[int]) -> Tensor:
        """See ``Comm.all_to_all``."""
        return self._exchange(x, sends, receives, self._ring)

    def abort(self) -> None:
        """Every wait, here or on another rank, fails at once. The memory is freed when all ranks have left
        it.
        """
        self._abort(self._ring)


def meet(store: Any, rank: int, size: int, timeout: float, slot: int = SLOT) -> SharedRing | None:
    """Forms the ring of ``size`` ranks; all call it, and all get one, or none does, and uses gloo.

    ``store``: of this group and epoch alone. ``timeout``: seconds for this, and for each collective.
    Raises CommLost when a rank does not come.
    """
    mine = _Place(cpu.load() and size <= MOST_RANKS, _host(), os.getpid(), usable_cores())
    places = [
        msgspec.msgpack.decode(data, type=_Place)
        for data in _all_say(store, "place", rank, size, mine, timeout)
    ]
    if not all(place.able and place.host and place.host == mine.host for place in places):
        return None
    fd = -1
    ring = None
    try:
        if rank == 0:
            fd, ring = _map(
                lambda: os.memfd_create("weft-collectives", os.MFD_CLOEXEC), rank, places, timeout, slot
            )
            store.set("segment", str(fd if ring is not None else -1))
        elif (there := int(_told(store, "segment", timeout))) >= 0:
            path = f"/proc/{places[0].pid}/fd/{there}"
            fd, ring = _map(lambda: os.open(path, os.O_RDWR | os.O_CLOEXEC), rank, places, timeout, slot)
        mapped = _all_say(store, "mapped", rank, size, ring is not None, timeout)
    finally:  # nobody needs rank 0's any more
        if fd >= 0:
            os.close(fd)
    return ring if all(msgspec.msgpack.decode(data, type=bool) for data in mapped) else None


def _map(
    opened: Callable[[], int], rank: int, places: Sequence[_Place], timeout: float, slot: int
) -> tuple[int, SharedRing | None]:
    """The descriptor, -1 if there is none, and this rank's ring, if it can be mapped."""
    fd = -1
    try:
        fd = opened()
        return fd, SharedRing(fd, rank, places, timeout, slot)
    except (OSError, RuntimeError) as error:
        log.warning("no shared memory for collectives: %s", str(error).splitlines()[0])
        return fd, None


def _all_say(store: Any, what: str, rank: int, size: int, mine: Any, timeout: float) -> list[bytes]:
    """What every rank says of ``what``, in order of ranks."""
    store.set(f"{what}{rank}", msgspec.msgpack.encode(mine))
    return [_told(store, f"{what}{other}", timeout) for other in range(size)]


def _told(store: Any, key: str, timeout: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=timeout))
        return bytes(store.get(key))
    except Exception as error:
        raise CommLost(f"a rank did not come within {timeout:g} s") from error


def _host() -> str:
    """Of this boot, namespaces and user; empty where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "user", "net")]
        return "/".join([boot, *spaces, str(os.geteuid())])
    except OSError:
        return ""
