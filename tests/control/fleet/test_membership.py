"""Instances that join and leave a fleet in service: events and actions, no clock, no process."""

from __future__ import annotations

from tests.control.fleet.driver import PATIENCE, Driver
from weft.common.errors import PeerEnded
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instances import InstanceState
from weft.types import messages as m
from weft.types.sampling import TokenParams


def joined(one: Driver, name: str) -> Driver:
    """Let ``name`` join the fleet and come up."""
    one.on(e.Joined(name))
    return one.up(name)


def test_a_new_member_takes_requests_once_it_is_up() -> None:
    one = Driver("a").up()
    one.on(e.Joined("b"))
    assert one.fleet.table.whole  # a member that has yet to load is no loss
    assert one.open(1) == "a"
    one.up("b")
    assert one.open(2, request=2) == "b"
    assert one.fleet.table.whole


def test_a_new_member_that_dies_while_it_loads_counts_as_missing() -> None:
    one = Driver("a").up()
    one.on(e.Joined("b"))
    one.expect("b")
    one.lose("b")
    assert not one.fleet.table.whole
    assert one.fleet.table.alive


def test_the_first_member_reports_prefixes_once_there_is_a_choice() -> None:
    one = Driver("a").up()
    assert not [message for message in one.sent() if isinstance(message, m.WatchPrefixes)]
    one.on(e.Joined("b"))
    assert one.of(e.Send) == [e.Send("a", one.link["a"], m.WatchPrefixes())]
    one.up("b")
    assert e.Send("b", one.link["b"], m.WatchPrefixes()) in one.of(e.Send)


def test_a_leaving_instance_finishes_and_is_forgotten() -> None:
    one = joined(Driver("a").up(), "b")
    one.open(1)
    assert one.open(2, request=2) == "b"
    one.on(e.Left("b"))
    assert not one.of(e.Forget)
    assert one.fleet.table.instances["b"].state is InstanceState.DRAINING
    assert one.fleet.table.whole  # nobody wants it any more
    assert one.open(3, request=3) == "a"
    one.tokens("b", 2, 7)
    assert [event.token_ids for event in one.delivered()] == [(7,)]
    one.tokens("b", 2, 8, finish="length")
    assert [event.finish for event in one.delivered()] == ["length"]
    assert one.sent() == [m.Goodbye()]
    assert one.of(e.Forget) == [e.Forget("b")]
    assert list(one.fleet.table.instances) == ["a"]
    one.tokens("b", 2, 9)  # was in flight
    assert one.delivered() == []


def test_an_idle_leaving_instance_is_forgotten_at_once() -> None:
    one = joined(Driver("a").up(), "b")
    one.on(e.Left("b"))
    assert one.of(e.Forget) == [e.Forget("b")]
    one.on(e.Left("b"))
    assert one.actions == []


def test_work_of_one_that_leaves_and_dies_goes_on_elsewhere() -> None:
    one = joined(Driver("a").up(), "b")
    one.open(1)
    assert one.open(2, request=2) == "b"
    one.tokens("b", 2, 7)
    one.on(e.Left("b"))
    one.lose("b")
    assert one.of(e.Replace) == []  # the owner wants no other process
    assert one.of(e.Forget) == [e.Forget("b")]
    (submit,) = one.sent()
    assert isinstance(submit, m.Submit)
    assert (submit.sequence, submit.attempt) == (2, 1)


def test_an_instance_that_joins_again_before_it_has_left_stays() -> None:
    one = joined(Driver("a").up(), "b")
    one.open(1)
    assert one.open(2, request=2) == "b"
    one.on(e.Left("b"))
    one.on(e.Joined("b"))
    assert one.fleet.table.instances["b"].state is InstanceState.UP
    one.tokens("b", 2, 8, finish="length")
    assert one.of(e.Forget) == []


def test_a_name_that_left_may_join_again() -> None:
    one = joined(Driver("a").up(), "b")
    one.on(e.Left("b"))
    joined(one, "b")
    one.open(1)
    assert one.open(2, request=2) == "b"


def test_a_paused_sequence_of_one_that_left_ends_if_no_other_may_take_it() -> None:
    one = joined(Driver("a").up(), "b")
    one.open(1, pinned="b")
    one.on(e.Paused((1,)))
    one.on(e.Left("b"))
    assert [event.finish for event in one.delivered()] == ["error"]


def test_a_sequence_whose_sender_has_left_begins_again() -> None:
    one = Driver("p", "d", roles={"p": "prefill", "d": "decode"}, local_prefill=False)
    one.up()
    one.on(e.Joined("q"))
    one.roles["q"] = "prefill"
    one.up("q")
    one.on(e.Left("q"))
    one.on(
        e.Opened(
            (
                m.Submit(
                    sequence=1,
                    request=1,
                    seed=7,
                    prompt_ids=m.ids_to_bytes([1, 2, 3]),
                    params=TokenParams(max_tokens=9),
                ),
            )
        )
    )
    assert {action.instance for action in one.of(e.Send)} == {"p", "d"}
    one.tokens("p", 1, 7, finish="moved", position=0)
    one.on(e.Left("p"))
    assert one.of(e.Forget) == [e.Forget("p")]
    one.tokens("d", 1, finish="evicted", error=PeerEnded("the peer has ended").info())
    assert 1 in one.fleet.entries  # waits for another prefill engine
    assert one.fleet.entries[1].losses == 1


def test_a_handed_off_sequence_shows_a_token_in_time_after_its_sender_has_left() -> None:
    """The end of a sender on another host may be invisible to the decode engine."""
    one = Driver("p", "q", "d", roles={"p": "prefill", "q": "prefill", "d": "decode"}, local_prefill=False)
    one.up()
    prompt = m.ids_to_bytes([1, 2, 3])
    params = TokenParams(max_tokens=9)
    one.on(e.Opened((m.Submit(sequence=1, request=1, seed=7, prompt_ids=prompt, params=params),)))
    (sender,) = {action.instance for action in one.of(e.Send)} - {"d"}
    one.tokens(sender, 1, 7, finish="moved", position=0)
    one.on(e.Left(sender))
    assert one.of(e.Forget) == [e.Forget(sender)]
    one.wait(PATIENCE.transfer + 1)
    (other,) = {"p", "q"} - {sender}
    again = {action.instance for action in one.of(e.Send) if isinstance(action.message, m.Submit)}
    assert again == {other, "d"}
    assert one.fleet.entries[1].losses == 1


def test_requests_fail_in_time_after_the_last_has_left_and_go_on_with_the_next() -> None:
    one = Driver("a").up()
    one.on(e.Left("a"))
    one.now += 1000.0
    one.on(e.Tick())
    refusal = one.fleet.refusal()
    assert refusal is not None
    assert refusal.http_status == 503
    assert one.fleet.failure is None
    joined(one, "b")
    assert one.fleet.refusal() is None
    assert one.open(1) == "b"
