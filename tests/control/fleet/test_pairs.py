"""Prefill and decode at two instances: messages, and events while both, one or none is available."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tests.control.fleet.driver import DIED, PATIENCE, Driver, error_of, ids
from tests.control.fleet.pair_model import columns
from weft.common.errors import EndedElsewhere, ErrorInfo, PeerEnded, RanksLost
from weft.common.restarts import MOST_LOSSES
from weft.control.fleet import fleet_events as e
from weft.control.fleet.instance_table import HEALTHY_S
from weft.control.fleet.instances import InstanceState
from weft.control.fleet.open_sequences import LATE, LONGEST_WAIT_S, MOST_REFUSALS, NO_ROLE, UNFIT
from weft.control.fleet.policy import DEFAULT_BLOCK
from weft.types import messages as m
from weft.types.adapters import AdapterChanged
from weft.types.media_item import MediaItem
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey, TransferParameters

ROLES: dict[str, m.Role] = {"p": "prefill", "q": "prefill", "d": "decode", "f": "decode"}


def pairs(*names: str, **settings: Any) -> Driver:
    """Return a fleet of ``names``: p and q prefill, d and f decode, others do both."""
    roles = {name: ROLES[name] for name in names if name in ROLES}
    return Driver(*names, roles=roles, **settings).up()


def ask(one: Driver, *sequences: int, request: int = 1, **fields: Any) -> list[tuple[str, m.Submit]]:
    """Open sequences of one prompt. Return the messages sent for the sequences."""
    fields.setdefault("prompt_ids", m.ids_to_bytes([1, 2, 3]))
    fields.setdefault("params", TokenParams(max_tokens=9))
    submits = tuple(
        m.Submit(sequence=sequence, request=request, choice=choice, seed=7, **fields)
        for choice, sequence in enumerate(sequences)
    )
    one.on(e.Opened(submits))
    return submitted(one)


def test_requests_go_to_groups_with_the_adapter() -> None:
    """Both instances of a pair must have loaded the adapter. Without any, the request waits."""
    one = pairs("p", "q", "d", "f")
    digest = "a" * 32
    assert ask(one, 1, adapter=digest) == []
    for name in ("q", "f"):
        one.say(name, AdapterChanged(digest=digest, loaded=True))
    assert where(one) == ["f", "q"]
    refused = AdapterChanged(digest=digest, loaded=False, error=DIED.info())
    for name in ("p", "d"):
        one.say(name, refused)
    for number in range(2, 8):
        ask(one, number, request=number, adapter=digest)
        assert where(one) == ["f", "q"]
    ask(one, 9, request=9)
    assert where(one) == ["d", "p"]
    # A new process has no adapter.
    one.lose("q")
    one.expect("q")
    one.welcome("q")
    assert not one.fleet.table.instances["q"].has_adapter(digest)
    assert one.fleet.table.instances["q"].has_adapter("")
    one.say("f", AdapterChanged(digest=digest, loaded=False))
    assert not one.fleet.table.instances["f"].has_adapter(digest)


def submitted(one: Driver) -> list[tuple[str, m.Submit]]:
    return [(sent.instance, sent.message) for sent in one.of(e.Send) if isinstance(sent.message, m.Submit)]


def where(one: Driver) -> list[str]:
    return [name for name, _ in submitted(one)]


def finished(one: Driver) -> list[str]:
    """Return the instances that got a Finish."""
    return [sent.instance for sent in one.of(e.Send) if isinstance(sent.message, m.Finish)]


def said(one: Driver) -> list[tuple[tuple[int, ...], str | None]]:
    return [(event.token_ids, event.finish) for event in one.delivered()]


def rest(one: Driver, name: str, sequence: int, start: int = 1, position: int = 1) -> None:
    """Report a token and the end, from the decode instance."""
    one.tokens(name, sequence, start + 7, position=position)
    assert said(one) == [((start + 7,), None)]
    one.tokens(name, sequence, start + 8, position=position + 1, finish="length")
    assert said(one) == [((start + 8,), "length")]
    over(one)


def over(one: Driver) -> None:
    """Check that no state is left."""
    assert one.fleet.entries == {}
    assert one.fleet.open.requests == {}
    assert set(one.loads()) == {0}


# -- what is sent


def test_both_of_a_pair_get_the_sequence_and_a_transfer() -> None:
    one = pairs("p", "d")
    (first, receives), (second, sends) = ask(one, 5)
    assert (first, second) == ("d", "p")
    key = TransferKey(5, 0, one.link["p"])
    assert receives.transfer == TransferParameters(
        key, False, Peer("ipc://p", one.link["p"]), PATIENCE.transfer
    )
    assert sends.transfer == TransferParameters(key, True, Peer("ipc://d", one.link["d"]), PATIENCE.transfer)
    assert (receives.attempt, sends.attempt, one.fleet.paired) == (0, 0, 1)
    prefill, decode = one.loads()
    assert prefill > decode == 1  # the prompt is computed at one instance


def test_pixels_go_to_the_one_that_computes_the_prompt() -> None:
    """In the next attempt, pixels go to the instance that then computes the prompt."""
    one = pairs("p", "d")
    image = MediaItem(key=bytes(16), start=0, count=1, grid=(1, 2, 2), pixels=b"pixels")
    (_, receives), (_, sends) = ask(one, 5, media=(image,))
    assert receives.media == (replace(image, pixels=b""),)
    assert sends.media == (image,)
    one.give_back("d", 5)
    again = dict(submitted(one))
    assert again["p"].media == (image,)
    assert again["d"].media == (replace(image, pixels=b""),)


def test_a_sequence_from_its_opening_to_its_end() -> None:
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("p", 5, 7, position=0, num_cached=2, finish="moved")
    assert said(one) == [((7,), None)]
    assert one.sent() == []
    assert one.loads() == [0, 1]
    one.tokens("d", 5, 7, position=0)  # reported by both instances
    assert one.delivered() == []
    one.tokens("d", 5, 8, position=1, num_cached=64)
    assert [(event.token_ids, event.num_cached) for event in one.delivered()] == [((8,), 2)]
    one.tokens("d", 5, 9, position=2, finish="length")
    assert [(event.finish, event.num_cached) for event in one.delivered()] == [("length", 2)]
    over(one)


def test_early_tokens_of_the_decode_instance_wait_for_the_prefill_instance() -> None:
    one = pairs("p", "d")
    ask(one, 5, params=TokenParams(max_tokens=9, prompt_logprobs=0))
    one.tokens("d", 5, 7, position=0, logprobs=columns(0, 1))
    one.tokens("d", 5, 8, position=1)
    one.tokens("d", 5, 9, position=2, finish="stop", stop_id=9)
    assert one.delivered() == []
    one.tokens("p", 5, prompt_logprobs=columns(0, 1))
    one.tokens("p", 5, 7, position=0, prompt_logprobs=columns(1, 1), num_cached=1, finish="moved")
    assert said(one) == [((7,), None), ((8,), None), ((9,), "stop")]
    assert [event.num_cached for event in one.delivered()] == [1, 1, 1]
    over(one)


def test_tokens_that_came_are_left_out_of_an_event_and_their_logprobs_too() -> None:
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("p", 5, 7, position=0, finish="moved")
    one.tokens("d", 5, 7, 8, position=0, logprobs=columns(0, 2), prompt_logprobs=columns(0, 2))
    (event,) = one.delivered()
    assert event.token_ids == (8,)
    assert event.prompt_logprobs is None
    assert event.logprobs is not None
    assert event.logprobs.arrays()[2].tolist() == [1]


def test_positions_count_what_came_with_the_request() -> None:
    one = pairs("p", "d")
    ask(one, 5, emitted_ids=m.ids_to_bytes([4, 4]))
    one.tokens("p", 5, 7, position=2, finish="moved")
    one.tokens("d", 5, 7, position=2)
    assert one.delivered() == []
    rest(one, "d", 5, position=3)


def test_tokens_that_are_missing_are_computed_again() -> None:
    """No instance is left that could report the tokens."""
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("p", 5, 7, position=0, finish="moved")
    one.tokens("d", 5, 9, position=2)
    assert one.delivered() == []
    assert finished(one) == ["d"]
    assert [(name, submit.attempt, ids(submit)) for name, submit in submitted(one)] == [
        ("d", 1, [7]),
        ("p", 1, [7]),
    ]


@pytest.mark.requirement("E11")
def test_a_sequence_that_ends_at_its_first_token_ends_at_both() -> None:
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("p", 5, 7, position=0, finish="stop", stop_id=7)
    assert said(one) == [((7,), "stop")]
    assert finished(one) == ["d"]
    over(one)


ENDED = EndedElsewhere("it has ended at the other end").info()


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_an_end_at_the_first_token_counts_in_either_order_of_reports(finish: str) -> None:
    """The decoder's report is no return: nothing is sent again, and no instance is avoided."""
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("d", 5, finish="evicted", error=ENDED)
    assert (one.sent(), one.delivered()) == ([], [])
    assert one.fleet.entries[5].refused == {}
    one.tokens("p", 5, 7, position=0, finish=finish, stop_id=7 if finish == "stop" else None)
    assert said(one) == [((7,), finish)]
    assert one.sent() == []
    over(one)


@pytest.mark.parametrize(("first", "last"), [("p", "d"), ("d", "p")])
def test_a_request_error_ends_the_request_in_either_order_of_reports(first: str, last: str) -> None:
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens(first, 5, finish="evicted", error=ENDED)
    assert (one.sent(), one.delivered()) == ([], [])
    error = ErrorInfo(code="no_token_allowed", message="nothing is left", blame="client", http_status=400)
    one.tokens(last, 5, finish="error", error=error)
    assert [error_of(event).code for event in one.delivered()] == ["no_token_allowed"]
    over(one)


@pytest.mark.parametrize("lost", ["p", "d"])
def test_a_sequence_continues_after_the_report_of_its_end_is_lost(lost: str) -> None:
    """The report of the end is lost with its link, after the other instance has dropped the sequence."""
    one = pairs("p", "d")
    ask(one, 5)
    one.tokens("d" if lost == "p" else "p", 5, finish="evicted", error=ENDED)
    one.lose(lost)
    assert one.fleet.entries[5].losses == 1
    one.up(lost)
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("d", 1), ("p", 1)]
    one.tokens("p", 5, 7, position=0, finish="length")
    assert said(one) == [((7,), "length")]
    over(one)


def test_choices_go_to_one_pair_each_with_its_transfer() -> None:
    one = pairs("p", "q", "d", "f")
    sent = ask(one, 1, 2, 3)
    assert [name for name, _ in sent] == ["d", "p"] * 3
    assert {submit.transfer.key for _, submit in sent if submit.transfer} == {
        TransferKey(number, 0, one.link["p"]) for number in (1, 2, 3)
    }
    ask(one, 4, request=2)
    assert where(one) == ["f", "q"]


def test_choices_that_are_apart_come_together_again() -> None:
    """A returned sample joins the parallel samples, with tokens unknown to the others."""
    one = pairs("p", "q", "d", "f")
    ask(one, 1, 2)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, 8, position=1)
    one.on(e.Paused((1,)))
    for request in range(2, 6):
        ask(one, 10 * request, request=request)
    one.on(e.Resumed((1,)))
    assert [(name, ids(submit)) for name, submit in submitted(one)] == [("d", [7, 8]), ("p", [7, 8])]


def test_pairs_come_before_those_that_do_both_and_these_before_waiting() -> None:
    one = pairs("a", "p", "d")
    ask(one, 1)
    assert where(one) == ["d", "p"]
    one.lose("p")
    assert where(one) == ["a"]
    assert submitted(one)[0][1].transfer is None
    assert one.fleet.refusal() is None


# -- partners


@pytest.mark.requirement("E2")
def test_instances_that_differ_are_never_paired_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    one = pairs("p", "q", "d", fingerprints={"p": "other"})
    for number in range(4):
        ask(one, number, request=10 + number)
        assert where(one) == ["d", "q"]
    assert one.fleet.table.unpaired == 1
    one.up("q")
    delivered = [record.message for record in caplog.records if "has no partner" in record.message]
    assert len(delivered) == 1
    assert "engine p has no partner: model, weights, dtype or cache layout differ from d" in delivered[0]
    one.lose("q")
    assert one.fleet.table.unpaired == 2  # the decode instance has no partner either


def test_one_that_takes_no_transfers_is_never_paired(caplog: pytest.LogCaptureFixture) -> None:
    one = Driver("p", "d", roles={"p": "prefill", "d": "decode"}, fingerprints={"p": "", "d": ""}).up()
    assert ask(one, 1) == []
    assert "has no KV transfers" in caplog.text


@pytest.mark.requirement("E12")
def test_a_cached_prompt_goes_where_it_was_at_both_ends() -> None:
    one = pairs("p", "q", "d", "f")
    prompt = m.ids_to_bytes(list(range(16 * DEFAULT_BLOCK)))
    for number in range(3):
        ask(one, number, request=10 + number, prompt_ids=prompt)
        assert where(one) == ["d", "p"]
        one.tokens("p", number, 7, position=0, finish="stop")
    one.expect("p")
    one.on(e.Linked("p", one.link["p"]))
    one.say("p", one.welcome("p"))
    one.fleet.table.instances["q"].chosen = 0
    ask(one, 9, request=19, prompt_ids=prompt)
    assert where(one) == ["d", "q"]  # the new process has an empty cache


# -- given back, refused


@pytest.mark.requirement("E13")
@pytest.mark.parametrize("who", ["p", "d"])
def test_a_return_by_either_end_starts_again_at_both(who: str) -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens(who, 1, finish="evicted")
    assert one.delivered() == []
    assert finished(one) == ["d" if who == "p" else "p"]
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("d", 1), ("p", 1)]
    assert one.fleet.entries[1].losses == 0
    one.tokens("p" if who == "d" else "d", 1, 6, position=0, attempt=0)
    assert one.delivered() == []  # of the earlier attempt
    one.tokens("p", 1, 7, position=0, finish="moved")
    rest(one, "d", 1)


@pytest.mark.parametrize("who", ["p", "d"])
def test_an_instance_that_returned_the_sequence_is_avoided(who: str) -> None:
    one = pairs("p", "q", "d", "f")
    ask(one, 1)
    one.tokens(who, 1, finish="evicted")
    got = where(one)
    assert who not in got
    assert len(got) == 2


def test_a_late_return_of_the_decode_instance_continues_from_the_delivered_tokens() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, 8, position=1)
    one.tokens("d", 1, finish="evicted")
    assert [(name, ids(submit)) for name, submit in submitted(one)] == [("d", [7, 8]), ("p", [7, 8])]
    one.tokens("p", 1, 9, position=2, num_cached=3, finish="moved")
    rest(one, "d", 1, position=3)


def test_held_tokens_are_dropped_when_the_decode_instance_returns_the_sequence() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("d", 1, 7, position=0)
    one.tokens("d", 1, 8, position=1, finish="evicted")
    assert one.delivered() == []
    assert [ids(submit) for _, submit in submitted(one)] == [[], []]
    one.tokens("p", 1, 7, position=0, finish="moved")
    assert said(one) == [((7,), None)]


@pytest.mark.requirement("E13")
def test_a_pair_that_gives_all_back_is_not_asked_for_ever() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    for _ in range(MOST_REFUSALS):
        one.give_back("d", 1)
        assert len(submitted(one)) == 2
    one.tokens("d", 1, finish="evicted")
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]
    assert finished(one) == ["p"]
    over(one)


def test_waits_double_after_each_return() -> None:
    """Each wait is twice as long: a fault such as the formation of a group takes seconds."""
    one = pairs("p", "d")
    ask(one, 1)
    waits = []
    for _ in range(MOST_REFUSALS):
        before = one.now
        one.give_back("d", 1)
        waits.append(one.now - before)
    assert waits == pytest.approx([0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_WAIT_S])
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, finish="evicted")  # a token resets the count
    assert len(submitted(one)) == 2


def test_a_waiting_sequence_delays_no_other_and_may_end() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("d", 1, finish="evicted")
    one.tokens("d", 1, finish="evicted")
    assert submitted(one) == []
    assert len(ask(one, 2, request=2)) == 2
    assert one.fleet.next_deadline() == one.now + 0.1
    one.on(e.Closed((1,)))
    assert one.fleet.next_deadline() > one.now + 1.0


@pytest.mark.parametrize(("teller", "ended"), [("d", "p"), ("p", "d")])
def test_where_a_peer_has_ended_nothing_is_sent_before_another_process_is_up(teller: str, ended: str) -> None:
    """The reporting instance has refused nothing, however many transfers fail.

    The link of the ended instance still counts as up, and its earlier reports still count.
    """
    one = pairs("p", "d")
    sequences = range(1, 2 * MOST_REFUSALS)
    for each in sequences:
        ask(one, each, request=each)
    gone = PeerEnded("the other end was lost").info()
    for each in sequences:
        one.tokens(teller, each, finish="evicted", error=gone)
        assert finished(one) == [ended]
        assert submitted(one) == one.delivered() == []
        assert not one.fleet.entries[each].refused
    one.lose(ended)
    assert submitted(one) == []
    one.up(ended)
    assert len(submitted(one)) == 2 * len(sequences)
    assert {entry.losses for entry in one.fleet.entries.values()} == {1}
    assert one.fleet.failovers == len(sequences)


def test_a_prompt_that_ends_whoever_computes_it_is_not_computed_for_ever() -> None:
    """The limit also holds if the other instance of the pair reports each end first."""
    one = pairs("p", "d")
    ask(one, 1)
    for _ in range(MOST_LOSSES + 1):
        assert not one.delivered()
        one.tokens("d", 1, finish="evicted", error=PeerEnded("lost").info())
        if 1 in one.fleet.entries:
            one.lose("p")
            one.up("p")
            one.wait(HEALTHY_S)
    assert [error_of(event).code for event in one.delivered()] == ["engine_dead"]
    over(one)


def test_the_live_prefill_instance_takes_over_from_the_dead_one() -> None:
    one = pairs("p", "q", "d")
    ask(one, 1)
    first = one.fleet.entries[1].sender
    one.tokens("d", 1, finish="evicted", error=PeerEnded("lost").info())
    assert first not in where(one)
    assert "d" in where(one)


def test_a_sender_that_has_moved_is_lost_under_its_sequence_until_the_cache_has_received() -> None:
    """The receiver reports the loss first. Nothing is sent to the sender.

    The later loss of the sender's link is no second loss, even after the time-out of a transfer.
    """
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, finish="evicted", error=PeerEnded("lost").info())
    entry = one.fleet.entries[1]
    assert (submitted(one), entry.losses, entry.refused) == ([], 1, {})
    one.lose("p")
    one.up("p")
    assert where(one) == ["d", "p"]
    one.wait(PATIENCE.transfer + 0.1)
    assert (entry.losses, entry.attempt, one.fleet.failovers) == (1, 1, 1)


def test_reports_about_a_replaced_process_shun_no_instance() -> None:
    """The sender handed off the sequence and was replaced. The new process is up.

    The loss counts once, whichever report comes first.
    """
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.lose("p")
    one.up("p")
    one.tokens("d", 1, finish="evicted", error=PeerEnded("lost").info())
    assert where(one) == ["d", "p"]
    entry = one.fleet.entries[1]
    assert (entry.losses, entry.refused, one.fleet.failovers) == (1, {}, 1)
    one.wait(PATIENCE.transfer + 0.1)
    assert (entry.losses, entry.attempt) == (1, 1)


@pytest.mark.parametrize("who", ["p", "d"])
def test_a_refused_part_goes_to_another_instance_of_the_role(who: str) -> None:
    other = {"p": "q", "d": "f"}[who]
    one = pairs("p", "d", other)
    ask(one, 1)
    chosen = next(name for name in one.fleet.entries[1].places if ROLES[name] == ROLES[who])
    one.refuse(chosen, 1)
    assert one.delivered() == []
    remaining = {who: other, other: who}[chosen]
    assert remaining in where(one)
    one.refuse(remaining, 1)
    assert [error_of(event).http_status for event in one.delivered()] == [429]
    assert len(finished(one)) == 1
    over(one)


@pytest.mark.parametrize("who", ["p", "d"])
def test_an_error_of_the_request_itself_ends_it_at_both(who: str) -> None:
    one = pairs("p", "q", "d", "f")
    ask(one, 1)
    wrong = ErrorInfo(code="invalid_request", message="no", blame="client", http_status=400)
    one.tokens(who, 1, finish="error", error=wrong)
    assert [error_of(event) for event in one.delivered()] == [wrong]
    assert finished(one) == ["d" if who == "p" else "p"]
    over(one)


# -- losses


@pytest.mark.requirement("E16")
def test_the_sender_is_lost_before_its_first_token() -> None:
    one = pairs("p", "q", "d")
    ask(one, 1)
    one.lose("p")
    assert finished(one) == ["d"]
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("d", 1), ("q", 1)]
    assert one.fleet.entries[1].losses == 1
    assert one.fleet.failovers == 1
    one.tokens("q", 1, 7, position=0, finish="moved")
    rest(one, "d", 1)


@pytest.mark.requirement("E16")
def test_the_sender_is_lost_after_its_first_token() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.lose("p")
    assert one.sent() == []
    assert one.fleet.entries[1].losses == 0
    rest(one, "d", 1)


@pytest.mark.parametrize("received", [False, True])
def test_the_sender_is_lost_when_it_had_moved_and_nobody_says_so(received: bool) -> None:
    """A receiver on another host may not see the loss. The receiver has the time-out of a transfer."""
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    if received:
        one.tokens("d", 1, 7, position=0)
    one.lose("p")
    one.up("p")
    one.wait(PATIENCE.transfer - 1.0)
    assert one.fleet.entries[1].losses == 0
    one.now += 1.0
    one.on(e.Tick())
    assert one.fleet.entries[1].losses == (0 if received else 1)
    if received:
        rest(one, "d", 1)
        return
    assert finished(one) == ["d"]
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("d", 1), ("p", 1)]
    one.tokens("p", 1, 8, position=1, finish="moved")
    rest(one, "d", 1, start=2, position=2)


def test_a_stall_of_the_front_itself_takes_nothing_from_a_cache_that_is_to_land() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.lose("p")
    one.now += PATIENCE.transfer + 1.0
    one.on(e.Stalled(PATIENCE.transfer))
    one.on(e.Tick())
    assert one.fleet.entries[1].losses == 0
    rest(one, "d", 1)


def test_the_sender_is_lost_after_the_first_token_of_the_decode_instance() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.tokens("d", 1, 7, position=0)
    assert one.delivered() == []
    one.lose("p")
    assert said(one) == [((7,), None)]
    assert one.sent() == []
    assert one.fleet.entries[1].losses == 0
    rest(one, "d", 1)


@pytest.mark.parametrize("came", [1, 2])
def test_the_sender_is_lost_with_prompt_logprobs(came: int) -> None:
    """Only the sender could report the logprobs. If some are missing, the prompt is computed again."""
    one = pairs("p", "q", "d")
    ask(one, 1, params=TokenParams(max_tokens=9, prompt_logprobs=0))
    one.tokens("p", 1, prompt_logprobs=columns(0, came))
    one.tokens("d", 1, 7, position=0)
    one.lose("p")
    if came == 2:
        assert said(one) == [((7,), None)]
        assert one.sent() == []
        rest(one, "d", 1)
        return
    assert one.delivered() == []
    assert (finished(one), where(one)) == (["d"], ["d", "q"])
    one.tokens("q", 1, 7, position=0, prompt_logprobs=columns(0, 2), finish="moved")
    (event,) = one.delivered()
    assert event.prompt_logprobs is not None
    assert event.prompt_logprobs.arrays()[2].tolist() == [1]


@pytest.mark.requirement("E15")
def test_the_decoder_is_lost_before_the_cache_came() -> None:
    one = pairs("p", "d", "f")
    ask(one, 1)
    one.lose("d")
    assert finished(one) == ["p"]
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("f", 1), ("p", 1)]
    one.tokens("p", 1, 7, position=0, finish="moved", attempt=0)
    assert one.delivered() == []
    one.tokens("p", 1, 7, position=0, finish="moved")
    rest(one, "f", 1)


@pytest.mark.requirement("E15")
def test_the_decoder_is_lost_in_the_middle() -> None:
    one = pairs("p", "d", "f")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, 8, position=1)
    one.lose("d")
    assert finished(one) == []
    assert [(name, ids(submit)) for name, submit in submitted(one)] == [("f", [7, 8]), ("p", [7, 8])]
    assert one.fleet.entries[1].losses == 1
    one.tokens("p", 1, 9, position=2, finish="moved")
    rest(one, "f", 1, position=3)


def test_both_are_lost() -> None:
    one = pairs("p", "d", "f")
    ask(one, 1)
    one.tokens("d", 1, 7, position=0)
    one.lose("d")
    assert where(one) == ["f", "p"]
    one.lose("p")
    assert (finished(one), where(one), one.delivered()) == (["f"], [], [])
    assert one.fleet.entries[1].losses == 2
    one.up("p")
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("f", 2), ("p", 2)]
    one.tokens("p", 1, 7, position=0, finish="moved")
    rest(one, "f", 1)


def test_both_are_lost_and_the_sender_first() -> None:
    one = pairs("p", "d", "f")
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.lose("p")
    one.lose("d")
    assert one.fleet.entries[1].losses == 1
    one.up("p")
    assert [(name, ids(submit)) for name, submit in submitted(one)] == [("f", [7]), ("p", [7])]


def test_a_sequence_loses_only_so_many_instances() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    for _ in range(MOST_LOSSES):
        one.lose("d")
        assert one.delivered() == []
        one.up("d")
    one.lose("d")
    assert [error_of(event).code for event in one.delivered()] == ["engine_dead"]
    assert one.fleet.entries == {}


# -- clients


@pytest.mark.requirement("E10", "E17")
@pytest.mark.parametrize("stage", ["sent", "held", "moved", "decoding"])
def test_a_client_that_leaves_frees_both(stage: str) -> None:
    one = pairs("p", "d")
    ask(one, 1)
    if stage == "held":
        one.tokens("d", 1, 7, position=0, finish="length")
    if stage in ("moved", "decoding"):
        one.tokens("p", 1, 7, position=0, finish="moved")
    if stage == "decoding":
        one.tokens("d", 1, 8, position=1)
    one.on(e.Closed((1,)))
    assert sorted(finished(one)) == (["d", "p"] if stage in ("sent", "held") else ["d"])
    over(one)
    one.tokens("p", 1, 7, attempt=0, position=0)
    assert one.delivered() == []


@pytest.mark.parametrize("moved", [False, True])
def test_a_paused_sequence_leaves_both_and_starts_again_at_both(moved: bool) -> None:
    one = pairs("p", "d")
    ask(one, 1)
    if moved:
        one.tokens("p", 1, 7, position=0, finish="moved")
    else:
        one.tokens("d", 1, 7, position=0)
    one.on(e.Paused((1,)))
    assert sorted(finished(one)) == (["d"] if moved else ["d", "p"])
    assert set(one.loads()) == {0}
    one.on(e.Resumed((1,)))
    assert [(name, submit.attempt) for name, submit in submitted(one)] == [("d", 1), ("p", 1)]
    assert [ids(submit) for _, submit in submitted(one)] == [[7] if moved else []] * 2
    one.tokens("p", 1, 8 if moved else 7, position=int(moved), finish="moved")
    assert len(one.delivered()) == 1


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_pinned_sequence_has_no_room(name: str) -> None:
    one = pairs("p", "d")
    assert one.open(1, pinned=name) == name
    assert submitted(one)[0][1].transfer is None
    one.tokens(name, 1, 7, finish="length")
    assert said(one) == [((7,), "length")]
    assert one.fleet.local_prefills == 0
    over(one)


def test_closing_ends_at_both() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.on(e.Closing(shutdown=False))
    assert sorted(finished(one)) == ["d", "p"]
    assert [error_of(event).code for event in one.delivered()] == ["unavailable"]


# -- draining, half-open


@pytest.mark.parametrize("name", ["p", "d"])
def test_one_that_drains_gets_no_new_pair_and_finishes_what_it_has(name: str) -> None:
    other = {"p": "q", "d": "f"}[name]
    one = pairs("p", "q", "d", "f")
    ask(one, 1)
    one.on(e.Draining(name))
    for number in range(2, 6):
        ask(one, number, request=number)
        assert other in where(one)
        assert name not in where(one)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.tokens("d", 1, 8, position=1, finish="length")
    assert said(one) == [((8,), "length")]


def test_one_that_died_twice_in_a_row_computes_its_prompt_for_another_where_one_refused_to_decode() -> None:
    """The instance has no other prompt after this one has left."""
    one = pairs("p", "d", "f")
    for _ in range(2):
        one.lose("p")
        one.up("p")
    ask(one, 1)
    (full,) = set(where(one)) - {"p"}
    one.refuse(full, 1)
    assert said(one) == []
    assert set(where(one)) == {"p", "d", "f"} - {full}


def test_one_that_died_twice_in_a_row_gets_one_prompt_until_it_handed_it_over() -> None:
    one = pairs("p", "d")
    for _ in range(2):
        one.lose("p")
        one.up("p")
    ask(one, 1)
    assert where(one) == ["d", "p"]
    assert ask(one, 2, request=2) == []
    one.tokens("p", 1, 7, position=0, finish="moved")
    assert one.fleet.table.instances["p"].state is InstanceState.UP
    assert where(one) == ["d", "p"]


# -- a missing role


def test_without_one_that_prefills_those_that_decode_do_it_after_a_while() -> None:
    one = pairs("p", "d")
    one.lose("p")
    assert ask(one, 1) == []
    one.wait(PATIENCE.role - 1)
    assert one.fleet.refusal() is None
    assert one.fleet.next_deadline() <= one.now + 1
    one.wait(1)
    (sent,) = submitted(one)
    assert (sent[0], sent[1].transfer, one.fleet.local_prefills) == ("d", None, 1)
    assert one.fleet.refusal() is None
    assert one.fleet.table.alive
    assert not one.fleet.table.whole
    ask(one, 2, request=2)
    assert where(one) == ["d"]  # later sequences do not wait
    one.up("p")
    ask(one, 3, request=3)
    assert where(one) == ["d", "p"]


def missing(*roles: str) -> str:
    """Return the error that names the missing roles."""
    return f"{NO_ROLE}{' or '.join(roles)} takes requests; try again later"


@pytest.mark.requirement("E12")
@pytest.mark.parametrize(("lost", "role"), [("p", "prefill"), ("d", "decode")])
def test_where_one_of_a_role_will_be_back_new_requests_wait_as_long_as_for_any(lost: str, role: str) -> None:
    """A successor may load for longer than the time-out of a role."""
    one = pairs("p", "d", local_prefill=False)
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.lose(lost)
    assert submitted(one) == []
    assert ask(one, 2, request=2) == []
    one.wait(PATIENCE.recovery - 1)
    assert one.delivered() == []
    assert one.fleet.refusal() is None
    assert not one.fleet.table.alive
    one.wait(1)
    late = [2] if lost == "p" else [1, 2]
    assert [(event.sequence, error_of(event).message) for event in one.delivered()] == [
        (sequence, missing(role)) for sequence in late
    ]
    assert error_of(one.delivered()[0]).http_status == 503
    refusal = one.fleet.refusal()
    assert refusal is not None
    assert refusal.http_status == 503
    if lost == "p":
        one.tokens("d", 1, 8, position=1)
        assert said(one) == [((8,), None)]  # running sequences continue
    one.up(lost)
    assert one.fleet.refusal() is None
    ask(one, 3, request=3)
    assert where(one) == ["d", "p"]


@pytest.mark.parametrize("name", ["p", "d"])
def test_a_planned_restart_of_the_only_group_of_a_role_refuses_no_request(name: str) -> None:
    """The drain exceeds the time-out of a role. The successor loads for nearly the recovery time-out.

    The recovery time-out begins at the end of the draining process.
    """
    one = pairs("p", "d", local_prefill=False)
    ask(one, 1)
    one.tokens("p", 1, 7, position=0, finish="moved")
    one.on(e.Draining(name))
    assert ask(one, 2, request=2) == []
    one.wait(PATIENCE.role + PATIENCE.recovery)  # a stream continues meanwhile
    assert (one.delivered(), one.fleet.refusal()) == ([], None)
    one.tokens("d", 1, 8, position=1, finish="length")
    one.lose(name)
    one.wait(PATIENCE.recovery - 1)
    assert (one.delivered(), one.fleet.refusal()) == ([], None)
    one.up(name)
    assert where(one) == ["d", "p"]


def test_decode_instances_prefill_while_the_prefill_instance_drains() -> None:
    one = pairs("p", "d")
    one.on(e.Draining("p"))
    assert ask(one, 1) == []
    one.wait(PATIENCE.role)
    assert where(one) == ["d"]
    assert one.fleet.local_prefills == 1


@pytest.mark.requirement("E12")
def test_where_none_will_be_back_new_requests_wait_for_a_role_alone() -> None:
    """The remaining instances have different fingerprints."""
    one = pairs("p", "q", "d", local_prefill=False, fingerprints={"q": "other"})
    one.lose("p")
    assert ask(one, 1) == []
    one.on(e.Retired("p", DIED))
    assert one.fleet.failure is None
    one.wait(PATIENCE.role)
    assert [error_of(event).message for event in one.delivered()] == [UNFIT]


@pytest.mark.requirement("E13")
def test_begun_sequences_wait_for_a_role_with_a_limit() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.lose("d")
    one.wait(PATIENCE.recovery - 1)
    assert list(one.fleet.entries) == [1]
    one.wait(1)
    assert [error_of(event).message for event in one.delivered()] == [missing("decode")]


def test_without_any_instance_sequences_wait_for_any_role() -> None:
    one = pairs("p", "d")
    ask(one, 1)
    one.lose("p")
    one.lose("d")
    one.wait(PATIENCE.recovery - 1)
    assert list(one.fleet.entries) == [1]
    one.wait(1)
    assert [error_of(event).message for event in one.delivered()] == [LATE]


def test_a_front_that_joins_is_not_ready_with_one_role_alone() -> None:
    roles: dict[str, m.Role] = {"p": "prefill", "d": "decode"}
    one = Driver("p", "d", roles=roles, joining=True)
    one.up("p")
    assert one.fleet.refusal() is not None
    assert not one.fleet.table.alive
    one.up("d")
    assert one.of(e.Complete)
    assert one.fleet.refusal() is None
    assert one.fleet.table.whole


def test_the_fleet_is_over_when_a_role_is_gone_for_good() -> None:
    one = pairs("p", "q", "d")
    ask(one, 1)
    one.lose("p")
    one.on(e.Retired("p", DIED))
    assert one.of(e.Failed) == []
    one.lose("d")
    one.on(e.Retired("d", DIED))
    assert one.of(e.Failed) == [e.Failed(DIED)]
    assert [error_of(event).code for event in one.delivered()] == ["engine_dead"]


@pytest.mark.parametrize("local", [True, False])
def test_without_prefill_for_good_it_is_over_unless_others_do_it(local: bool) -> None:
    one = pairs("p", "d", local_prefill=local)
    one.lose("p")
    one.on(e.Retired("p", DIED))
    assert bool(one.of(e.Failed)) is not local


def test_a_group_that_is_lost_in_place_counts_as_a_loss_of_those_that_ran() -> None:
    """The engine is alive and reports the loss: a sequence that kills its ranks each time fails in the
    end."""
    for name in ("p", "d"):
        one = pairs("p", "d")
        ask(one, 1)
        lost = RanksLost("lost").info()
        for time in range(MOST_LOSSES):
            one.tokens(name, 1, finish="evicted", error=lost, attempt=time)
            assert where(one) == ["d", "p"]
            assert one.fleet.entries[1].losses == time + 1
        one.tokens(name, 1, finish="evicted", error=lost, attempt=MOST_LOSSES)
        assert 1 not in one.fleet.entries


# -- embeddings


@pytest.mark.parametrize("names", ["pd", "p", "apd"])
def test_embedding_requests_go_to_a_prefill_instance(names: str) -> None:
    """Such sequences have no transfer, with or without a decode instance."""
    one = pairs(*names)
    ((name, submit),) = ask(one, 5, pooling="mean")
    assert (name, submit.transfer, submit.pooling) == ("p", None, "mean")
    one.say(name, m.Tokens(step=1, events=(m.TokenEvent(sequence=5, embedding=b"1234", finish="stop"),)))
    (event,) = one.delivered()
    assert (event.embedding, event.finish) == (b"1234", "stop")
    over(one)


def test_without_one_that_prefills_it_goes_to_others_that_can() -> None:
    assert ask(pairs("a"), 5, pooling="last")[0][0] == "a"
    one = pairs("d")
    assert ask(one, 5, pooling="last") == []
    one.now += PATIENCE.role
    one.on(e.Tick())
    assert where(one) == ["d"]
