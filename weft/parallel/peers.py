"""Collectives of GPUs that read each other's memory, in one kernel each (``weft.ops.triton.peers``).

    Windows       memory of this rank, kept over epochs; memory of the other ranks, mapped
    meet          forms a PeerGroup of all ranks on one host; or None on all ranks, which then use NCCL
    PeerGroup     the collectives of one rank in one epoch

Sums are in the order of ranks, in float32 or wider, and rounded once, so they have the bits of a CPU's sums.
A PeerGroup takes small tensors only. A CUDA graph can hold the collectives: all addresses are fixed in an
epoch, and the state of a collective is in the memory of the device.

Ranks of one process on one GPU use plain addresses, ranks of different processes CUDA IPC.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.ops import triton
from weft.parallel.cuda_memory import CudaRuntime, Runtime
from weft.parallel.launcher import CommLost
from weft.parallel.shared import all_agree, all_publish, host_id

Tensor = torch.Tensor

log = get_logger(__name__)

WHOLE = 512 << 10
"""Maximum bytes of a sum in one kernel, on more than two ranks: every rank reads all data of all ranks.
Larger sums are scattered, then gathered. Two ranks read the same number of bytes in both forms."""


class _Window(msgspec.Struct, frozen=True):
    """The window of a rank, for the other ranks."""

    able: bool
    host: str
    """Equal for processes that see each other; "" if unknown."""
    pid: int
    mark: bytes
    """Random, for each window: process ids come again."""
    gpu: str
    address: int
    """Address in the process of the rank."""
    name: bytes
    """Name of the allocation for CUDA IPC; empty if there is none."""
    offset: int
    """Offset of the window in the allocation."""
    generation: int
    """Last generation of the rank."""


class Windows:
    """The window of one rank, and the mapped windows of the other ranks.

    Lives as long as the communicator. The end of the object unmaps the windows of other ranks.
    """

    def __init__(self, device: torch.device, runtime: Runtime | None = None) -> None:
        """Allocate the window on ``device``. ``runtime``: calls of CUDA, for tests; None: of the library.

        Raises the errors of torch.
        """
        from weft.ops.triton.peers import MOST_RANKS, WINDOW

        on_gpu = device.type == "cuda"
        self.device = device
        self.memory = torch.zeros(WINDOW // 8, dtype=torch.int64, device=device)
        self._table = torch.zeros(2 + MOST_RANKS, dtype=torch.int64, device=device)
        """Table of the present generation. Kernels of an aborted group may still read it, so its memory
        must not go to other tensors."""
        self.lost = torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu)
        """Newest generation that has failed; written by the host and by kernels."""
        self.generation = 0
        """Last generation of this rank."""
        self._runtime = runtime
        self._unmapping: weakref.finalize[..., Windows] | None = None
        self._mark = os.urandom(16)
        self._mapped: dict[tuple[bytes, bytes], int] = {}
        """Begin of the mapped allocations of other processes, by mark and name."""

    def announce(self) -> _Window:
        """Return the window for the other ranks. A GPU without CUDA IPC has no name."""
        address, name, offset, gpu = self.memory.data_ptr(), b"", 0, str(self.device)
        if self.device.type == "cuda":
            gpu = str(torch.cuda.get_device_properties(self.device).uuid)
            try:
                begin, _ = self._calls().range_of(address)
                name, offset = self._calls().name_of(begin), address - begin
            except Unavailable as error:
                log.info("no memory for ranks of other processes: %s", error.message)
        pid = os.getpid()
        return _Window(True, host_id(), pid, self._mark, gpu, address, name, offset, self.generation)

    def map(self, windows: Sequence[_Window], mine: _Window) -> list[int]:
        """Return the addresses of all windows in this process. Unmap what no rank has any more.

        Raises Unavailable if a window cannot be mapped.
        """
        addresses, used = [], dict[tuple[bytes, bytes], int]()
        for window in windows:
            if window.pid == mine.pid:
                # Threads of one process. Memory of a second GPU would need peer access, which nobody enabled.
                if window.gpu != mine.gpu:
                    raise Unavailable("ranks of one process are on several GPUs")
                addresses.append(window.address)
                continue
            if not window.name:
                raise Unavailable("a rank has no name for its memory")
            key = window.mark, window.name
            if key not in used:
                used[key] = self._mapped[key] if key in self._mapped else self._calls().open(window.name)
                self._mapped[key] = used[key]
            addresses.append(used[key] + window.offset)
        for key in self._mapped.keys() - used.keys():
            _unmap(self._calls(), self._mapped, key)
        return addresses

    def table(self, addresses: list[int], generation: int) -> Tensor:
        """Return the table of the kernels for a new generation, and forget the numbers of the last one.

        The table has the same memory in all generations. No kernel of an earlier generation may be running on
        this rank.
        """
        from weft.ops.triton.peers import PROGRAMS

        self.generation = generation
        self.memory[:PROGRAMS].zero_()
        numbers = [generation, self.lost.data_ptr(), *addresses]
        self._table[: len(numbers)].copy_(torch.tensor(numbers))
        return self._table

    def _calls(self) -> Runtime:
        if self._runtime is None:
            self._runtime = CudaRuntime()
        if self._unmapping is None:
            self._unmapping = weakref.finalize(self, _unmap_all, self._runtime, self._mapped)
            self._unmapping.atexit = False  # the driver frees all memory of a process that ends
        return self._runtime


def _unmap_all(runtime: Runtime, mapped: dict[tuple[bytes, bytes], int]) -> None:
    for key in list(mapped):
        _unmap(runtime, mapped, key)


def _unmap(runtime: Runtime, mapped: dict[tuple[bytes, bytes], int], key: tuple[bytes, bytes]) -> None:
    """Unmap an allocation that no kernel uses any more. An error is logged, and no group fails."""
    try:
        runtime.close(mapped.pop(key))
    except Unavailable as error:
        log.info("memory of a rank that has ended stays mapped: %s", error.message)


class PeerGroup:
    """The collectives of one rank in one generation, queued on the current stream.

    All ranks make the same calls in the same order. Tensors must fit, see ``takes``.
    """

    def __init__(self, windows: Windows, table: Tensor, rank: int, size: int) -> None:
        from weft.ops.triton import peers

        self._kernels = peers
        self._windows = windows
        self._generation = windows.generation
        # A view of numpy: an abort must not enter torch, whose locks the thread of the steps may hold.
        self._lost: Any = windows.lost.numpy()
        self._where = table, rank, size
        self.size = size

    def takes(self, count: int, parts: int, dtype: torch.dtype) -> bool:
        """Return True if ``parts`` parts of ``count`` elements fit."""
        return count > 0 and self._kernels.fits(count, parts, dtype.itemsize)

    def sums(self, count: int, dtype: torch.dtype) -> bool:
        """Return True if a sum of ``count`` elements is best in one kernel."""
        few = count * dtype.itemsize <= WHOLE or self.size == 2
        return dtype.is_floating_point and few and self.takes(count, 1, dtype)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x, as a new tensor of equal shape."""
        return self._kernels.add(x.contiguous().view(-1), *self._where).view(x.shape)

    def scatter(self, x: Tensor) -> Tensor:
        """Return the sum of every rank's x[rank]; x: [size, *shape]."""
        return self._kernels.scatter(x.contiguous().view(self.size, -1), *self._where).view(x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """Return the x of every rank, [size, *x.shape]."""
        return self._kernels.gather(x.contiguous().view(-1), *self._where).view(self.size, *x.shape)

    def exchange(self, x: Tensor) -> Tensor:
        """Return part ``rank`` of every rank's x, in order of ranks: ``size`` equal parts, as in x."""
        return self._kernels.exchange(x.contiguous().view(self.size, -1), *self._where).view(x.shape)

    def abort(self) -> None:
        """End running and later kernels, with garbage as their results. Does not wait. Any thread."""
        self._lost[0] = max(int(self._lost[0]), self._generation)

    @property
    def lost(self) -> bool:
        """True after ``abort``, and after a kernel has given up."""
        return bool(self._lost[0] >= self._generation)

    def trial(self, timeout: float) -> bool:
        """Return True if a sum over all ranks is right, and ready within ``timeout`` seconds.

        Raise CommLost if the kernel does not end, even after an abort.
        """
        _, rank, size = self._where
        device = self._windows.device
        numbers = torch.arange(256, dtype=torch.float32)
        made = self.sum((numbers * (rank + 1)).to(device))
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            until = time.monotonic() + timeout
            while not event.query():
                if time.monotonic() > until:
                    if self.lost:
                        raise CommLost("a kernel that waits for other GPUs does not end after the abort")
                    self.abort()
                    until += timeout
                time.sleep(0.0005)
        return not self.lost and torch.equal(made.cpu(), numbers * (size * (size + 1) // 2))


def able(device: torch.device, size: int) -> bool:
    """Return True if kernels of this rank can read the memory of ``size`` ranks."""
    if device.type != "cuda" or not triton.available():
        return False
    from weft.ops.triton.peers import MOST_RANKS

    return size <= MOST_RANKS


def meet(store: Any, rank: int, size: int, timeout: float, windows: Windows | None) -> PeerGroup | None:
    """Form the group of ``size`` ranks. All ranks must call. Either all get a group, or all get None.

    ``store`` belongs to this group and epoch alone. ``windows``: None if this rank cannot take part.
    ``timeout``: seconds for each wait. Raise CommLost if a rank does not come.
    """
    mine = _Window(False, "", os.getpid(), b"", "", 0, b"", 0, 0) if windows is None else windows.announce()
    said = all_publish(store, "window", rank, size, mine, timeout)
    every = [msgspec.msgpack.decode(data, type=_Window) for data in said]
    if windows is None or not all(one.able and one.host and one.host == mine.host for one in every):
        return None
    group = None
    try:
        addresses = windows.map(every, mine)
        # Generation 0 is lost from the beginning, so this trial waits for no rank. The trial loads the
        # kernel, because loading may wait for the end of all kernels, also of another rank in this process.
        PeerGroup(windows, windows.table(addresses, 0), rank, size).trial(timeout / 3)
        # Larger than every generation that any rank remembers: signals of earlier ones have no effect.
        table = windows.table(addresses, 1 + max(one.generation for one in every))
        group = PeerGroup(windows, table, rank, size)
    except Exception as error:  # the compiler, too, has errors of its own: the other ranks must learn of all
        log.warning("GPUs cannot read each other's memory, so NCCL does all sums: %s", str(error))
    if not all_agree(store, "mapped", rank, size, group is not None, timeout) or group is None:
        return None
    # Ranks with a good trial wait ``timeout`` for the others: bad trials must end much earlier.
    works = group.trial(timeout / 3)
    if not all_agree(store, "works", rank, size, works, timeout):
        if not works:
            log.warning("a trial of reading the memory of other GPUs failed, so NCCL does all sums")
        return None
    return group
