"""The hosts of a group meet in a real rendezvous store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.slowness import deadline, until
from weft.control.directory import engine_host as h
from weft.control.directory import group_hosts as g
from weft.control.directory import joined_host as j
from weft.control.directory.host_gates import HeadGate, JoinGate, _seen
from weft.parallel.rendezvous import RendezvousClient, RendezvousStore
from weft.parallel.secret import derive
from weft.types.rendezvous import BUSY, control_key, host_key

KEYS = derive(b"0123456789abcdef")
SETTINGS = {"weft": "1", "scheduler.max_num_seqs": "4"}


class Meeting:
    """A head and its hosts."""

    def __init__(self) -> None:
        self.store = RendezvousStore("tcp://127.0.0.1:*", KEYS)
        self.address = self.store.address
        self.head = HeadGate(self.store, SETTINGS, 2)
        self.clients: list[RendezvousClient] = []

    def join(self, index: int = 1, settings: dict[str, str] = SETTINGS) -> JoinGate:
        self.clients.append(RendezvousClient(self.address, KEYS))
        return JoinGate(self.clients[-1], settings, index)

    def next_head(self, settings: dict[str, str] = SETTINGS) -> None:
        self.head.close()
        self.store = RendezvousStore(self.address, KEYS, deadline(10))
        self.head = HeadGate(self.store, settings, 2)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.head.close()


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    made.close()


def both(meeting: Meeting, host: JoinGate) -> tuple[object, object]:
    """Return what both sides say, after a look of each."""
    return meeting.head.look(), host.look()


def test_the_head_and_the_host_admit_each_other(meeting: Meeting) -> None:
    assert meeting.head.look() is None
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))
    assert host.answer() == j.Answered(meeting.store.head, "", "")
    meeting.store.post(control_key(0), b"tcp://10.0.0.1:1")
    until(lambda: host.answer() == j.Answered(meeting.store.head, "", "tcp://10.0.0.1:1"))
    assert host.answer(1) == j.Answered(meeting.store.head, "", "")


def test_a_host_with_other_settings_is_refused(meeting: Meeting) -> None:
    host = meeting.join(settings={**SETTINGS, "scheduler.max_num_seqs": "5"})
    until(lambda: isinstance(both(meeting, host)[1], h.Refused))
    said = host.look()
    assert isinstance(said, h.Refused)
    assert "the head has 4, host 1 has 5" in said.why
    good = meeting.join()
    until(lambda: both(meeting, good) == (h.Admitted(), h.Admitted()))


def test_an_invalid_entry_is_refused_and_affects_no_other(meeting: Meeting) -> None:
    meeting.store.post(host_key(1, "broken"), b"nonsense")
    meeting.store.post("host/x/y", b"")
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))


def test_a_host_that_is_refused_again_and_again_leaves_no_entries(
    meeting: Meeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(g, "FORGET_S", 0.2)
    for _ in range(3):
        host = meeting.join(settings={**SETTINGS, "scheduler.max_num_seqs": "5"})
        until(lambda gate=host: isinstance(both(meeting, gate)[1], h.Refused))  # type: ignore[misc]
        host.leave()
        until(lambda: "leaves/" in "".join(meeting.store.look("")))
        meeting.clients.pop().close()
    until(lambda: meeting.head.look() is None and set(meeting.store.look("")) <= {BUSY})


def test_a_host_outlives_the_head_and_joins_the_next_one(meeting: Meeting) -> None:
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))
    meeting.head.close()
    until(lambda: host.answer() == j.Silent())
    assert host.look() is None
    first = meeting.store.head
    meeting.next_head()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))
    answer = host.answer()
    assert isinstance(answer, j.Answered)
    assert answer.head == meeting.store.head != first


@pytest.mark.slow
def test_the_next_head_with_other_settings_refuses_the_host(meeting: Meeting) -> None:
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))
    meeting.next_head({**SETTINGS, "scheduler.max_num_seqs": "8"})
    until(lambda: isinstance(both(meeting, host)[1], h.Refused))


def test_a_host_that_leaves_is_heard(meeting: Meeting) -> None:
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))
    host.leave()
    until(lambda: isinstance(meeting.head.look(), h.Leaving))


def test_all_hosts_with_engines_drain_when_a_host_leaves(meeting: Meeting) -> None:
    meeting.head = HeadGate(meeting.store, SETTINGS, 3)
    one, two = meeting.join(), meeting.join(2)
    until(lambda: both(meeting, one) == (h.Admitted(), h.Admitted()) == both(meeting, two))
    assert [type(found) for found in both(meeting, one)] == [h.Admitted, h.Admitted]
    two.leave()
    until(lambda: [type(found) for found in both(meeting, one)] == [h.Leaving, h.Leaving])


@pytest.mark.slow
def test_draining_hosts_report_their_requests_to_each_other(meeting: Meeting) -> None:
    host = meeting.join()
    until(lambda: both(meeting, host) == (h.Admitted(), h.Admitted()))

    def busy(head_idle: bool, host_idle: bool) -> tuple[bool, bool]:
        meeting.head.look()
        return meeting.head.drain(head_idle), host.drain(host_idle)

    assert not host.drain(idle=True)  # the head does not drain
    until(lambda: busy(True, False) == (True, False))
    until(lambda: busy(False, True) == (False, True))
    until(lambda: busy(True, True) == (False, False))
    until(lambda: busy(True, False) == (True, False))
    meeting.clients.pop().close()  # the host dies
    until(lambda: not meeting.head.drain(idle=True))


def test_a_host_number_of_thousands_of_digits_is_unknown() -> None:
    assert _seen(host_key(1, "a"), b"", 0.0, ()).number == 1
    assert _seen(host_key(1, "a").replace("1/", "1" * 5000 + "/"), b"", 0.0, ()).number == -1
