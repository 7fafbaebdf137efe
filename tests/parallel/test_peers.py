"""Collectives of ranks that read each other's memory: bits, waits, lost ranks, epochs.

Ranks are threads. On a CPU the kernels of all ranks run in Triton's interpreter at the same time, so signals
are really waited for. The tests marked gpu run two ranks on one GPU, op by op and captured.
"""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_group import value
from tests.parallel.test_nccl import gloo, side_by_side
from tests.support.interpreted import launches_beside_each_other
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import Unavailable
from weft.ops.triton import peers as kernels
from weft.ops.triton.peers import PROGRAMS
from weft.parallel import nccl, peers
from weft.parallel.group_comm import CommLost, GroupComm
from weft.parallel.launcher import Launcher

R = TypeVar("R")
Tensor = torch.Tensor
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ranks on the CPU read each other's memory, with gloo in NCCL's place."""
    monkeypatch.setattr(nccl, "_form", gloo)
    monkeypatch.setattr(peers, "able", lambda device, size: True)
    with launches_beside_each_other():
        yield


def on_comms(ranks: int, work: Callable[[GroupComm], R], **options: Any) -> list[R]:
    store = dist.HashStore()

    def one(rank: int) -> R:
        comm = GroupComm("x", range(ranks), rank, Launcher(), share=False, gpu=CPU, **options)
        comm.connect(store, 0, 30.0)
        try:
            assert (comm._peers is None) == (options.get("reads") is False)
            return work(comm)
        finally:
            comm.abort()
            comm.settle(30.0)

    return side_by_side(ranks, one)


def launches(comm: GroupComm) -> int:
    """Return the number of collectives that the first program of the kernel took part in."""
    assert comm._windows is not None
    return int(comm._windows.memory[0])


def everything(
    comm: GroupComm, counts: list[int], dtypes: list[torch.dtype], device: torch.device = CPU
) -> list[Tensor]:
    """Run every collective, in sizes that need other numbers of programs each time."""
    rank, size, made = comm.rank, comm.size, []
    for count in counts:
        for dtype in dtypes:
            x = value(rank, count * size, dtype).to(device)
            if dtype == torch.bfloat16 and device == CPU:
                x = x.round()  # the interpreter rounds to bfloat16 towards zero
            summed = comm.all_reduce(x[:count])
            assert summed is not None
            parts, rows = x.view(size, count), x.view(size * count, 1)
            each = [count] * size
            made += [
                summed.result(),
                comm.all_gather(parts.t()).result(),
                comm.reduce_scatter(parts).result(),
                comm.all_to_all(rows, each, each, even=True).result(),
            ]
    return made


FLOATS = [torch.float16, torch.float32, torch.bfloat16, torch.float64]
CASES = [(2, [5, 1500], FLOATS[:1]), (3, [1, 7, 1025, 2048], FLOATS), (8, [100], FLOATS)]


@mostly_slow("ranks, counts, dtypes", CASES, 1)
def test_collectives_have_the_bits_of_the_ordered_ones(
    ranks: int, counts: list[int], dtypes: list[torch.dtype], beside: None
) -> None:
    def read(comm: GroupComm) -> list[Tensor]:
        before = launches(comm)
        made = everything(comm, counts, dtypes)
        assert launches(comm) - before == len(made), "a collective took another way"
        return made

    expected = on_comms(ranks, lambda comm: everything(comm, counts, dtypes), reads=False)
    for made, wanted in zip(on_comms(ranks, read, ordered=False), expected, strict=True):
        for one, other in zip(made, wanted, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other)


def test_a_rank_that_never_comes_is_waited_for_until_the_abort_and_the_next_epoch_works(beside: None) -> None:
    """Signals of the ended epoch stay in the memory, and have no effect."""
    store, aborted = dist.HashStore(), threading.Event()
    comms = [GroupComm("x", range(2), rank, Launcher(), share=False, gpu=CPU) for rank in range(2)]

    def lonely() -> None:
        """Abort the first rank from another thread once the kernel waits, as the watch of an engine does."""
        windows = comms[0]._windows
        assert windows is not None
        signals = windows.memory[PROGRAMS]  # of the first program to itself
        until = time.monotonic() + deadline(30)
        while int(signals) & 0xFF < 3 and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(0.02)
        aborted.set()
        comms[0].abort()

    def one(rank: int) -> tuple[int, float]:
        comm = comms[rank]
        comm.connect(store, 0, 30.0)
        comm.all_reduce(torch.ones(4))  # both come; the trial was the first collective
        if rank == 0:
            watch = threading.Thread(target=lonely)
            watch.start()
            comm.all_reduce(torch.ones(4))
            assert aborted.is_set(), "the kernel did not wait"
            watch.join(deadline(30))
        else:
            assert aborted.wait(deadline(30))
            comm.abort()
        with pytest.raises(CommLost):
            comm.all_reduce(torch.ones(4))
        comm.settle(30.0)
        comm.connect(store, 1, 30.0)
        assert comm._windows is not None
        try:
            pending = comm.all_reduce(torch.full((4,), rank + 1.0))
            assert pending is not None
            return comm._windows.generation, float(pending.result()[3])
        finally:
            comm.abort()
            comm.settle(30.0)

    assert side_by_side(2, one) == [(2, 3.0)] * 2


def test_a_kernel_that_gives_up_is_the_error_of_the_step(
    beside: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host may have no watch. The results are refused as after an abort.

    A peer that comes late must not take the later results of this rank for good ones.
    """
    gone = threading.Barrier(2)

    def work(comm: GroupComm) -> tuple[list[float], bool, bool]:
        comm._launcher.check()
        gone.wait(deadline(30))
        if comm.rank == 0:
            monkeypatch.setattr(kernels, "MOST_POLLS", 2 * kernels.LOOK)
            comm.all_reduce(torch.ones(4))
            with pytest.raises(CommLost, match="waited too long"):
                comm._launcher.check()
            comm.all_reduce(torch.full((4,), torch.nan))  # queued already, computed from garbage
        gone.wait(deadline(30))
        if comm.rank == 0:
            return [], True, True
        late = comm.all_reduce(torch.ones(4))
        assert late is not None
        lost = comm._lost()
        comm.all_reduce(torch.ones(4))
        return late.result().tolist(), lost, comm._lost()

    values, first, second = on_comms(2, work)[1]
    assert values == [2.0] * 4, "the other rank published before it gave up"
    assert not first
    assert second, "garbage of the other rank was taken for its data"


class Processes:
    """CUDA IPC between ranks of which each claims to be a process: names are the addresses."""

    opened: list[int]
    stuck = False

    def __init__(self, fails: bool = False) -> None:
        self.opened, self._fails = [], fails

    def range_of(self, pointer: int) -> tuple[int, int]:
        return pointer - 64, 1 << 30

    def name_of(self, begin: int) -> bytes:
        return begin.to_bytes(64, "little")

    def open(self, name: bytes) -> int:
        if self._fails:
            raise Unavailable("CUDA IPC: open of memory failed with status 217")
        self.opened.append(int.from_bytes(name, "little"))
        return self.opened[-1]

    def read(self, pointer: int, into: Tensor) -> None:
        raise AssertionError

    def close(self, begin: int) -> None:
        if self.stuck:
            raise Unavailable("CUDA IPC: close of memory failed with status 1")
        self.opened.remove(begin)


class Apart(peers.Windows):
    """Windows of a process of its own, as announced on a GPU."""

    def announce(self) -> peers._Window:
        window = super().announce()
        name = (window.address - 64).to_bytes(64, "little")
        return msgspec.structs.replace(window, pid=id(self), name=name, offset=64)


def test_windows_of_other_processes_are_mapped_once_and_unmapped_when_a_process_is_replaced() -> None:
    calls = Processes()
    mine, other, later = (Apart(CPU, calls) for _ in range(3))
    every = [mine.announce(), other.announce()]
    for _ in range(2):
        assert mine.map(every, every[0]) == [mine.memory.data_ptr(), other.memory.data_ptr()]
        assert calls.opened == [other.memory.data_ptr() - 64]
    every[1] = later.announce()
    assert mine.map(every, every[0])[1] == later.memory.data_ptr()
    assert calls.opened == [later.memory.data_ptr() - 64]
    del mine
    gc.collect()
    assert not calls.opened


def test_memory_that_cannot_be_unmapped_does_not_end_the_new_group() -> None:
    calls = Processes()
    mine, other, later = (Apart(CPU, calls) for _ in range(3))
    every = [mine.announce(), other.announce()]
    mine.map(every, every[0])
    calls.stuck = True
    every[1] = later.announce()
    assert mine.map(every, every[0]) == [mine.memory.data_ptr(), later.memory.data_ptr()]


def test_the_table_of_an_aborted_group_goes_to_no_other_tensor() -> None:
    """A step or a graph may be launched after the abort: its kernels find the addresses in the table."""
    windows = peers.Windows(CPU)
    assert windows.table([1, 2], 1).data_ptr() == windows.table([1, 3], 2).data_ptr()
    group = peers.PeerGroup(windows, windows.table([1, 2], 3), 0, 2)
    there = weakref.ref(group._where[0].untyped_storage())
    group.abort()
    del group
    gc.collect()
    assert there() is not None


def test_if_one_rank_cannot_map_the_memory_all_ranks_use_nccl(beside: None) -> None:
    """Else the other ranks would wait for signals that never come."""
    store = dist.HashStore()

    def one(rank: int) -> float:
        comm = GroupComm("x", range(2), rank, Launcher(), share=False, gpu=CPU)
        comm._windows = Apart(CPU, Processes(fails=rank == 1))
        comm.connect(store, 0, 30.0)
        try:
            assert comm._peers is None
            assert comm.link.startswith("NCCL, for CPU tensors")
            pending = comm.all_reduce(torch.ones(4))
            assert pending is not None
            return float(pending.result()[0])
        finally:
            comm.abort()
            comm.settle(30.0)

    assert side_by_side(2, one) == [2.0, 2.0]


@pytest.mark.parametrize("error", [OSError("no compiler"), RuntimeError("no memory")])
def test_if_one_rank_cannot_load_the_kernel_all_ranks_use_nccl(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(group: peers.PeerGroup, timeout: float) -> bool:
        if group._where[1] == 1:
            raise error
        return True

    monkeypatch.setattr(peers.PeerGroup, "trial", trial)
    store = dist.HashStore()
    met = side_by_side(2, lambda rank: peers.meet(store, rank, 2, deadline(10), peers.Windows(CPU)))
    assert met == [None, None]


def test_a_bad_trial_ends_before_the_other_ranks_lose_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad trial takes twice the time given: until the abort, and until the kernel has ended."""
    times: list[float] = []

    def trial(group: peers.PeerGroup, timeout: float) -> bool:
        times.append(timeout)
        return group._where[1] == 0

    monkeypatch.setattr(peers.PeerGroup, "trial", trial)
    store, patience = dist.HashStore(), deadline(10)
    assert (
        side_by_side(2, lambda rank: peers.meet(store, rank, 2, patience, peers.Windows(CPU))) == [None] * 2
    )
    assert len(times) == 4
    assert all(2 * time < patience for time in times)


# ---- two ranks on one GPU

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
COUNTS = [1, 7, 4096, 100_003]


def alone(monkeypatch: pytest.MonkeyPatch) -> GroupComm:
    """Return a communicator that waits for no rank: its generation is lost from the beginning.

    Work on it loads kernels. Ranks of one process must not load kernels while another rank waits on the GPU.
    """
    monkeypatch.setattr(nccl, "_form", gloo)
    comm = GroupComm("x", range(2), 0, Launcher(), share=False, gpu=GPU)
    windows = peers.Windows(GPU)
    comm._windows = windows
    comm._peers = peers.PeerGroup(windows, windows.table([windows.memory.data_ptr()] * 2, 0), 0, 2)
    return comm


def on_one_gpu(comms: list[GroupComm], epoch: int, store: Any, work: Callable[[GroupComm], R]) -> list[R]:
    """Return ``work(comm)`` of all ranks, each on its own stream. The group is connected for ``work``."""

    def one(rank: int) -> R:
        torch.cuda.set_device(GPU)
        comm = comms[rank]
        with torch.cuda.stream(torch.cuda.Stream(GPU)):
            comm.connect(store, epoch, 30.0)
            assert comm._peers is not None
            try:
                return work(comm)
            finally:
                comm.abort()
                torch.cuda.current_stream(GPU).synchronize()
                comm.settle(30.0)

    return side_by_side(2, one)


def pair() -> list[GroupComm]:
    return [GroupComm("x", range(2), rank, Launcher(), share=False, gpu=GPU) for rank in range(2)]


@pytest.mark.gpu
@on_gpu
def test_two_ranks_on_one_gpu_have_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    everything(alone(monkeypatch), COUNTS, FLOATS, GPU)
    torch.cuda.synchronize()

    def work(comm: GroupComm) -> list[Tensor]:
        return [one.cpu() for one in everything(comm, COUNTS, FLOATS, GPU)]

    def on_cpu(comm: GroupComm) -> list[Tensor]:
        values = [value(comm.rank, count * 2, dtype) for count in COUNTS for dtype in FLOATS]
        made = []
        for x in values:
            parts = x.view(2, -1)
            each = [parts.shape[1]] * 2
            summed = comm.all_reduce(parts.reshape(-1)[: parts.shape[1]])
            assert summed is not None
            made += [summed.result(), comm.all_gather(parts.t()).result()]
            made += [comm.reduce_scatter(parts).result(), comm.all_to_all(x.view(-1, 1), each, each).result()]
        return made

    found = on_one_gpu(pair(), 0, dist.HashStore(), work)
    for made, wanted in zip(found, on_comms(2, on_cpu, reads=False), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


@pytest.mark.gpu
@on_gpu
def test_replays_sum_new_values_and_a_lost_peer_ends_with_the_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph per rank, with sums of two sizes. Then one rank replays alone, until the abort."""
    from weft.runner.graphs.graphs import CudaCapture

    store, comms = dist.HashStore(), pair()
    given = [torch.zeros(70_000, dtype=torch.bfloat16, device=GPU) for _ in comms]
    out = [torch.zeros(70_000, dtype=torch.bfloat16, device=GPU) for _ in comms]
    values = [
        [value(7 * n + rank, 70_000, torch.bfloat16).pin_memory() for rank in (0, 1)] for n in range(20)
    ]
    captured = threading.Barrier(2)

    def step(comm: GroupComm) -> None:
        first = comm.all_reduce(given[comm.rank])
        assert first is not None
        second = comm.all_reduce(first.result()[:100])
        assert second is not None
        out[comm.rank].copy_(first.result())
        out[comm.rank][:100].copy_(second.result())

    step(alone(monkeypatch))
    torch.cuda.synchronize()

    def work(comm: GroupComm) -> list[Tensor]:
        replay = CudaCapture(GPU)(lambda: step(comm))
        captured.wait(deadline(30))
        made = []
        for pair_of in values:
            given[comm.rank].copy_(pair_of[comm.rank], non_blocking=True)
            replay()
            made.append(out[comm.rank].to("cpu"))
        captured.wait(deadline(30))
        if comm.rank == 0:
            replay()
            ended = torch.cuda.Event()
            ended.record()
            time.sleep(0.2)
            assert not ended.query(), "the kernel did not wait for its peer"
            comm.abort()
            ended.synchronize()
        captured.wait(deadline(30))
        return made

    for made in on_one_gpu(comms, 0, store, work):
        for one, (a, b) in zip(made, values, strict=True):
            total = (a.float() + b.float()).bfloat16()
            total[:100] = (2 * total[:100].float()).bfloat16()
            assert torch.equal(one, total)

    def again(comm: GroupComm) -> float:
        summed = comm.all_reduce(given[comm.rank])
        assert summed is not None
        return float(summed.result().cpu()[5])

    first, second = on_one_gpu(comms, 1, store, again)
    assert first == second
