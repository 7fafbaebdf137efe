"""A prefill instance that has no transport to one of its decode instances."""

from __future__ import annotations

import pytest

from tests.control.fleet.driver import Driver, error_of
from tests.control.fleet.test_pairs import ask, finished, over, pairs, rest, submitted, where
from weft.common.errors import NoCommonTransport
from weft.control.fleet.open_sequences import MOST_REFUSALS

NO_WAY = NoCommonTransport("two engines share no memory").info()


def no_way(one: Driver, name: str, sequence: int) -> None:
    one.tokens(name, sequence, finish="evicted", error=NO_WAY)


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_request_goes_at_once_to_a_decoder_that_can_be_reached(who: str) -> None:
    """The decode instance without a transport has the lowest load, since all its sequences fail."""
    one = pairs("p", "d", "f")
    for sequence in (1, 2, 3, 4):
        ask(one, sequence, request=sequence)
        if "d" in where(one):
            no_way(one, who, sequence)
        assert sorted(where(one)) == ["f", "p"]
    assert {name for entry in one.fleet.entries.values() for name in entry.places} == {"p", "f"}


def test_another_prefill_instance_comes_before_the_one_without_a_transport() -> None:
    one = pairs("p", "q", "d", "f")
    first = where_after(one)
    assert len(first) == 2
    assert not {"p", "d"} & set(first)


def where_after(one: Driver) -> list[str]:
    """Let the pair of p and d fail, and return the next pair."""
    ask(one, 1)
    assert sorted(where(one)) == ["d", "p"]
    no_way(one, "p", 1)
    return where(one)


def test_an_instance_that_does_both_takes_the_request() -> None:
    one = pairs("p", "d", "u")
    assert where_after(one) == ["u"]


def test_the_only_pair_is_tried_a_few_times() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    for _ in range(MOST_REFUSALS):
        no_way(one, "p", 1)
        while not submitted(one):
            one.wait(1.0)
    no_way(one, "p", 1)
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    assert finished(one) == ["d"]
    over(one)


def test_a_token_ends_the_avoidance() -> None:
    one = pairs("p", "d")
    where_after(one)
    one.tokens("p", 1, 7, position=0, finish="moved")
    rest(one, "d", 1)
