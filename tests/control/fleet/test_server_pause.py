"""A pause of the whole server: new sequences wait, or all sequences."""

from __future__ import annotations

import pytest

from tests.control.fleet.driver import Driver
from weft.control.fleet import fleet_events as e
from weft.types import messages as m


def places(one: Driver) -> dict[int, list[str]]:
    """Return the instances of each open sequence."""
    return {sequence: list(entry.places) for sequence, entry in one.fleet.entries.items()}


def test_a_pause_of_all_sequences_keeps_their_tokens() -> None:
    one = Driver("a").up()
    one.open(1)
    one.tokens("a", 1, 7, 8)
    one.on(e.Held(running=True))
    assert one.sent() == [m.Finish(sequence=1)]
    assert one.open(2, request=2) is None
    assert places(one) == {1: [], 2: []}
    assert one.fleet.open.pause_of_server.running == 0
    one.on(e.Released())
    submits = [message for message in one.sent() if isinstance(message, m.Submit)]
    assert [(each.sequence, list(m.ids_from_bytes(each.emitted_ids))) for each in submits] == [
        (1, [7, 8]),
        (2, []),
    ]


def test_a_pause_for_new_sequences_lets_begun_requests_finish() -> None:
    one = Driver("a", "b").up()
    first = one.open(1)
    assert first is not None
    one.on(e.Held(running=False))
    assert one.sent() == []
    assert one.open(2, request=2) is None
    one.lose(first)  # the begun sequence continues elsewhere, although the server is paused
    assert places(one) == {1: [{"a": "b", "b": "a"}[first]], 2: []}
    submit = one.fleet.entries[1].submit
    one.on(e.Opened((m.Submit(**{**fields(submit), "sequence": 3}),), begun=True))
    assert places(one)[3] == places(one)[1]
    assert one.fleet.open.pause_of_server.running == 2
    one.on(e.Closed((1, 3)))
    assert one.fleet.open.pause_of_server.running == 0


def fields(message: m.Submit) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


def test_a_slow_client_comes_back_after_the_pause() -> None:
    one = Driver("a").up()
    one.open(1, 2)
    one.on(e.Paused((1,)))
    one.on(e.Held(running=False))
    one.on(e.Paused((2,)))
    one.on(e.Resumed((1, 2)))
    assert places(one) == {1: [], 2: []}
    one.on(e.Released())
    assert places(one) == {1: ["a"], 2: ["a"]}


@pytest.mark.parametrize("running", [True, False])
def test_an_instance_that_starts_again_during_a_pause_gets_nothing(running: bool) -> None:
    one = Driver("a").up()
    one.on(e.Held(running))
    assert one.open(1) is None
    one.lose("a")
    one.up("a")
    assert places(one) == {1: []}
    one.open(2, pinned="a")  # a proof of readiness
    assert places(one) == {1: [], 2: ["a"]}
    one.on(e.Released())
    assert places(one) == {1: ["a"], 2: ["a"]}


def test_a_pause_does_not_keep_a_request_longer_than_a_lost_engine_does() -> None:
    one = Driver("a").up()
    one.on(e.Held(running=True))
    one.open(1)
    one.lose("a")
    one.wait(30.0)
    assert one.fleet.entries == {}
