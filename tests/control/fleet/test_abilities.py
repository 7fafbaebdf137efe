"""Sequences that need a later release go to an engine that understands them, or get a clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tests.control.fleet.driver import Driver, error_of
from weft.control.fleet import events as e
from weft.control.fleet.instances import InstanceState
from weft.types import messages as m
from weft.types.grammar import Text
from weft.types.media import MediaItem
from weft.types.sampling import TokenParams

NEW: list[tuple[dict[str, Any], str]] = [
    ({"grammar": Text("yes")}, "response formats and tool grammars"),
    ({"pooling": "last"}, "embeddings"),
]
IMAGES = {"media": (MediaItem(key=bytes(16), start=0, count=4, grid=(1, 4, 4), pixels=bytes(99)),)}


@pytest.mark.parametrize(("fields", "what"), NEW)
def test_they_go_to_one_that_understands_them(fields: dict[str, Any], what: str) -> None:
    one = Driver("a", "b", versions={"a": 3, "b": 4}).up()
    for number in range(1, 9):
        assert one.open(number, request=number, **fields) == "b"
    assert one.open(99, request=99) == "a"


@pytest.mark.parametrize(("fields", "what"), NEW)
def test_where_none_does_the_upgrade_is_named(fields: dict[str, Any], what: str) -> None:
    one = Driver("a", "b", versions={"a": 3, "b": 2}).up()
    assert one.open(1, 2, **fields) is None
    errors = [error_of(event) for event in one.told()]
    assert [(error.code, error.http_status, error.retryable) for error in errors] == [
        ("unavailable", 503, True)
    ] * 2
    assert what in errors[0].message
    assert "upgrade" in errors[0].message
    assert one.fleet.entries == {}
    assert one.open(3, request=3) == "a"


def test_what_an_older_one_can_do_without_is_left_out() -> None:
    one = Driver("a", "b", versions={"a": 3, "b": 4}).up()
    sent = {}
    for number in (1, 2):
        name = one.open(number, request=number, explain=True, session=f"s{number}")
        (submit,) = [message for message in one.sent() if isinstance(message, m.Submit)]
        sent[name] = (submit.explain, submit.session)
    assert sent == {"a": (False, ""), "b": (True, "s2")}


def test_one_that_lost_its_engine_goes_to_no_older_one() -> None:
    one = Driver("a", "b", versions={"a": 4, "b": 3}).up()
    assert one.open(1, grammar=Text("yes")) == "a"
    one.tokens("a", 1, 5)
    one.lose("a")
    assert not [sent for sent in one.sent() if isinstance(sent, m.Submit)]
    assert "upgrade" in error_of(one.told()[-1]).message


def test_one_continues_with_its_grammar_elsewhere() -> None:
    one = Driver("a", "b", versions={"a": 4, "b": 4}).up()
    assert one.open(1, grammar=Text("yes")) == "a"
    one.tokens("a", 1, 5)
    one.lose("a")
    (submit,) = [sent for sent in one.sent() if isinstance(sent, m.Submit)]
    assert (submit.grammar, m.ids_from_bytes(submit.emitted_ids).tolist()) == (Text("yes"), [5])


def test_pairs_are_made_of_those_that_understand() -> None:
    roles: dict[str, m.Role] = {"p": "prefill", "q": "prefill", "d": "decode"}
    one = Driver("p", "q", "d", roles=roles, versions={"p": 3, "q": 4, "d": 4}).up()
    assert opened(one, 1) == {"q", "d"}


def test_they_wait_while_no_engine_takes_sequences() -> None:
    one = Driver("a", versions={"a": 4}).up()
    one.lose("a")
    assert one.open(1, grammar=Text("yes")) is None
    assert one.told() == []


def test_images_go_to_one_that_understands_them() -> None:
    one = Driver("a", "b", versions={"a": 4, "b": 5}).up()
    for number in range(1, 9):
        assert one.open(number, request=number, **IMAGES) == "b"
    one.lose("b")
    assert not [sent for sent in one.sent() if isinstance(sent, m.Submit) and sent.media]
    assert "supports images" in error_of(one.told()[-1]).message
    assert one.open(99, request=99) == "a"


def opened(one: Driver, number: int, grammar: Text | None = Text("yes")) -> set[str]:
    """Open a sequence. Return the names of the instances that get the sequence."""
    submit = m.Submit(
        sequence=number,
        request=number,
        seed=7,
        prompt_ids=m.ids_to_bytes([1, 2]),
        params=TokenParams(),
        grammar=grammar,
    )
    one.on(e.Opened((submit,)))
    return {action.instance for action in one.of(e.Send)}


def test_they_wait_while_the_one_that_understands_gets_one_prompt_at_a_time() -> None:
    one = Driver("a", "b", versions={"a": 3, "b": 4}).up()
    for _ in range(2):
        one.lose("b")
        one.up("b")
    assert one.fleet.table.instances["b"].state is InstanceState.HALF_OPEN
    assert opened(one, 1) == {"b"}
    assert opened(one, 2) == set()
    assert one.told() == []
    one.tokens("b", 1, 5, finish="stop")
    assert [sent.sequence for sent in one.sent() if isinstance(sent, m.Submit)] == [2]


@pytest.mark.parametrize("old", ["p", "d"])
def test_a_pair_of_which_one_is_too_old_is_told_so_at_once(old: str) -> None:
    roles: dict[str, m.Role] = {"p": "prefill", "d": "decode"}
    one = Driver("p", "d", roles=roles, versions={"p": 4, "d": 4, old: 3}).up()
    assert opened(one, 1) == set()
    assert "upgrade" in error_of(one.told()[-1]).message
    assert one.fleet.entries == {}
    assert opened(one, 2, grammar=None) == {"p", "d"}
