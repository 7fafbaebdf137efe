"""Engines that choose a transport for each pair: shared memory or TCP, with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import UNSET

from tests.engine.pair_rig import EnginePair, pair_of, submit, unified
from tests.runner.transfers_rig import config_of
from tests.support.secret import write_secret
from weft.config import transfers
from weft.disagg.transport.shm import ShmTransport
from weft.engine import transfer_start
from weft.engine.core import EngineCore
from weft.types import messages as m
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=8)
PROMPTS = [[3 + (7 * n + 5 * i) % 90 for i in range(9 + 13 * n)] for n in range(4)]
LIST = "shm,tcp"


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Callable[[str], EnginePair]]:
    made: list[EnginePair] = []
    secret = str(write_secret(tmp_path))

    def one(transfer: str) -> EnginePair:
        made.append(pair_of(tmp_path, "llama", transfer=transfer, group_secret=secret))
        return made[-1]

    yield one
    for pair in made:
        pair.close()


def moves(core: EngineCore) -> m.TransferStats:
    stats = core.stats().transfers
    assert stats is not None
    return stats


def sent(pair: EnginePair) -> dict[str, int]:
    """Return transport -> number of transfers."""
    assert moves(pair.decode).sent is UNSET
    counted = moves(pair.prefill).sent
    return dict(counted.counts) if counted else {}


@pytest.mark.parametrize("reached", [True, False])
def test_the_engines_meet_over_what_works(
    pairs: Callable[[str], EnginePair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reached: bool
) -> None:
    if not reached:
        monkeypatch.setattr(transfer_start, "reaches", lambda path: False)
    submits = [submit(n, ids, GREEDY) for n, ids in enumerate(PROMPTS)]
    expected = unified(config_of(tmp_path, "llama", 8, "unified"), submits)
    pair = pairs(LIST)
    for one in submits:
        pair.submit(one)
    pair.run()
    assert {number: answer.ids for number, answer in pair.answers.items()} == expected
    assert sent(pair) == {"shm" if reached else "tcp": len(PROMPTS)}
    pair.check_given_back()


def test_a_connection_that_fails_after_the_choice_loses_no_request(
    pairs: Callable[[str], EnginePair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt breaks, the second one goes over TCP."""

    def refuse(self: ShmTransport, sock: object) -> None:
        raise PermissionError("planted")

    one = submit(0, PROMPTS[2], GREEDY)
    expected = unified(config_of(tmp_path, "llama", 8, "unified"), [one])
    pair = pairs(LIST)
    monkeypatch.setattr(ShmTransport, "_admit", refuse)
    pair.submit(one)
    pair.run()
    assert pair.answers[0].finish[-1] == "evicted"
    assert moves(pair.prefill).failed == 1
    again = submit(1, PROMPTS[2], GREEDY, request=0)
    pair.submit(again)
    pair.run()
    assert pair.answers[1].ids == expected[0]
    assert sent(pair) == {"tcp": 1}
    pair.check_given_back()


def test_engines_without_a_common_transport_return_the_sequence(
    pairs: Callable[[str], EnginePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_start, "reaches", lambda path: False)
    pair = pairs("shm")
    pair.submit(submit(0, PROMPTS[1], GREEDY))
    pair.run()
    assert pair.answers[0].finish[-1] == "evicted"
    assert sent(pair) == {}
    pair.check_given_back()


def test_a_list_works_without_nixl(
    pairs: Callable[[str], EnginePair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "NIXL_MODULES", ("no_such_module",))
    monkeypatch.setattr(transfer_start, "reaches", lambda path: False)
    pair = pairs("shm,nixl,tcp")
    pair.submit(submit(0, PROMPTS[1], GREEDY))
    pair.run()
    assert sent(pair) == {"tcp": 1}
