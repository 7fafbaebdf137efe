"""Connections of a front to heads that live are made anew; no socket, no process."""

from __future__ import annotations

import msgspec

from tests.control.fleet.driver import Driver, ids
from tests.control.fleet.test_engine_protocol import engine, hello, submit
from tests.control.fleet.test_pairs import ask, pairs
from weft.common.errors import NotGreeted, Unavailable
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instances import InstanceState
from weft.types import messages as m

HELLO = m.Hello(versions=(m.OLDEST, m.VERSION), front="front")


def linked(one: Driver, name: str) -> list[m.ToEngine]:
    """There is another connection; the messages that are sent."""
    one.on(e.Linked(name, one.link[name]))
    return one.sent()


def test_a_front_greets_again_and_goes_on_from_the_tokens_that_came() -> None:
    one = Driver("a").up()
    one.open(1)
    one.tokens("a", 1, 7)
    for _ in range(MOST_LOSSES + 2):  # nothing was lost that counts
        attempt = one.fleet.entries[1].attempt
        greeting, again = linked(one, "a")
        assert greeting == HELLO
        assert (ids(again), one.fleet.entries[1].attempt) == ([7], attempt + 1)
    assert one.fleet.table.alive
    assert (one.fleet.failovers, one.fleet.table.restarts, one.fleet.entries[1].losses) == (0, 0, 0)
    assert one.fleet.table.instances["a"].open.keys() == {1}
    one.tokens("a", 1, 8, attempt=attempt)
    assert (one.delivered(), one.fleet.late_events) == ([], 1)  # of the connection that broke
    one.tokens("a", 1, 8, finish="stop")
    assert [event.token_ids for event in one.delivered()] == [(8,)]


def test_an_engine_that_loads_is_greeted_again_and_has_as_long_as_before() -> None:
    one = Driver("a")
    one.expect("a")
    assert linked(one, "a") == [HELLO]
    deadline = one.fleet.next_deadline()
    one.now += 5
    assert linked(one, "a") == [HELLO]
    assert one.fleet.next_deadline() == deadline
    one.say("a", one.welcome("a"))
    assert one.fleet.table.complete


def test_a_connection_to_another_process_is_a_loss() -> None:
    """It took the address of the one before."""
    one = Driver("a", "b").up()
    one.open(1)
    linked(one, "a")
    one.say("a", msgspec.structs.replace(one.welcome("a"), incarnation=99))
    assert [action.instance for action in one.of(e.Replace)] == ["a"]
    assert list(one.fleet.entries[1].places) == ["b"]


def test_the_refusal_of_an_engine_that_was_not_greeted_reaches_no_reader() -> None:
    one = Driver("a").up()
    one.open(1, 2)
    one.tokens("a", 1, 7)
    one.tokens("a", 2, finish="error", error=NotGreeted("Hello must be the first message").info())
    assert one.delivered() == []
    greeting, *again = one.sent()
    assert greeting == HELLO
    assert sorted(map(ids, again)) == [[], [7]]
    one.tokens("a", 2, attempt=0, finish="error", error=NotGreeted("Hello must be the first message").info())
    assert (one.delivered(), one.sent()) == ([], [])  # both were on their way


def test_a_pair_begins_again_when_one_connection_was_lost() -> None:
    for name in ("p", "d"):
        one = pairs("p", "d")
        ask(one, 1)
        sent = linked(one, name)
        assert sent[0] == HELLO
        assert sorted(type(message).__name__ for message in sent[1:]) == ["Finish", "Submit", "Submit"]
        assert one.fleet.entries[1].losses == 0


def test_nothing_new_goes_where_nothing_arrives() -> None:
    one = Driver("a", "b").up()
    assert one.open(1) == "a"
    one.on(e.Unreachable("a", one.link["a"]))
    assert one.actions == []  # its sequences wait: a moment later it may be there again
    assert [one.open(number, request=number) for number in (2, 3, 4)] == ["b"] * 3
    assert linked(one, "a")[0] == HELLO
    assert one.open(5, request=5) == "a"


def test_a_stale_link_changes_nothing() -> None:
    one = Driver("a").up()
    old = one.link["a"]
    one.lose("a")
    for event in (e.Linked("a", old), e.Unreachable("a", old)):
        one.on(event)
        assert (one.actions, one.fleet.table.instances["a"].state) == ([], InstanceState.DOWN)


def test_an_engine_forgets_the_connection_before_with_the_first_hello_of_the_next() -> None:
    one = engine()
    for sequence, (connection, name) in enumerate(((b"old", "front"), (b"other", "other"))):
        one.on(connection, hello(name))
        one.on(connection, submit(sequence))
    one.on(b"new", hello("front"))
    assert one.events([m.TokenEvent(sequence=0, token_ids=(1,))]) == []
    assert [front for front, _ in one.events([m.TokenEvent(sequence=1, token_ids=(1,))])] == [b"other"]
    assert {front for front, _ in one.heartbeats()} == {b"new", b"other"}


def test_an_engine_that_was_not_greeted_says_so() -> None:
    ((_, answer),) = engine().on(b"new", submit(1))
    assert isinstance(answer, m.Tokens)
    assert answer.events[0].error is not None
    assert answer.events[0].error.code == NotGreeted.code != Unavailable.code
