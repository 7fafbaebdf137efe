"""The use of NCCL groups, on CPU tensors.

A gloo group replaces the NCCL group, because both are process groups of torch. NCCL runs in test_gpu.py on
GPUs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_group import value
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.parallel import nccl
from weft.parallel.group_comm import CommLost, GroupComm
from weft.parallel.launcher import Launcher, StreamLauncher, ThreadLauncher, default_launcher
from weft.parallel.mesh import Mesh, make_mesh
from weft.types.layout import Layout

R = TypeVar("R")
CPU, GPU = torch.device("cpu"), torch.device("cuda")
VARIABLES = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ENABLE_MONITORING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "NCCL_SOCKET_IFNAME",
)


def gloo(store: Any, rank: int, size: int, device: torch.device) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=30))


@pytest.fixture(autouse=True)
def in_place_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "_form", gloo)
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")


def side_by_side(ranks: int, work: Callable[[int], R]) -> list[R]:
    """``work(rank)`` of all ranks at once. Raises the first exception."""
    made: dict[int, R] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            made[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline(60))
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [made[rank] for rank in range(ranks)]


def on_comms(ranks: int, work: Callable[[GroupComm], R], **options: Any) -> list[R]:
    store = dist.HashStore()

    def one(rank: int) -> R:
        comm = GroupComm("x", range(ranks), rank, Launcher(), share=False, **options)
        comm.connect(store, 0, 30.0)
        try:
            return work(comm)
        finally:
            comm.abort()
            comm.settle(30.0)

    return side_by_side(ranks, one)


def everything(comm: GroupComm) -> list[torch.Tensor]:
    """Run every collective, with numbers that identify ranks and orders."""
    rank, size = comm.rank, comm.size
    summed = [comm.all_reduce(value(rank, count, dtype)) for count, dtype in CASES]
    rows = torch.arange(6).view(3, 2) + 10 * rank
    sends, receives = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    return [
        *(one.result() for one in summed if one is not None),
        comm.all_gather(rows.t()).result(),
        comm.all_gather(torch.empty(0, 3)).result(),
        comm.reduce_scatter(value(rank, 4 * size, torch.float32).view(size, 4)).result(),
        comm.all_to_all(rows, sends, receives).result(),
        comm.all_to_all(rows[:0], [0, 0], [0, 0]).result(),
    ]


CASES = [(7, torch.float32), (1 << 17, torch.bfloat16), (3, torch.int64), (1 << 15, torch.float64)]


@pytest.mark.parametrize("options", [{"gpu": CPU}, {"gpu": CPU, "ordered": False}], ids=["ordered", "fast"])
def test_collectives_of_nccl_are_those_of_gloo(options: dict[str, Any]) -> None:
    for made, expected in zip(on_comms(2, everything, **options), on_comms(2, everything), strict=True):
        assert len(made) == len(expected) == len(CASES) + 5
        for number, (one, other) in enumerate(zip(made, expected, strict=True)):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            if "ordered" in options and number < len(CASES):  # of two ranks, rounded in another way
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other)


def test_a_fast_sum_leaves_what_it_was_given() -> None:
    def work(comm: GroupComm) -> tuple[torch.Tensor, torch.Tensor]:
        given = torch.ones(4, 3).t()
        pending = comm.all_reduce(given)
        assert pending is not None
        return given, pending.result()

    for given, made in on_comms(2, work, gpu=CPU, ordered=False):
        assert torch.equal(given, torch.ones(3, 4))
        assert torch.equal(made, 2 * torch.ones(3, 4))


def test_an_aborted_group_ends_and_the_next_one_works() -> None:
    store = dist.HashStore()

    def work(rank: int) -> list[float]:
        comm = GroupComm("x", range(2), rank, Launcher(), share=False, gpu=CPU)
        made = []
        for epoch in range(2):
            comm.connect(store, epoch, 30.0)
            made.append(float(comm.all_gather(torch.ones(1)).result().sum()))
            comm.abort()
            with pytest.raises(CommLost, match="aborted"):
                comm.all_gather(torch.ones(1))
            comm.settle(30.0)
            with pytest.raises(CommLost, match="aborted"):
                comm.all_gather(torch.ones(1))
        return made

    assert side_by_side(2, work) == [[2.0, 2.0]] * 2


class Slow:
    """A group whose abort takes until the test releases the abort."""

    def __init__(self) -> None:
        self.go, self.aborted = threading.Event(), threading.Event()

    def abort(self) -> None:
        self.aborted.set()
        assert self.go.wait(deadline(30))


def test_a_long_abort_delays_only_the_wait_for_its_end() -> None:
    inner = Slow()
    group = nccl.NcclGroup(inner)
    began = time.monotonic()
    group.abort()
    group.abort()
    assert time.monotonic() - began < deadline(5)
    assert inner.aborted.wait(deadline(30))
    with pytest.raises(CommLost, match="does not stop"):
        group.settle(0.05)
    inner.go.set()
    group.settle(30.0)


def test_forming_has_a_deadline_and_what_forms_too_late_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    late, go = Slow(), threading.Event()
    late.go.set()

    def form(*_: Any) -> Any:
        assert go.wait(deadline(30))
        return late

    monkeypatch.setattr(nccl, "_form", form)
    with pytest.raises(CommLost, match=r"within 0.05 s"):
        nccl.connect(dist.HashStore(), 0, 2, CPU, 0.05, True)
    go.set()
    assert late.aborted.wait(deadline(30))


def test_an_error_of_forming_is_reported_and_closes_the_other_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("unhandled system error\nmore of it")

    monkeypatch.setattr(nccl, "_form", fail)
    with pytest.raises(CommLost, match=r"could not form: unhandled system error$"):
        on_comms(2, everything, gpu=CPU)


def test_nccl_leaves_errors_to_the_engine_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import os

    from weft.common import env

    for name in VARIABLES:
        monkeypatch.delenv(name)
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    env.prepare_nccl(one_host=False)
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    env.prepare_nccl(one_host=True)
    assert [os.environ.pop(name) for name in VARIABLES] == ["0", "1", "0", "lo"]


# ---- which way


@pytest.mark.skipif(dist.is_nccl_available(), reason="needs a torch without NCCL")
def test_a_torch_without_nccl_is_refused() -> None:
    with pytest.raises(ConfigError, match="--collectives gloo"):
        make_mesh(Layout(tensor=2), 0, device=GPU)
    make_mesh(Layout(), 0, device=GPU)


def test_launchers_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(default_launcher(GPU, True)) is StreamLauncher
    assert type(default_launcher(GPU, False)) is Launcher
    assert type(default_launcher(CPU, False)) is ThreadLauncher
    assert type(make_mesh(Layout(tensor=2), 0, device=GPU, collectives="gloo").launcher) is Launcher
    monkeypatch.setenv("WEFT_LINK_DELAY_MS", "3")
    with pytest.raises(ConfigError, match="--device cpu"):
        default_launcher(GPU, True)


def test_in_whole_steps_a_stream_launcher_runs_at_once() -> None:
    launcher = StreamLauncher(GPU)
    launcher.recording = True
    assert int(launcher.launch(lambda: torch.tensor(5)).result()) == 5
    launcher.settle(0.0)
    (flight,) = launcher.take()
    assert flight.waited == flight.seconds


def test_gloo_is_gloo() -> None:
    met = threading.Barrier(2, timeout=deadline(30.0))

    def link(rank: int, store: Any, collectives: str) -> str:
        mesh = make_mesh(Layout(tensor=2), rank, collectives=collectives)
        mesh.connect(store, 0, deadline(30.0))
        assert isinstance(mesh.tp, GroupComm)
        try:
            met.wait()  # an abort would end connections that are still being made
            return mesh.tp.link
        finally:
            mesh.abort()

    store = dist.HashStore()
    assert side_by_side(2, lambda rank: link(rank, store, "gloo")) == ["gloo"] * 2


def test_obstacles_and_varying_sums_of_a_mesh() -> None:
    two, experts = Layout(tensor=2), Layout(tensor=2, expert=True)
    assert Mesh(nccl=True).obstacle is None
    assert "not use NCCL" in str(Mesh(layout=two).obstacle)
    assert Mesh(layout=two, nccl=True).obstacle is None
    assert Mesh(layout=experts, nccl=True).obstacle is None
    tp = GroupComm("x", range(2), 0, Launcher())
    assert Mesh(layout=two, tp=tp, nccl=True, ordered=False).varying == ("sums over ranks (nccl)",)
    assert Mesh(layout=two, tp=tp, nccl=True).varying == Mesh(layout=two, tp=tp, ordered=False).varying == ()


def test_results_of_a_broken_epoch_are_refused() -> None:
    mesh = make_mesh(Layout(), 0)
    mesh.launcher.check()
    mesh.abort()
    with pytest.raises(CommLost, match="in the middle of a step"):
        mesh.launcher.check()
    mesh.connect(None, 1, 1.0)
    mesh.launcher.check()


# ---- through host memory


class Staged(GroupComm):
    """Has CPU tensors go the way of a GPU's."""

    def _staged(self, x: torch.Tensor) -> bool:
        return True


def test_collectives_through_host_memory_give_equal_results() -> None:
    store = dist.HashStore()

    def one(rank: int) -> list[torch.Tensor]:
        comm = Staged("x", range(2), rank, Launcher(), share=False)
        comm.connect(store, 0, 30.0)
        try:
            return everything(comm)
        finally:
            comm.abort()

    for made, expected in zip(side_by_side(2, one), on_comms(2, everything), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(made, expected, strict=True))
