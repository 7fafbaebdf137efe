"""Images encoded at separate instances: choice of the encoder, messages, and losses."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from tests.control.fleet.driver import DIED, PATIENCE, Driver, error_of
from tests.control.fleet.test_pairs import finished, missing, over, said, submitted, where
from weft.common.errors import EndedElsewhere, ImageFailed, InvalidRequest, PeerEnded, RanksLost
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.encoders import MARGIN, choose, transfer_of
from weft.control.fleet.instances import PROMPT_TOKENS, Instance, InstanceState
from weft.control.fleet.ledger import LedgerEntry
from weft.control.fleet.open_sequences import MOST_REFUSALS
from weft.types import messages as m
from weft.types.media_item import MediaItem, without_pixels
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey, TransferParameters

ROLES: dict[str, m.Role] = {
    "p": "prefill",
    "q": "prefill",
    "d": "decode",
    "f": "decode",
    "x": "encode",
    "y": "encode",
    "z": "encode",
    "u": "unified",
    "v": "unified",
}


class Rig(Driver):
    """p and q prefill, d and f decode, x, y and z encode, u and v do everything except encode."""

    def __init__(
        self, *names: str, towers: str = "", prints: dict[str, str] | None = None, **more: Any
    ) -> None:
        """Build the fleet. ``towers``: instances that encode locally. ``prints``: tower fingerprints of
        some."""
        self.towers, self.prints = towers, prints or {}
        super().__init__(*names, roles={name: ROLES[name] for name in names}, **more)

    def welcome(self, name: str) -> m.Welcome:
        return replace(
            super().welcome(name),
            tower=name in self.towers or ROLES[name] == "encode",
            embeddings="" if ROLES[name] == "decode" else f"ipc://{name}-embeddings",
            tower_fingerprint=self.prints.get(name, "tower"),
        )


def rig(*names: str, **settings: Any) -> Rig:
    made = Rig(*names, **settings)
    made.up()
    return made


def image(number: int, start: int = 0, count: int = 4) -> MediaItem:
    return MediaItem(
        key=number.to_bytes(16, "little"),
        start=start,
        count=count,
        grid=(1, 4, 4),
        pixels=bytes([number]) * 48,
    )


def pictures(count: int, first: int = 0) -> tuple[MediaItem, ...]:
    return tuple(image(first + number, 4 * number) for number in range(count))


def ask(one: Driver, *sequences: int, request: int = 1, **fields: Any) -> list[tuple[str, m.Submit]]:
    fields.setdefault("media", pictures(1))
    fields.setdefault("prompt_ids", m.ids_to_bytes([1] * 40))
    fields.setdefault("params", TokenParams(max_tokens=9, logit_bias=((1, 2.0),)))
    submits = tuple(
        m.Submit(sequence=sequence, request=request, choice=choice, seed=7, **fields)
        for choice, sequence in enumerate(sequences)
    )
    one.on(e.Opened(submits))
    return submitted(one)


def ends(one: Driver, name: str, sequence: int) -> None:
    """Report two tokens and the end, from the instance that decodes."""
    position = -1 if one.fleet.entries[sequence].pair is None else 0
    if position == 0:
        one.tokens("p", sequence, 7, position=0, finish="moved")
        one.tokens(name, sequence, 7, position=0)
        position = 1
    one.tokens(name, sequence, 8, finish="length", position=position)
    assert said(one)[-1] == ((8,), "length")


# -- what is sent


@pytest.mark.requirement("D27")
def test_three_instances_have_a_part_in_a_sequence_with_an_image() -> None:
    one = rig("x", "p", "d")
    parts = ask(one, 5, session="s", explain=True)
    assert [name for name, _ in parts] == ["d", "p", "x"]  # the receiving instance knows a transfer first
    decode, prefill, encode = (submit for _, submit in parts)
    assert decode.media == without_pixels(pictures(1))
    key = TransferKey(transfer_of(5, 0), 0, one.link["x"])
    there, here = Peer("ipc://p-embeddings", one.link["p"]), Peer("ipc://x-embeddings", one.link["x"])
    (received,), (sent,) = prefill.media, encode.media
    assert received == replace(
        image(0), pixels=b"", transfer=TransferParameters(key, False, here, PATIENCE.transfer)
    )
    assert sent == replace(image(0), transfer=TransferParameters(key, True, there, PATIENCE.transfer))
    assert (encode.sequence, encode.attempt, encode.transfer) == (5, 0, None)
    assert (encode.prompt_ids, encode.params, encode.session, encode.explain) == (
        b"",
        TokenParams(),
        "",
        False,
    )
    assert prefill.transfer is not None
    assert prefill.transfer.sends
    assert prefill.prompt_ids == decode.prompt_ids != b""
    assert one.fleet.encodes == {"first": 1, "again": 0}
    loads = dict(zip(("x", "p", "d"), one.loads(), strict=True))
    assert loads["x"] == 1 + 4 / PROMPT_TOKENS  # the image's tokens
    assert loads["p"] == 1 + 40 / PROMPT_TOKENS
    one.tokens("x", 5, finish="moved")
    assert (said(one), one.sent()) == ([], [])
    assert one.loads()[0] == 0
    ends(one, "d", 5)
    over(one)


def test_one_instance_computes_and_decodes_what_another_one_has_encoded() -> None:
    one = rig("x", "u")
    (_, unified), (_, encode) = ask(one, 5)
    assert unified.transfer is None
    assert [item.pixels for item in unified.media] == [b""]
    assert [item.transfer is not None and item.transfer.sends for item in encode.media] == [True]
    one.tokens("x", 5, finish="moved")
    one.tokens("u", 5, 7)
    assert said(one) == [((7,), None)]
    ends(one, "u", 5)
    over(one)


def test_text_goes_to_no_instance_that_encodes() -> None:
    one = rig("x", "y", "u")
    for number in range(1, 9):
        assert [name for name, _ in ask(one, number, request=number, media=())] == ["u"]
    one = rig("x", "p", "d")
    assert [name for name, _ in ask(one, 1, media=())] == ["d", "p"]


@pytest.mark.requirement("D27")
def test_images_of_one_prompt_go_to_those_they_belong_to() -> None:
    one = rig("x", "y", "z", "u")
    parts = ask(one, 5, media=pictures(12))
    by_key = {item.key: name for name, submit in parts[1:] for item in submit.media}
    assert len(by_key) == 12
    assert set(by_key.values()) == {"x", "y", "z"}
    compute = parts[0][1]
    assert [item.key for item in compute.media] == [item.key for item in pictures(12)]
    peers = {item.key: item.transfer.peer.name for item in compute.media if item.transfer is not None}
    assert peers == {key: f"ipc://{name}-embeddings" for key, name in by_key.items()}
    transfers = [item.transfer.key for item in compute.media if item.transfer is not None]
    assert len({key.transfer for key in transfers}) == 12
    other = rig("u", "z", "y", "x")  # another API server, with another order of instances
    again = ask(other, 9, request=3, media=pictures(12))
    assert {item.key: name for name, submit in again[1:] for item in submit.media} == by_key
    for name in ("x", "y", "z"):
        one.tokens(name, 5, finish="moved")
    ends(one, "u", 5)
    over(one)


def _instances(*names: str) -> list[Instance]:
    return [Instance(name, order=order) for order, name in enumerate(names)]


def test_only_images_of_an_instance_that_is_gone_move() -> None:
    all_three = _instances("x", "y", "z")
    items = pictures(200)
    before = choose(all_three, items)
    for name in ("x", "y", "z"):
        left = [one for one in all_three if one.name != name]
        after = choose(left, items)
        moved = [a.name for a, b in zip(before, after, strict=True) if a is not b]
        assert set(moved) == {name}
    assert min(Counter(one.name for one in before).values()) > 40


@pytest.mark.requirement("D27")
def test_an_instance_with_far_more_to_do_gets_no_image_for_now() -> None:
    busy, idle = _instances("x", "y")
    items = [image(number) for number in range(40)]
    mine = [item for item in items if choose([busy, idle], [item])[0] is busy]
    assert 5 < len(mine) < 35
    busy.begin(1, int((MARGIN - 1) * PROMPT_TOKENS))
    assert {choose([busy, idle], [item])[0].name for item in mine} == {"x"}
    busy.begin(2, 0)
    busy.begin(3, 0)
    assert {choose([busy, idle], [item])[0].name for item in mine} == {"y"}
    big = [replace(image(number), count=4096) for number in range(8)]
    assert Counter(one.name for one in choose(_instances("x", "y"), big)) == {"x": 4, "y": 4}


def test_choices_of_a_prompt_share_what_comes_for_the_first() -> None:
    one = rig("x", "p", "d")
    parts = ask(one, 5, 6, 7)
    assert [(name, submit.sequence) for name, submit in parts if name == "x"] == [("x", 5)]
    computes = {submit.sequence: submit.media for name, submit in parts if name == "p"}
    assert computes[5][0].transfer is not None
    assert computes[6] == computes[7] == without_pixels(pictures(1))
    one.give_back("p", 6)  # the instance found that the image is missing
    parts = submitted(one)
    assert [name for name, _ in parts] == ["d", "p", "x"]
    assert {submit.sequence for _, submit in parts} == {6}
    assert parts[1][1].media[0].transfer is not None
    assert parts[2][1].media[0].pixels


# -- choice of encoders


def test_encoders_with_another_fingerprint_are_not_used() -> None:
    one = rig("x", "y", "u", prints={"x": "other"})
    assert {name for number in range(1, 9) for name, _ in ask(one, number, request=number)} == {"u", "y"}
    assert one.fleet.table.unpaired == 1
    one = rig("x", "p", "q", "d", prints={"q": "other"})
    assert {name for number in range(1, 9) for name, _ in ask(one, number, request=number)} == {"d", "p", "x"}


@pytest.mark.requirement("D18")
def test_without_one_that_encodes_pixels_go_to_a_tower_where_there_is_one() -> None:
    one = rig("x", "u", "v", towers="v")
    one.lose("x")
    ((name, submit),) = ask(one, 1)
    assert name == "v"
    assert submit.media == pictures(1)
    one.lose("v")
    assert submitted(one) == []
    one.up("x")
    assert where(one) == ["u", "x"]


def test_without_groups_that_encode_nothing_changes() -> None:
    one = Driver("u").up()
    ((name, submit),) = ask(one, 1)
    assert (name, submit.media) == ("u", pictures(1))


@pytest.mark.parametrize("names", [("x", "u"), ("x", "p", "d")])
def test_images_wait_for_one_that_encodes_and_text_does_not(names: tuple[str, ...]) -> None:
    one = rig(*names)
    one.lose("x")
    assert ask(one, 1) == []
    assert ask(one, 2, request=2, media=()) != []
    one.wait(PATIENCE.role - 1)
    assert one.fleet.refusal() is None
    one.up("x")
    assert "x" in where(one)


@pytest.mark.requirement("D18")
@pytest.mark.parametrize("names", [("x", "u"), ("x", "p", "d")])
def test_images_fail_by_name_when_none_that_encodes_comes(names: tuple[str, ...]) -> None:
    one = rig(*names)
    one.lose("x")
    ask(one, 1)
    one.wait(PATIENCE.recovery - 1)  # the instance will be started again
    assert one.delivered() == []
    one.wait(1)
    error = error_of(one.delivered()[0])
    assert (error.message, error.http_status) == (missing("encode"), 503)
    assert ask(one, 2, request=2) == []
    assert error_of(one.delivered()[0]).message == missing("encode")
    assert one.fleet.refusal() is None  # text needs no missing role
    assert ask(one, 3, request=3, media=()) != []
    one.up("x")
    assert {name for name, _ in ask(one, 4, request=4)} == set(names)


def test_sequences_do_not_wait_for_a_retired_instance() -> None:
    one = rig("x", "u")
    one.on(e.Unreachable("x", one.link["x"]))
    assert one.fleet.table.awaited
    one.on(e.Retired("x", DIED))
    assert not one.fleet.table.awaited
    ask(one, 1)
    one.wait(PATIENCE.role)
    assert error_of(one.delivered()[0]).message == missing("encode")


def test_images_that_wait_cost_nothing_when_others_are_told_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting images cost nothing per event: each is looked at again once an encoder is there."""
    one = rig("x", "u")
    ask(one, 4, request=4, media=())
    one.lose("x")
    for number in range(5, 15):
        ask(one, number, request=number)
    asked: list[int] = []
    route = one.fleet.router.route

    def counted(*rest: Any) -> Any:
        asked.append(1)
        return route(*rest)

    monkeypatch.setattr(one.fleet.router, "route", counted)
    for _ in range(3):
        one.tokens("u", 4, 7)
    assert asked == []
    one.up("x")
    assert len(one.fleet.entries[5].places) == len(one.fleet.entries[14].places) == 2


def test_one_that_was_begun_waits_as_long_as_for_any_engine() -> None:
    one = rig("x", "u")
    ask(one, 1)
    one.lose("x")
    one.wait(PATIENCE.recovery - 1)
    assert list(one.fleet.entries) == [1]
    one.up("x")
    assert where(one) == ["u", "x"]


def test_where_none_that_encodes_will_come_images_wait_for_a_role_alone() -> None:
    one = rig("x", "u")
    one.lose("x")
    one.on(e.Retired("x", InvalidRequest("gone")))
    ask(one, 1)
    one.wait(PATIENCE.role)
    assert [error_of(event).message for event in one.delivered()] == [missing("encode")]


def test_a_planned_restart_of_the_only_one_that_encodes_refuses_no_image() -> None:
    one = rig("x", "u")
    one.on(e.Draining("x"))
    assert ask(one, 1) == []
    one.wait(PATIENCE.recovery + 1)
    one.lose("x")
    one.wait(PATIENCE.recovery - 1)
    assert one.delivered() == []
    one.up("x")
    assert where(one) == ["u", "x"]


def test_a_fallback_that_decodes_gets_no_images(caplog: pytest.LogCaptureFixture) -> None:
    """The fallback has neither a tower nor embeddings. Images wait, and the error names the missing role."""
    one = rig("x", "p", "d")
    one.lose("p")
    one.wait(PATIENCE.role + 1)
    assert "prompts without images; prompts with images wait" in caplog.text
    assert [name for name, _ in ask(one, 1, media=())] == ["d"]
    assert ask(one, 2, request=2) == []
    one.wait(PATIENCE.recovery - PATIENCE.role)
    assert [(event.sequence, error_of(event).message) for event in one.delivered()] == [
        (2, missing("prefill"))
    ]


def test_a_fallback_that_decodes_gets_images_where_it_has_a_tower(caplog: pytest.LogCaptureFixture) -> None:
    one = rig("x", "p", "d", towers="d")
    one.lose("p")
    one.wait(PATIENCE.role + 1)
    assert "prompts without images" not in caplog.text
    ((name, submit),) = ask(one, 1)
    assert (name, submit.media) == ("d", pictures(1))


def test_a_fleet_does_not_live_on_encoders() -> None:
    one = rig("x", "u")
    one.lose("u")
    assert not one.fleet.table.alive
    assert ask(one, 1, media=()) == []
    one.on(e.Retired("u", InvalidRequest("gone")))
    assert one.fleet.failure is not None
    one = rig("x", "u")
    one.lose("x")
    assert one.fleet.table.alive
    assert not one.fleet.table.whole
    one.on(e.Retired("x", InvalidRequest("gone")))
    assert one.fleet.failure is None


# -- what goes wrong


@pytest.mark.requirement("D19")
def test_images_of_one_that_is_lost_are_encoded_elsewhere() -> None:
    one = rig("x", "y", "p", "d")
    parts = dict(ask(one, 5, media=pictures(6)))
    assert set(parts) == {"x", "y", "p", "d"}
    one.tokens("y", 5, finish="moved")
    one.lose("x")
    assert sorted(finished(one)) == ["d", "p"]
    again = dict(submitted(one))
    assert set(again) == {"y", "p", "d"}
    assert len(again["y"].media) == 6
    assert {submit.attempt for submit in again.values()} == {1}
    transfers = {
        item.transfer.key for each in (parts, again) for item in each["p"].media if item.transfer is not None
    }
    assert len(transfers) == 12  # no transfer is used twice
    assert one.fleet.entries[5].losses == 1
    assert one.fleet.encodes == {"first": 6, "again": 6}
    one.tokens("p", 5, finish="evicted", attempt=0, error=PeerEnded("gone").info())
    assert (said(one), one.sent()) == ([], [])  # a report of the same loss
    one.tokens("y", 5, finish="moved")
    ends(one, "d", 5)
    over(one)


@pytest.mark.requirement("D19")
def test_the_loss_of_one_that_is_done_changes_nothing() -> None:
    one = rig("x", "p", "d")
    ask(one, 5)
    one.tokens("x", 5, finish="moved")
    one.lose("x")
    assert (submitted(one), said(one)) == ([], [])
    assert one.fleet.entries[5].losses == 0
    ends(one, "d", 5)
    over(one)


@pytest.mark.requirement("D19")
@pytest.mark.parametrize("how", ["lost", "evicted", "moved"])
@pytest.mark.parametrize("names", [("x", "p", "d"), ("x", "u")])
def test_after_the_first_token_nothing_of_an_encoder_matters(names: tuple[str, ...], how: str) -> None:
    one = rig(*names)
    ask(one, 5)
    if "u" in names:
        one.tokens("u", 5, 7)
    else:
        one.tokens("p", 5, 7, position=0)
    if how == "lost":
        one.lose("x")
    else:
        one.tokens("x", 5, finish=how)
    assert (submitted(one), said(one)) == ([], [])
    assert one.fleet.entries[5].losses == 0
    assert one.loads()[0] == 0


def test_the_loss_of_one_that_prefills_after_its_part_leaves_the_one_that_decodes_to_go_on() -> None:
    """The encoder has not yet reported that its part is done."""
    one = rig("x", "p", "d")
    ask(one, 5)
    one.tokens("d", 5, 7, position=0)
    assert said(one) == []
    one.lose("p")
    assert said(one) == [((7,), None)]
    one.tokens("d", 5, 8, position=1, finish="length")
    assert said(one) == [((8,), "length")]
    assert finished(one) == ["x"]
    over(one)


@pytest.mark.requirement("D19")
def test_one_that_gives_back_is_avoided() -> None:
    one = rig("x", "y", "u")
    parts = dict(ask(one, 5))
    (who,) = set(parts) - {"u"}
    one.tokens(who, 5, finish="evicted")
    assert finished(one) == ["u"]
    (other,) = set(where(one)) - {"u"}
    assert other != who


def test_one_without_room_is_avoided_while_there_is_another_and_then_waited_for() -> None:
    one = rig("x", "y", "u")
    (who,) = set(dict(ask(one, 5))) - {"u"}
    one.refuse(who, 5)
    (other,) = set(where(one)) - {"u"}
    assert other != who
    for _ in range(2 * MOST_REFUSALS - 1):
        (who,) = entry_of(one).encoders
        one.refuse(who, 5)
        assert one.delivered() == []
        while 5 in one.fleet._parked:
            one.now = one.fleet._parked.deadline()
            for each in ("x", "y", "u"):
                one.say(each, m.Heartbeat(idle=True, stats=m.EngineStats()))
            one.on(e.Tick())
    (who,) = entry_of(one).encoders
    one.refuse(who, 5)
    assert error_of(one.delivered()[0]).http_status == 503
    over(one)


def entry_of(one: Driver) -> LedgerEntry:
    return one.fleet.entries[5]


@pytest.mark.requirement("D27")
def test_a_sequence_returned_too_often_ends() -> None:
    one = rig("x", "u")
    ask(one, 5)
    for _ in range(MOST_REFUSALS):
        one.give_back("x", 5)
        assert where(one) == ["u", "x"]
    one.tokens("x", 5, finish="evicted")
    assert error_of(one.delivered()[0]).http_status == 503
    over(one)


def test_an_image_that_cannot_be_encoded_ends_its_request() -> None:
    one = rig("x", "p", "d")
    ask(one, 5)
    one.tokens("x", 5, finish="error", error=InvalidRequest("the image is broken").info())
    error = error_of(one.delivered()[0])
    assert (error.message, error.http_status) == ("the image is broken", 400)
    assert sorted(finished(one)) == ["d", "p"]
    over(one)


@pytest.mark.parametrize("names", [("x", "p", "d"), ("x", "u")])
def test_a_failed_image_ends_the_request_if_the_computing_engine_reports_first(
    names: tuple[str, ...],
) -> None:
    """The engine sees the transfer fail. A further encoding would fail as well."""
    one = rig(*names)
    ask(one, 5)
    one.tokens(names[1], 5, finish="evicted", error=ImageFailed("the image is broken").info())
    error = error_of(one.delivered()[0])
    assert (error.message, error.http_status) == ("the image is broken", 400)
    assert sorted(finished(one)) == sorted({*names} - {names[1]})
    one.tokens("x", 5, finish="error", error=ImageFailed("the image is broken").info())
    over(one)


@pytest.mark.parametrize("names", [("x", "p", "d"), ("x", "u")])
def test_an_end_where_the_prompt_is_computed_is_an_end_though_the_encoder_reports_first(
    names: tuple[str, ...],
) -> None:
    """A request may end before its images arrive, for example if its grammar does not compile."""
    one = rig(*names)
    ask(one, 5)
    ended = EndedElsewhere("it has ended at the other end").info()
    one.tokens("x", 5, finish="evicted", error=ended)
    assert (one.sent(), one.delivered()) == ([], [])
    one.tokens(names[1], 5, finish="error", error=InvalidRequest("no grammar").info())
    assert [error_of(event).code for event in one.delivered()] == ["invalid_request"]
    over(one)


def test_a_sequence_that_loses_too_many_ends() -> None:
    one = rig("x", "u")
    ask(one, 5)
    for time in range(MOST_LOSSES):
        one.lose("x")
        assert one.fleet.entries[5].losses == time + 1
        one.up("x")
        one.wait(1)
    one.lose("x")
    assert error_of(one.delivered()[0]).code == "engine_dead"
    over(one)


def test_ranks_that_were_lost_count_as_a_loss() -> None:
    one = rig("x", "u")
    ask(one, 5)
    one.tokens("x", 5, finish="evicted", error=RanksLost("lost").info())
    assert where(one) == ["u", "x"]
    assert one.fleet.entries[5].losses == 1


def test_one_that_encodes_says_that_the_one_that_computes_has_ended() -> None:
    one = rig("x", "p", "q", "d")
    (who,) = set(dict(ask(one, 5))) - {"x", "d"}
    one.tokens("x", 5, finish="evicted", error=PeerEnded("gone").info())
    assert one.fleet.table.instances[who].shunned
    assert not one.fleet.table.instances["d"].shunned
    (other,) = set(where(one)) - {"x", "d"}
    assert other != who


def test_an_ambiguous_peer_failure_shuns_no_instance() -> None:
    """The computing instance has a decode peer and an encode peer. The report does not tell which one
    ended."""
    one = rig("x", "y", "p", "d")
    (who,) = set(dict(ask(one, 5))) - {"p", "d"}
    one.tokens("p", 5, finish="evicted", error=PeerEnded("gone").info())
    assert not any(instance.shunned for instance in one.fleet.table.instances.values())
    assert one.fleet.entries[5].losses == 0
    while not submitted(one):
        one.now = one.fleet.next_deadline()
        one.on(e.Tick())
    (other,) = set(where(one)) - {"p", "d"}
    assert other != who


def test_one_that_decodes_means_the_one_that_computes() -> None:
    """The cache comes from the computing instance; no image goes to the decode instance."""
    one = rig("x", "p", "q", "d")
    (who,) = set(dict(ask(one, 5))) - {"x", "d"}
    one.tokens("d", 5, finish="evicted", error=PeerEnded("gone").info())
    assert [name for name, each in one.fleet.table.instances.items() if each.shunned] == [who]
    assert one.fleet.entries[5].losses == 1


def test_paused_sequences_leave_those_that_encode_too() -> None:
    one = rig("x", "u")
    ask(one, 5)
    one.on(e.Paused((5,)))
    assert sorted(finished(one)) == ["u", "x"]
    assert set(one.loads()) == {0}
    one.on(e.Resumed((5,)))
    assert where(one) == ["u", "x"]
    one.on(e.Closed((5,)))
    assert sorted(finished(one)) == ["u", "x"]
    over(one)


def test_one_that_drains_gets_no_more_images() -> None:
    one = rig("x", "y", "u")
    ask(one, 1)
    one.on(e.Draining("x"))
    assert submitted(one) == []
    for number in range(2, 9):
        assert {name for name, _ in ask(one, number, request=number, media=pictures(1, number))} == {"u", "y"}


def test_one_that_died_in_a_row_gets_one_sequence_at_a_time() -> None:
    one = rig("x", "u")
    for _ in range(2):
        one.lose("x")
        one.up("x")
    assert one.fleet.table.instances["x"].state is InstanceState.HALF_OPEN
    assert [name for name, _ in ask(one, 1)] == ["u", "x"]
    assert ask(one, 2, request=2) == []
    one.tokens("x", 1, finish="moved")
    assert one.fleet.table.instances["x"].state is InstanceState.UP
    assert where(one) == ["u", "x"]


def test_transfers_have_numbers_of_their_own() -> None:
    numbers = {transfer_of(sequence, image) for sequence in range(300) for image in range(30)}
    assert len(numbers) == 9000
    assert max(numbers) < 1 << 64
