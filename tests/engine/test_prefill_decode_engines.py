"""Two heads with their loops: who sleeps is woken by what comes, and one that drains hands over first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from tests.engine.pair_rig import EnginePair, pair_of, submit, unified
from tests.engine.test_engine_server import DEADLINE, Front, Served
from tests.runner.transfers_rig import config_of
from weft.types import messages as m
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=8)
PROMPT = [3 + 7 * n % 90 for n in range(50)]


class Heads:
    """Both heads of a pair, each in a thread, and a front that is linked to both."""

    def __init__(self, pair: EnginePair, folder: Path) -> None:
        self.pair = pair
        self.served = [Served(core, f"ipc://{folder}/{core.config.transfer.role}") for core in pair.cores]
        self.fronts: list[Front] = [served.front() for served in self.served]

    def submit(self, one: m.Submit) -> None:
        for front, sends in zip(reversed(self.fronts), (False, True), strict=True):
            transfer = self.pair.parameters(one.sequence, one.attempt, sends)
            front.send(msgspec.structs.replace(one, transfer=transfer))

    def close(self) -> None:
        for served in self.served:
            served.close()
            assert served.error is None


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Heads]:
    """They sleep for an hour when there is nothing to do."""
    monkeypatch.setattr("weft.engine.server.engine_server.IDLE_POLL_MS", 3_600_000)
    made = Heads(pair_of(tmp_path, "llama"), tmp_path)
    yield made
    for front in made.fronts:
        front.send(m.Shutdown())
    made.close()


def ids(events: list[m.TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def test_loops_that_sleep_are_woken_by_all_that_comes(engines: Heads, tmp_path: Path) -> None:
    expected = unified(config_of(tmp_path, "llama", 8, "unified"), [submit(1, PROMPT, GREEDY)])[1]
    for sequence in (1, 2, 3):
        began = time.monotonic()
        engines.submit(submit(sequence, PROMPT, GREEDY, request=1))
        moved = engines.fronts[0].events(sequence)
        rest = engines.fronts[1].events(sequence)
        assert (ids(moved), moved[-1].finish) == (expected[:1], "moved")
        assert (ids(rest), rest[-1].finish) == (expected, "length")
        assert time.monotonic() - began < DEADLINE / 2


@pytest.mark.requirement("E19")
def test_an_engine_that_drains_waits_until_what_it_computed_was_taken(engines: Heads) -> None:
    """Its sequences have moved; the other head has not read a message yet."""
    sender, receiver = engines.served
    receiver.engine._poller.unregister(receiver.core.transfers._channel.sockets[0])  # type: ignore[union-attr, attr-defined]
    receive = receiver.core.transfers._channel.receive  # type: ignore[union-attr]
    held = threading.Event()

    def late() -> object:
        return receive() if held.is_set() else None

    receiver.core.transfers._channel.receive = late  # type: ignore[union-attr, method-assign, assignment]
    transfer = engines.pair.parameters(1, 0, True)
    engines.fronts[0].send(msgspec.structs.replace(submit(1, PROMPT, GREEDY), transfer=transfer))
    assert engines.fronts[0].events(1)[-1].finish == "moved"
    engines.fronts[0].send(m.Drain())
    time.sleep(0.3)
    assert sender.thread.is_alive()
    held.set()
    engines.fronts[1].send(
        msgspec.structs.replace(submit(1, PROMPT, GREEDY), transfer=engines.pair.parameters(1, 0, False))
    )
    until = time.monotonic() + DEADLINE
    while sender.thread.is_alive() and time.monotonic() < until:
        engines.fronts[1].send(m.Finish(sequence=99))  # it wakes its loop
        time.sleep(0.02)
    assert not sender.thread.is_alive()
    assert engines.fronts[1].events(1)[-1].finish == "length"
