"""Collectives on a separate thread."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.parallel.comm import Pending
from weft.parallel.group_comm import CommLost
from weft.parallel.launcher import DelayedLauncher, Launcher, ThreadLauncher
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout


def test_launches_run_in_order_beside_the_caller() -> None:
    launcher, order, go = ThreadLauncher(timeout=deadline(30)), [], threading.Event()
    launcher.threaded(True)

    def work(number: int) -> torch.Tensor:
        assert go.wait(deadline(30))
        order.append(number)
        return torch.tensor(number)

    pending = [launcher.launch(lambda number=number: work(number)) for number in range(5)]  # type: ignore[misc]
    assert not order, "the caller does not wait"
    go.set()
    assert [int(one.result()) for one in reversed(pending)] == [4, 3, 2, 1, 0]
    assert order == list(range(5))
    launcher.close()


def test_it_runs_at_once_where_no_thread_is_wanted() -> None:
    launcher = ThreadLauncher(timeout=deadline(30))
    here: list[threading.Thread] = []

    def work() -> torch.Tensor:
        here.append(threading.current_thread())
        return torch.zeros(1)

    launcher.launch(work)
    assert here == [threading.current_thread()]
    launcher.close()


def test_an_exception_is_the_results() -> None:
    launcher = ThreadLauncher(timeout=deadline(30))
    launcher.threaded(True)

    def work() -> torch.Tensor:
        raise CommLost("the peer is gone")

    pending = launcher.launch(work)
    with pytest.raises(CommLost, match="the peer is gone"):
        pending.result()
    launcher.close()


def test_a_wait_has_a_deadline() -> None:
    launcher, go = ThreadLauncher(timeout=0.05), threading.Event()
    launcher.threaded(True)

    def work() -> torch.Tensor:
        go.wait(deadline(30))
        return torch.zeros(1)

    pending = launcher.launch(work)
    with pytest.raises(CommLost, match="did not end in time"):
        pending.result()
    go.set()
    launcher.settle(30)
    launcher.close()


def test_a_cancelled_collective_never_runs() -> None:
    """A collective of an ended epoch must not reach the group of the next epoch."""
    launcher, go, ran = ThreadLauncher(timeout=deadline(30)), threading.Event(), []
    runs = threading.Event()
    launcher.threaded(True)

    def first() -> torch.Tensor:
        runs.set()
        assert go.wait(deadline(30))
        return torch.zeros(1)

    def later() -> torch.Tensor:
        ran.append(True)
        return torch.zeros(1)

    launcher.launch(first)
    assert runs.wait(deadline(30))
    dropped = [launcher.launch(later) for _ in range(3)]
    launcher.cancel()
    for one in dropped:
        with pytest.raises(CommLost, match="dropped"):
            one.result()
    with pytest.raises(CommLost, match="still running"):
        launcher.settle(0.01)
    go.set()
    launcher.settle(30)
    assert not ran
    assert int(launcher.launch(lambda: torch.tensor(7)).result()) == 7
    launcher.close()


@pytest.mark.parametrize("kind", [Launcher, ThreadLauncher])
@pytest.mark.parametrize("threaded", [False, True])
def test_flights_say_what_was_waited_for(kind: type[Launcher], threaded: bool) -> None:
    launcher = kind()
    launcher.recording = True
    launcher.threaded(threaded)
    launcher.micro_batch = 1

    def work() -> torch.Tensor:
        time.sleep(0.2)
        return torch.zeros(1)

    pending = launcher.launch(work)
    if threaded and kind is ThreadLauncher:
        while not launcher.flights[0].ended:  # the caller computes meanwhile
            time.sleep(0.01)
    pending.result()
    (flight,) = launcher.take()
    assert flight.micro_batch == 1
    assert flight.launched <= flight.began <= flight.ended
    assert flight.seconds >= 0.19
    if threaded and kind is ThreadLauncher:
        assert flight.waited < flight.seconds / 2
    else:
        assert flight.waited >= flight.seconds, "nothing was hidden"
    assert launcher.take() == []
    launcher.close()


def test_delays_of_several_collectives_pass_together() -> None:
    launcher = DelayedLauncher(0.2, timeout=deadline(30))
    launcher.recording = True
    began = time.monotonic()
    pending: list[Pending] = [launcher.launch(lambda: torch.zeros(1)) for _ in range(8)]
    for one in pending:
        one.result()
    flights = launcher.take()
    assert time.monotonic() - began >= 0.2
    assert all(flight.ended - flight.launched >= 0.2 for flight in flights)
    assert flights[-1].began < flights[0].ended, "they are under way together"
    launcher.close()


@pytest.mark.requirement("C8")
def test_sums_on_the_thread_equal_sums_at_once() -> None:
    def work(mesh: Mesh) -> list[torch.Tensor]:
        made = []
        for threaded in (False, True):
            mesh.launcher.threaded(threaded)
            many = [mesh.tp.all_reduce(torch.full((3,), 10.0**n + mesh.rank)) for n in range(6)]
            made.append(torch.stack([one.result() for one in many if one is not None]))
        mesh.launcher.threaded(False)
        return made

    for at_once, beside in on_ranks(Layout(tensor=2), work):
        assert torch.equal(at_once, beside)


def test_abort_releases_a_waiting_thread() -> None:
    """The other rank never comes; whoever ends the group ends the wait, long before the group's time-out."""

    def work(mesh: Mesh) -> None:
        if mesh.rank == 1:
            return
        mesh.launcher.threaded(True)
        pending = mesh.tp.all_reduce(torch.zeros(3))
        queued = mesh.tp.all_reduce(torch.zeros(3))
        assert pending is not None
        assert queued is not None
        threading.Timer(0.2, mesh.abort).start()
        for one in (pending, queued):
            with pytest.raises(CommLost):
                one.result()

    began = time.monotonic()
    on_ranks(Layout(tensor=2), work, timeout=deadline(60))
    assert time.monotonic() - began < deadline(50)
