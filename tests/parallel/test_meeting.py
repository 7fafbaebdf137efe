"""Engines of one or several hosts wait until all engines are there, through deaths and restarts."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.group.meeting import Meeting, complete, propose
from weft.group.types import Connect, Lease
from weft.parallel.leases import FolderLeases, Leases, RendezvousLeases
from weft.parallel.rendezvous import RendezvousClient, RendezvousStore
from weft.parallel.secret import derive

DEADLINE = deadline(60.0)


class Engine:
    """The engine's part in the rendezvous of an expert-parallel group."""

    def __init__(self, leases: Leases, meeting: Meeting) -> None:
        self.leases, self.meeting = leases, meeting

    def attend(self, epoch: int, patience: float = DEADLINE) -> Connect | None:
        """Return the agreed result, or None if not all engines came in ``patience`` seconds."""
        self.meeting.want(epoch)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            found = self.meeting.look(self.leases.read())
            if isinstance(found, Connect):
                return found
            if found is not None:
                self.leases.write(found)
            time.sleep(0.02)
        return None

    def begun(self, epoch: int) -> None:
        self.leases.write(self.meeting.begun(epoch))

    def moved_on(self, epoch: int) -> bool:
        return self.meeting.moved_on(epoch, self.leases.read())


MeetingOf = Callable[[int, int], Engine]
"""(replica, replicas) -> a new incarnation of the engine."""


@pytest.fixture(params=["folder", "store"])
def meeting_of(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MeetingOf]:
    if request.param == "folder":
        yield lambda replica, count: Engine(
            FolderLeases(str(tmp_path), replica, count),
            Meeting(replica, f"file://{tmp_path}", f"wakeup{replica}"),
        )
        return
    keys = derive(b"0123456789abcdef")
    store = RendezvousStore("tcp://127.0.0.1:*", keys)
    clients: dict[int, RendezvousClient] = {}

    def joined(replica: int, count: int) -> Engine:
        if replica in clients:
            clients[replica].close()  # the client of a dead process polls no more
        clients[replica] = client = RendezvousClient(store.address, keys)
        stores = "" if replica else f"file://{tmp_path}"
        return Engine(RendezvousLeases(client, replica, count), Meeting(replica, stores, f"wakeup{replica}"))

    yield joined
    for client in clients.values():
        client.close()
    store.close()


def test_proposals() -> None:
    begun, waits = Lease("a", 3, True), Lease("b", 3, False)
    assert propose(0, [None, None]) == 0
    assert propose(1, [waits, None]) == 3
    assert propose(1, [waits, begun]) == 4
    assert propose(7, [waits, begun]) == 7
    assert complete(3, [waits, waits])
    assert not complete(3, [waits, None])
    assert not complete(3, [waits, begun])
    assert not complete(4, [waits])
    assert complete(0, [])


def test_the_last_to_come_is_waited_for(meeting_of: MeetingOf, tmp_path: Path) -> None:
    met: list[Connect | None] = []

    def run_engine(replica: int) -> None:
        met.append(meeting_of(replica, 3).attend(0))

    threads = [threading.Thread(target=run_engine, args=(replica,), daemon=True) for replica in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join(DEADLINE)
    assert len(met) == 3
    assert len(set(met)) == 1
    assert met[0] is not None
    assert met[0].epoch == 0
    assert met[0].store.startswith(f"file://{tmp_path}/")
    assert met[0].wakeups == ("wakeup0", "wakeup1", "wakeup2")


def test_a_restarted_engine_is_noticed(meeting_of: MeetingOf) -> None:
    engines = [meeting_of(replica, 2) for replica in range(2)]
    threads = [threading.Thread(target=engine.attend, args=(0,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    for engine in engines:
        engine.begun(0)
    assert not engines[0].moved_on(0)
    new = meeting_of(1, 2)
    assert new.attend(0, 0.2) is None
    until = time.monotonic() + DEADLINE
    while not engines[0].moved_on(0):  # a read of the store returns the answer to the request before
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.requirement("C13")
@mostly_slow("seed", range(4), 1)
def test_each_meeting_has_all_present_engines(meeting_of: MeetingOf, seed: int) -> None:
    """Engines die at any time and are replaced.

    An engine enters an epoch only with the present incarnations of all engines. In the end all engines are
    together.
    """
    count, deaths = 3, 12
    rng = random.Random(seed)
    lock = threading.Condition()
    at: dict[str, dict[int, int]] = {}  # store -> replica -> incarnation
    left = [deaths]
    wrong: list[str] = []
    together = threading.Event()

    def connect(store: str, replica: int, incarnation: int) -> bool:
        """Wait for all ranks with a time-out, like the formation of a process group."""
        with lock:
            here = at.setdefault(store, {})
            if replica in here:
                wrong.append(f"{store} was used before")
            here[replica] = incarnation
            lock.notify_all()
            return lock.wait_for(lambda: len(at[store]) == count, timeout=0.3)

    def run_engine(replica: int) -> None:
        own, incarnation, epoch = random.Random(100 * seed + replica), 0, 0
        engine = meeting_of(replica, count)
        until = time.monotonic() + DEADLINE
        while not together.is_set() and time.monotonic() < until:
            met = engine.attend(epoch)
            assert met is not None
            if met.epoch < epoch:
                wrong.append("an epoch came again")
            epoch = met.epoch + 1
            if connect(met.store, replica, incarnation):
                engine.begun(met.epoch)
                with lock:
                    if not left[0]:
                        together.set()
                time.sleep(own.random() * 0.05)
            with lock:
                dies = left[0] > 0 and own.random() < 0.4
                left[0] -= dies
            if dies:
                incarnation, epoch = incarnation + 1, 0
                engine = meeting_of(replica, count)
                time.sleep(own.random() * 0.1)

    threads = [threading.Thread(target=run_engine, args=(replica,), daemon=True) for replica in range(count)]
    for thread in threads:
        thread.start()
        time.sleep(rng.random() * 0.05)
    assert together.wait(DEADLINE), "they do not find each other"
    assert not wrong
