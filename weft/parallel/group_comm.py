"""Communicators of several ranks.

    CPU tensors     over shared memory, if all ranks are on one host and have the CPU extension; else gloo
    CUDA tensors    over NCCL, if each rank has a GPU of its own; else through host memory, as CPU tensors.
                    Small ones by reading the memory of the other GPUs (``weft.parallel.peers``), if possible

A ``GroupComm`` lives as long as the model that uses it. The process group behind it is formed for an epoch,
aborted when the epoch fails, and formed anew. No global state of ``torch.distributed`` is used, so ranks may
be threads of one process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from weft.common.log import get_logger
from weft.parallel import nccl, peers, shared
from weft.parallel.comm import Comm, Pending
from weft.parallel.host_stage import HostStage
from weft.parallel.launcher import CommLost, Launcher

__all__ = ["ONE_SHOT", "CommLost", "GroupComm", "Launcher"]

Tensor = torch.Tensor
R = TypeVar("R")

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
ONE_SHOT = 1 << 16
"""Maximum bytes moved by the one-collective form of a sum (all ranks send all data to all ranks). Larger sums
take two collectives."""
LOOK_S = 0.02
"""Maximum seconds between two checks for the arrival of all ranks."""


class GroupComm(Comm):
    """The collectives of ``ranks`` (numbers in the expert-parallel group, increasing) for the rank
    ``mine``."""

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        mine: int,
        launcher: Launcher,
        host: str | None = None,
        share: bool = True,
        gpu: torch.device | None = None,
        ordered: bool = True,
        reads: bool = True,
    ) -> None:
        """Create an unconnected communicator.

        ``host`` is the address to listen at; None is reachable from this host only. ``share`` allows shared
        memory and must be equal on all ranks. ``gpu`` is this rank's own GPU, for NCCL. With ``ordered``,
        NCCL sums are also taken in the order of ranks; else NCCL chooses the order. ``reads``: small CUDA
        tensors go by ``weft.parallel.peers`` where possible. Must be equal on all ranks.
        """
        self.name = name
        self._host = host
        self._share = share
        self._gpu = gpu
        self._ordered = ordered
        self._reads = reads and host is None and gpu is not None
        self._windows: peers.Windows | None = None
        self._peers: peers.PeerGroup | None = None
        self._nccl: nccl.NcclGroup | None = None
        self._stage = HostStage(0.0)
        self.rank = list(ranks).index(mine)
        self.size = len(ranks)
        self._launcher = launcher
        self._group: Any = None
        self._shared: shared.SharedRing | None = None
        """Users keep a reference during use: the memory must stay mapped until the last wait has ended."""
        self._lock = threading.Lock()
        launcher.lost.append(self._lost)

    @property
    def shares(self) -> bool:
        """True if CPU tensors go through shared memory in this epoch."""
        return self._shared is not None

    def connect(self, store: Any, epoch: int, timeout: float) -> None:
        """Meet the other ranks through ``store`` (a ``torch.distributed.Store``). Raise CommLost.

        ``timeout`` bounds the meeting and each later collective, in seconds. The meeting ends at once if the
        launcher is ``broken`` while ranks are missing: the missing ranks may be in another epoch already.
        """
        group = fast = reading = None
        try:
            # Keys of earlier epochs stay in the store, so each epoch and group gets a prefix of its own.
            prefixed = dist.PrefixStore(f"{epoch}/{self.name}", store)
            self._await_all(prefixed, timeout)
            group = self._make(prefixed, timedelta(seconds=timeout))
            ring = self._meet(prefixed, timeout) if self._share else None
            if self._gpu is not None:
                there = dist.PrefixStore("nccl", prefixed)
                fast = nccl.connect(there, self.rank, self.size, self._gpu, timeout, self._host is None)
            if self._reads:
                reading = self._meet_peers(dist.PrefixStore("peers", prefixed), timeout)
        except Exception as error:
            for made in (group, fast):
                if made is not None:
                    made.abort()
            raise CommLost(f"the {self.name} group could not form: {_first_line(error)}") from error
        with self._lock:
            self._group = group
            self._shared = ring
            self._nccl = fast
            self._peers = reading
            self._stage = HostStage(timeout)
        if self.rank == 0:
            log.info("collectives of %s use %s", self.name, self.link)

    @property
    def link(self) -> str:
        """The transport of collectives: ``gloo`` or ``shared memory``, and ``NCCL`` for CUDA tensors."""
        link = "gloo" if self._shared is None else "shared memory"
        if self._gpu is None:
            return link
        small = "" if self._peers is None else "for small tensors memory of the other GPUs, "
        return f"NCCL, {small}for CPU tensors {link}"

    def _await_all(self, store: Any, timeout: float) -> None:
        """Return once all ranks are present. Raise CommLost after ``timeout`` seconds, or when aborted.

        The later phases wait, too, but without a way to abort.
        """
        store.set(f"here{self.rank}", "")
        all_of_them = [f"here{rank}" for rank in range(self.size)]
        until = time.monotonic() + timeout
        pause = LOOK_S / 32
        while not store.check(all_of_them):
            if self._launcher.broken:
                raise CommLost("aborted before all ranks had connected")
            if time.monotonic() > until:
                raise CommLost(f"a rank did not connect within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, LOOK_S)

    def _make(self, store: Any, timeout: timedelta) -> Any:
        """Return a gloo group of all ranks that meet at ``store``. Blocks. Raises the errors of torch."""
        gloo: Any = dist.ProcessGroupGloo  # stubs lack the options
        options = gloo._Options()
        options._timeout = timeout
        options._devices = [gloo.create_device(hostname=self._host or LOOPBACK)]
        return gloo(store, self.rank, self.size, options)

    def _meet(self, store: Any, timeout: float) -> shared.SharedRing | None:
        return shared.meet(dist.PrefixStore("shared", store), self.rank, self.size, timeout)

    def _meet_peers(self, store: Any, timeout: float) -> peers.PeerGroup | None:
        """Return the group that reads the memory of the other GPUs, or None on all ranks. Raise CommLost."""
        if self._windows is None and self._gpu is not None and peers.able(self._gpu, self.size):
            try:
                self._windows = peers.Windows(self._gpu)
            except RuntimeError as error:
                log.warning("no memory that other GPUs read: %s", _first_line(error))
        return peers.meet(store, self.rank, self.size, timeout, self._windows)

    def _lost(self) -> bool:
        reading = self._peers
        return reading is not None and reading.lost

    def abort(self) -> None:
        """End the group.

        Collectives in flight raise CommLost at this rank and, for lack of a peer, elsewhere. Safe from any
        thread; does not wait. Idempotent.
        """
        # Take the references under the lock, then abort outside: an abort may block.
        with self._lock:
            group = self._group
            self._group = None
            ring = self._shared
            self._shared = None
            fast = self._nccl  # kept until the end of the abort: see ``settle``
            reading = self._peers
            self._peers = None
        if reading is not None:
            reading.abort()
        if fast is not None:
            fast.abort()
        if ring is not None:
            ring.abort()
        if group is not None:
            group.abort()

    def settle(self, timeout: float) -> None:
        """Wait until an aborted group has ended on the device, too. Raise CommLost."""
        fast = self._nccl
        if fast is not None:
            fast.settle(timeout)
            self._nccl = None

    def all_reduce(self, partial: Tensor) -> Pending | None:
        return self._launcher.launch(lambda: self._run(self._sum, partial))

    def all_gather(self, x: Tensor) -> Pending:
        return self._launcher.launch(lambda: self._run(self._gather, x))

    def reduce_scatter(self, x: Tensor) -> Pending:
        return self._launcher.launch(lambda: self._run(self._scatter, x))

    def all_to_all(
        self, x: Tensor, sends: Sequence[int], receives: Sequence[int], even: bool = False
    ) -> Pending:
        return self._launcher.launch(
            lambda: self._run(lambda given: self._exchange(given, list(sends), list(receives), even), x)
        )

    # ---- code run by the launcher

    def _run(self, work: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return ``work(x)``, by way of host memory if necessary."""
        if not self._staged(x):
            return work(x)
        return self._stage.up(work(self._stage.down(x)), x.device)

    def _staged(self, x: Tensor) -> bool:
        return x.is_cuda and self._gpu is None

    def _fast(self, x: Tensor) -> nccl.NcclGroup | None:
        return self._nccl if self._gpu is not None and x.device.type == self._gpu.type else None

    def _reading(self, x: Tensor) -> peers.PeerGroup | None:
        return self._peers if self._gpu is not None and x.device.type == self._gpu.type else None

    def _gather(self, x: Tensor) -> Tensor:
        """Return the inputs of all ranks, [ranks, *shape of x], over the fastest link. Raise CommLost."""
        ring = self._ring(x)
        if ring is not None:
            return self._guard(lambda: ring.gather(x))
        reading = self._reading(x)
        if reading is not None and reading.takes(x.numel(), 1, x.dtype):
            return self._guard(lambda: reading.gather(x))
        x = x.contiguous()
        # gloo and NCCL move bytes, so views as uint8 avoid all dtype limits.
        result = x.new_empty(self.size, *x.shape)
        fast = self._fast(x)
        if x.numel() and fast is not None:
            self._guard(lambda: fast.gather(_bytes(result), _bytes(x)))
        elif x.numel():
            self._wait(lambda group: group._allgather_base(_bytes(result), _bytes(x)))
        return result

    def _exchange(self, x: Tensor, sends: list[int], receives: list[int], even: bool) -> Tensor:
        """Send ``sends[r]`` rows of ``x`` to each rank r and return the received rows, [sum(receives), *row
        shape], in order of ranks. Raise CommLost.
        """
        ring = self._ring(x)
        if ring is not None:
            return self._guard(lambda: ring.exchange(x, sends, receives))
        reading = self._reading(x)
        if even and reading is not None and reading.takes(x.numel() // self.size, self.size, x.dtype):
            return self._guard(lambda: reading.exchange(x))
        x = x.contiguous()
        result = x.new_empty(sum(receives), *x.shape[1:])
        flat_out = _rows_of_bytes(result)
        flat_in = _rows_of_bytes(x)
        fast = self._fast(x)
        if fast is not None:
            self._guard(lambda: fast.exchange(flat_out, flat_in, receives, sends))
            return result
        self._wait(lambda group: group.alltoall_base(flat_out, flat_in, receives, sends))
        return result

    def _scatter(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of this rank's row: input [ranks, *shape], result [*shape].

        Raise CommLost.
        """
        if not x.numel():
            return x[0].clone()
        reading = self._reading(x)
        if reading is not None and x.is_floating_point() and reading.takes(x[0].numel(), self.size, x.dtype):
            return self._guard(lambda: reading.scatter(x))
        # One row per rank: the exchange leaves [size, *shape] here, to be summed in order of ranks.
        each = [1] * self.size
        return _ordered_sum(self._exchange(x, each, each, True))

    def _sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over all ranks, as a new tensor of equal shape. Raise CommLost.

        The sum is in order of ranks, except for large tensors over NCCL without ``ordered``.
        """
        ring = self._ring(x)
        if ring is not None and x.dtype in shared.SUMS:
            return self._guard(lambda: ring.sum(x))
        share = -(-x.numel() // self.size)
        reading = self._reading(x)
        if reading is not None and reading.sums(x.numel(), x.dtype):
            return self._guard(lambda: reading.sum(x))
        fast = self._fast(x)
        by_parts = reading is not None and x.is_floating_point() and reading.takes(share, self.size, x.dtype)
        if fast is not None and not self._ordered and not by_parts:
            total = x.clone(memory_format=torch.contiguous_format)  # x must stay unchanged for the caller
            if total.numel():
                self._guard(lambda: fast.sum(total))
            return total
        if x.numel() * x.element_size() * self.size <= ONE_SHOT:
            return _ordered_sum(self._gather(x))
        # Each rank sums one share of the elements, then all ranks gather the shares.
        parts = torch.nn.functional.pad(x.reshape(-1), (0, share * self.size - x.numel()))
        mine = self._scatter(parts.view(self.size, share))
        return self._gather(mine).view(-1)[: x.numel()].view(x.shape)

    def _wait(self, start: Callable[[Any], Any]) -> None:
        """Start a gloo operation and block until the end. Raise CommLost, also after an abort."""
        group = self._group
        if group is None:
            raise CommLost(f"the {self.name} group was aborted")
        self._guard(lambda: start(group).wait())

    def _ring(self, x: Tensor) -> shared.SharedRing | None:
        return self._shared if x.device.type == "cpu" else None

    def _guard(self, work: Callable[[], R]) -> R:
        """Return ``work()``. Raise CommLost in place of a RuntimeError."""
        try:
            return work()
        except CommLost:
            raise
        except RuntimeError as error:
            raise CommLost(f"a collective of the {self.name} group failed: {_first_line(error)}") from error


def _ordered_sum(parts: Tensor) -> Tensor:
    """Return ``parts[0] + parts[1] + ..`` in this order, summed in float32 or wider, in the dtype of
    ``parts``."""
    wide = parts.dtype if parts.dtype in (torch.float64, torch.float32) else torch.float32
    if not parts.dtype.is_floating_point:
        wide = parts.dtype
    total = parts[0].to(wide, copy=True)
    for rank in range(1, len(parts)):  # iterating over the tensor makes a list, which cannot be captured
        total += parts[rank]
    return total.to(parts.dtype)


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _rows_of_bytes(x: Tensor) -> Tensor:
    return x.view(x.shape[0], -1).view(torch.uint8) if x.numel() else x.new_empty(0, 1, dtype=torch.uint8)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
