"""Collectives in shared memory: gloo's bits, and an end to every wait."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import on_ranks
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.ops import cpu
from weft.parallel import shared
from weft.parallel.group_comm import CommLost, GroupComm, Launcher
from weft.parallel.launcher import DelayedLauncher
from weft.parallel.mesh import Mesh
from weft.parallel.store import join_store
from weft.types.layout import Layout

pytestmark = pytest.mark.skipif(not cpu.load(), reason="the C++ operations are not built")

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.int32, torch.uint8)
SIZES = (0, 1, 7, 4097, 2 * shared.SLOT // 4 + 3)
"""The last is larger than a slot in every dtype of four bytes or more."""
LONG = deadline(60.0)
"""Seconds. A wait that ends earlier was aborted."""


def made(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    wide = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (wide * 100).to(dtype)


def over_both(ranks: int, work: Callable[[GroupComm], list[torch.Tensor]]) -> None:
    """``work`` over gloo and in shared memory, on threads: the results are equal bit by bit."""
    store = dist.HashStore()

    def run(mesh: Mesh) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        assert isinstance(mesh.tp, GroupComm)
        assert mesh.tp.shares
        gloo = GroupComm("gloo", range(ranks), mesh.rank, Launcher(), share=False)
        gloo.connect(store, 0, LONG)
        assert not gloo.shares
        return work(gloo), work(mesh.tp)

    for old, new in on_ranks(Layout(tensor=ranks), run, LONG):
        assert len(old) == len(new)
        for one, other in zip(old, new, strict=True):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def result(pending: Any) -> torch.Tensor:
    return pending.result()  # type: ignore[no-any-return]


@mostly_slow("ranks", [2, 3, 4], [3])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_sums_and_gathers_have_gloos_bits(dtype: torch.dtype, ranks: int) -> None:
    def work(comm: GroupComm) -> list[torch.Tensor]:
        got = []
        for size in SIZES:
            x = made(dtype, size, seed=comm.rank)
            got += [result(comm.all_reduce(x)), result(comm.all_gather(x))]
            got.append(result(comm.reduce_scatter(made(dtype, ranks, size // ranks, seed=comm.rank))))
        across = made(dtype, 6, 5, seed=comm.rank).T  # not contiguous
        return [*got, result(comm.all_reduce(across)), result(comm.all_gather(across))]

    over_both(ranks, work)


@mostly_slow("ranks", [2, 3, 4], [3])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_exchanges_move_gloos_rows(dtype: torch.dtype, ranks: int) -> None:
    tables = [
        [[0] * ranks for _ in range(ranks)],
        [[(3 * a + b) % 4 for b in range(ranks)] for a in range(ranks)],
        [[0 if a else 5 for _ in range(ranks)] for a in range(ranks)],
        [[1000 * (a + 2 * b) + 1 for b in range(ranks)] for a in range(ranks)],
    ]

    def work(comm: GroupComm) -> list[torch.Tensor]:
        got = []
        for table in tables:
            sends, receives = table[comm.rank], [row[comm.rank] for row in table]
            for width in ((), (37,), (3, 2)):
                x = made(dtype, sum(sends), *width, seed=comm.rank)
                got.append(result(comm.all_to_all(x, sends, receives)))
        return got

    over_both(ranks, work)


def test_many_in_a_row_and_results_in_inference_mode() -> None:
    def work(mesh: Mesh) -> float:
        with torch.inference_mode():
            x = torch.full((8,), 0.5)
            for _ in range(2000):
                x = result(mesh.tp.all_reduce(x)) * 0.25 + 0.25
            assert x.is_inference()
        return float(x.sum())

    assert len(set(on_ranks(Layout(tensor=4), work, LONG))) == 1


def test_under_a_slow_network() -> None:
    store = dist.HashStore()

    def run(mesh: Mesh) -> list[float]:
        comm = GroupComm("slow", range(2), mesh.rank, DelayedLauncher(0.05, LONG))
        comm.connect(store, 0, LONG)
        flying = [comm.all_reduce(torch.tensor([float(n + mesh.rank)])) for n in range(10)]
        return [float(result(one)) for one in flying]

    assert on_ranks(Layout(tensor=2), run, LONG) == [[2.0 * n + 1 for n in range(10)]] * 2


def test_ranks_in_different_collectives_fail_at_once() -> None:
    def work(mesh: Mesh) -> str:
        try:
            if mesh.rank:
                mesh.tp.all_gather(torch.zeros(3))
            else:
                mesh.tp.all_reduce(torch.zeros(4))
        except CommLost as error:
            return error.message
        return ""

    assert all("another collective" in said for said in on_ranks(Layout(tensor=2), work, LONG))


def test_counts_that_contradict_fail() -> None:
    def work(mesh: Mesh) -> str:
        try:
            mesh.tp.all_to_all(torch.zeros(4), [2, 2], [2, 2 + mesh.rank])
        except CommLost as error:
            return error.message
        return ""

    assert "are expected" in on_ranks(Layout(tensor=2), work, LONG)[1]


def test_all_use_gloo_where_one_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank cannot report its host; another cannot map the segment."""
    seen: list[int] = []
    lock, host, opened = threading.Lock(), shared.host_id, os.open

    def no_host() -> str:
        with lock:
            seen.append(1)
            return host() if len(seen) > 1 else ""

    def no_open(path: Any, *given: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError("not yours")
        return opened(path, *given)

    def work(mesh: Mesh) -> tuple[bool, float]:
        assert isinstance(mesh.tp, GroupComm)
        return mesh.tp.shares, float(result(mesh.tp.all_reduce(torch.tensor([1.0]))))

    with monkeypatch.context() as patch:
        patch.setattr(shared, "host_id", no_host)
        assert on_ranks(Layout(tensor=3), work, LONG) == [(False, 3.0)] * 3
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_open)
        assert on_ranks(Layout(tensor=3), work, LONG) == [(False, 3.0)] * 3


def mapped() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("weft-collectives")


@pytest.mark.slow
def test_epochs_follow_each_other_while_a_thread_still_waits() -> None:
    """The segment of an epoch is removed after its last wait. The next epoch does not see the segment."""
    before, ranks = mapped(), 2
    comms = [GroupComm("x", range(ranks), rank, Launcher()) for rank in range(ranks)]

    def connect(epoch: int) -> None:
        store = dist.HashStore()
        threads = [threading.Thread(target=comm.connect, args=(store, epoch, LONG)) for comm in comms]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG)

    for epoch in range(4):
        connect(epoch)
        assert all(comm.shares for comm in comms)
        ended: list[Any] = []

        def wait(ended: list[Any] = ended) -> None:
            try:
                ended.append(comms[0].all_reduce(torch.zeros(3)))
            except CommLost as error:
                ended.append(error.message)  # not the objects of the traceback

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05 * (epoch % 2))
        comms[1 if epoch % 2 else 0].abort()  # the abort of the other rank frees this rank too
        waiting.join(LONG)
        assert isinstance(ended[0], str)
        for comm in comms:
            comm.abort()
        with pytest.raises(CommLost, match="aborted"):
            comms[0].all_gather(torch.zeros(1))
    assert mapped() == before


# ---- processes


def member(rank: int, ranks: int, store: str, timeout: float, out: Any) -> None:
    out.put(rank)  # torch is imported, which may take longer than ``timeout``
    comm = GroupComm("x", range(ranks), rank, Launcher())
    comm.connect(join_store(store, LONG), 0, timeout)
    out.put((rank, comm.shares, float(result(comm.all_reduce(torch.tensor([1.0 + rank]))))))
    if rank < ranks - 1:
        try:
            comm.all_reduce(torch.zeros(1))
        except CommLost as error:
            out.put((rank, True, error.message))
    time.sleep(LONG)


class Peers:
    """Ranks 1 and above, each a process that sums once with rank 0.

    All ranks except the last then wait for a second sum.
    """

    def __init__(self, folder: Path, ranks: int, timeout: float) -> None:
        context = mp.get_context("spawn")
        self.out: Any = context.Queue()
        store = f"file://{folder}/store"
        self.processes = [
            context.Process(target=member, args=(rank, ranks, store, timeout, self.out), daemon=True)
            for rank in range(1, ranks)
        ]
        for process in self.processes:
            process.start()
        assert {self.said() for _ in self.processes} == set(range(1, ranks))
        self.comm = GroupComm("x", range(ranks), 0, Launcher())
        self.comm.connect(join_store(store, LONG), 0, timeout)
        total = float(sum(range(1, ranks + 1)))
        assert float(result(self.comm.all_reduce(torch.tensor([1.0])))) == total
        assert sorted(self.said() for _ in self.processes) == [(n, True, total) for n in range(1, ranks)]

    def said(self) -> Any:
        return self.out.get(timeout=LONG)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(LONG)


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Callable[[int, float], Peers]]:
    begun: list[Peers] = []

    def begin(ranks: int, timeout: float) -> Peers:
        begun.append(Peers(tmp_path, ranks, timeout))
        return begun[-1]

    yield begin
    for one in begun:
        one.end()


def test_a_peer_that_was_killed_is_noticed_long_before_the_deadline(peers: Callable[..., Peers]) -> None:
    group = peers(3, 10 * LONG)
    pid = group.processes[1].pid
    assert pid is not None
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    with pytest.raises(CommLost, match=r"has ended: rank 2 of 3|aborted"):  # first to notice
        group.comm.all_reduce(torch.zeros(1))
    assert group.said()[0] == 1
    killer.join()


@pytest.mark.slow
def test_a_peer_that_is_stopped_is_given_up_at_the_deadline(peers: Callable[..., Peers]) -> None:
    group = peers(2, deadline(2.0))
    pid = group.processes[0].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(CommLost, match="did not come in time: rank 1 of 2"):
        group.comm.all_reduce(torch.zeros(1))


def test_an_abort_frees_the_other_processes(peers: Callable[..., Peers]) -> None:
    group = peers(3, 10 * LONG)
    time.sleep(0.2)  # rank 1 waits for the others now
    group.comm.abort()
    assert "aborted" in group.said()[2]
