"""Transfers beside other work: order of reservations, deadlines, and reports of losses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.test_transfers import ERROR, PROMPT, Side, key_of, names
from weft.config.sections.all import TransferSection
from weft.disagg.protocol.arrivals import REMEMBER_S
from weft.disagg.protocol.transfer_table import TransferPatience
from weft.scheduler.sequence import PROTECT_AFTER, Blocked, Waiting
from weft.scheduler.transfer_book import FENCE_S
from weft.types import transfer as r


def test_a_received_sequence_without_a_slot_yields_blocks_to_a_protected_one() -> None:
    side = Side("decode", kv_config(blocks=12, caching=False), max_num_seqs=1)
    side.local(1, PROMPT, max_tokens=30)
    side.step()
    side.scheduler._state.live[1].preemptions = PROTECT_AFTER
    request = side.submit(2, [2] * 10)
    side.land(2, side.want(2)[0], request)
    assert isinstance(side.state(2), Waiting)
    side.drain()
    assert [(e.sequence, e.finish) for e in side.events if e.finish] == [(2, "evicted"), (1, "length")]
    side.check_idle()


def test_small_offers_do_not_pass_a_large_one_for_ever() -> None:
    side = Side("decode", kv_config(blocks=12, caching=False))
    request = side.submit(1, [1] * 10)
    reserved = side.want(1)
    side.submit(2, [2] * 40)
    assert names(side.want(2, 40)) == ["PostponeTransfer"]
    side.submit(3, [3] * 10)
    side.submit(4, [4] * 10)
    assert names(side.want(3)) == ["PostponeTransfer"]  # the transfer would fit
    assert names(side.want(4)) == ["PostponeTransfer"]
    side.land(1, reserved[0], request)
    side.drain()
    assert reserved_now(side) == [2]
    side.scheduler.finish(2)
    side.transfer(r.TransferFreed(key_of(2)))
    assert reserved_now(side) == [3, 4]


def reserved_now(side: Side) -> list[int]:
    """Return the transfers that get blocks without a repeated offer, in order."""
    asked = side.scheduler.transfer_requests()
    return [request.key.transfer for request in asked if isinstance(request, r.ReserveTransfer)]


@pytest.mark.parametrize("ends", ["length", "abort", "freed"])
def test_a_postponed_transfer_is_bound_when_blocks_are_free(ends: str) -> None:
    """Otherwise the stream would stall until the sender repeats the offer."""
    side = Side("decode", kv_config(blocks=12, caching=False))
    request = side.submit(1, [1] * 40, max_tokens=3)
    (reserved,) = side.want(1, 40)
    side.submit(2, [2] * 40)
    assert names(side.want(2, 40)) == ["PostponeTransfer"]
    assert side.scheduler.transfer_requests() == []
    if ends == "length":
        side.land(1, reserved, request)
        assert reserved_now(side) == []
        side.drain()
    else:
        side.scheduler.finish(1)
        assert reserved_now(side) == []  # the transfer may still write
        side.transfer(r.TransferFreed(key_of(1)) if ends == "freed" else r.TransferReceived(key_of(1), ()))
    assert reserved_now(side) == [2]
    assert side.scheduler.transfer_requests() == []
    assert names(side.want(2, 40)) == []  # this message was in flight


def test_postponed_transfers_are_answered_in_order_of_arrival() -> None:
    side = Side("decode", kv_config(blocks=12, caching=False))
    side.submit(1, [1] * 40)
    side.want(1, 40)
    for number in (2, 3, 4, 5):
        side.submit(number, [number] * 10)
    for number in (4, 3, 5, 2):
        assert names(side.want(number)) == ["PostponeTransfer"]
    side.scheduler.finish(3)
    side.transfer(r.TransferFreed(key_of(3)))
    side.scheduler.transfer_requests()
    side.scheduler.finish(1)
    side.transfer(r.TransferFreed(key_of(1)))
    assert reserved_now(side) == [2, 4, 5]


def test_a_postponed_transfer_reuses_blocks_of_another_transfer() -> None:
    """A postponed transfer finds blocks that another transfer has brought, and needs fewer blocks."""
    side = Side("decode", kv_config(blocks=16))
    first = side.submit(1, [1] * 36, max_tokens=20)
    (reserved,) = side.want(1, 36)
    side.submit(2, [1] * 36)
    assert names(side.want(2, 36)) == ["PostponeTransfer"]
    side.land(1, reserved, first)
    assert reserved_now(side) == [2]


def test_to_look_again_for_blocks_is_cheap_while_there_are_none() -> None:
    side = Side("decode", kv_config(blocks=16))
    request = side.submit(1, [1] * 40, max_tokens=8)
    side.land(1, side.want(1, 40)[0], request)
    side.submit(2, [2] * 40)
    assert names(side.want(2, 40)) == ["PostponeTransfer"]
    caches = side.scheduler._state.caches
    looked, fetch_hit = [], caches.fetch_hit

    def counted(hashes: Any, position: int) -> int:
        looked.append(position)
        return fetch_hit(hashes, position)

    caches.fetch_hit = counted  # type: ignore[method-assign]
    for _ in range(4):
        side.step()
        assert reserved_now(side) == []
    assert looked == []
    side.drain()
    assert reserved_now(side) == [2]
    assert looked == [40]


@pytest.mark.parametrize("how", ["finish", "late", "failed"])
def test_a_large_offer_that_ends_keeps_nobody_out(how: str) -> None:
    side = Side("decode", kv_config(blocks=12, caching=False))
    side.submit(1, [1] * 10, seconds=100.0)
    side.want(1)
    side.submit(2, [2] * 40, seconds=5.0)
    assert names(side.want(2, 40)) == ["PostponeTransfer"]
    side.submit(3, [3] * 10)
    if how == "finish":
        side.scheduler.finish(2)
    elif how == "late":
        side.scheduler.expire(5.0)
    else:
        side.transfer(r.TransferFailed(key_of(2), ERROR))
    side.scheduler.transfer_requests()
    assert names(side.want(3)) == ["ReserveTransfer"]


def test_blocks_that_a_prompt_under_way_will_take_are_not_given_to_transfers() -> None:
    side = Side("decode", kv_config(blocks=12, caching=False), long_prefill_token_threshold=4)
    side.local(1, [1] * 36, max_tokens=2)
    side.step()  # has one block, needs ten
    side.submit(2, [2] * 10)
    assert names(side.want(2)) == ["PostponeTransfer"]
    side.drain()
    assert side.scheduler.stats().preemptions == 0
    assert reserved_now(side) == [2]


def test_the_time_of_a_transfer_counts_from_its_offer() -> None:
    """The length of the sender's queue does not count. The pinned blocks are excused for as long."""
    side = Side("prefill", kv_config())
    side.submit(1, seconds=10.0)
    side.now = 1e3
    side.step()
    assert names(side.scheduler.transfer_requests()) == ["OfferTransfer", "FinishTransfer"]
    assert set(side.scheduler._pins._until.values()) == {1e3 + 10.0 + FENCE_S}
    side = Side("decode", kv_config())
    side.submit(1, seconds=10.0)
    assert side.scheduler.expire(1e3) == []
    assert isinstance(side.state(1), Blocked)
    side.now = 1e3
    side.want(1)
    assert side.scheduler.expire(1e3 + 9.9) == []
    assert [event.finish for event in side.scheduler.expire(1e3 + 10.0)] == ["evicted"]


def test_the_end_of_an_attempt_is_not_reported_for_the_next_attempt() -> None:
    side = Side("decode", kv_config())
    side.submit(1)
    side.submit(2)
    side.scheduler._state.return_to_router(
        side.scheduler._state.live[1], "planted"
    )  # and the events were not read yet
    side.scheduler._state.return_to_router(side.scheduler._state.live[2], "planted")
    assert [(e.sequence, e.finish) for e in side.scheduler.finish(1)] == [(1, "evicted")]
    again = submit(1, PROMPT)
    assert side.scheduler.add(again, 0.0) == []
    assert [(e.sequence, e.finish) for e in side.scheduler.expire(0.0)] == [(2, "evicted")]


def test_ended_transfers_are_remembered_for_longer_than_one_may_take() -> None:
    assert TransferPatience().remember > r.MOST_SECONDS
    assert REMEMBER_S > r.MOST_SECONDS
    for seconds in (r.MOST_SECONDS, r.MOST_SECONDS + 1):
        settings = {"transfer_timeout": seconds}
        if seconds > r.MOST_SECONDS:
            with pytest.raises(msgspec.ValidationError):
                msgspec.convert(settings, TransferSection)
        else:
            msgspec.convert(settings, TransferSection)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_sequences_that_ran_at_a_loss_are_returned_with_their_own_code(role: str) -> None:
    side = Side(role, kv_config(), max_num_seqs=1, long_prefill_token_threshold=4)
    first, second = side.submit(1), side.submit(2)
    if role == "decode":
        side.land(1, side.want(1)[0], first)
        side.land(2, side.want(2)[0], second)
    side.step()
    side.events.clear()
    side.in_flight.clear()
    side.scheduler.lose()
    events = side.scheduler.expire(0.0)  # reported at once, before the group is formed again
    assert [(e.sequence, e.finish, e.error.code if e.error else "") for e in events] == [
        (1, "evicted", "group_lost")
    ]
    for request in side.scheduler.transfer_requests():
        assert (
            not isinstance(request, r.CancelTransfer)
            or request.error is None
            or (request.error.code != "group_lost")
        ), "the other group was not lost"
    output = side.lose()
    assert [(e.sequence, e.finish, e.error) for e in output] == (
        [] if role == "prefill" else [(2, "evicted", None)]
    )
