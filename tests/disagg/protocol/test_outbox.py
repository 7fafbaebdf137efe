"""The ring of outgoing writes: assignment of slots, reuse of slots, and writes that are never sent."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.common.errors import EngineDead
from weft.disagg.protocol.outbox import Outbox, Slotted
from weft.disagg.protocol.pushes import Write
from weft.types.transfer import TransferKey

KEY, OTHER = TransferKey(1, 0, 1), TransferKey(2, 0, 1)


def write(number: int, peer: str = "a", key: TransferKey = KEY) -> Write:
    return Write(key, peer, number, (), np.empty(0, np.uint64))


def test_a_slot_is_free_when_its_write_was_answered_and_not_before() -> None:
    box = Outbox(2)
    for number in range(3):
        box.put(write(number))
    ((slot, first),) = box.begin()
    assert (first.number, box.begin(), box.can_begin) == (0, [], False)
    assert box.copied(slot) is first
    assert box.begin() == []
    box.ended("a", KEY, 1)  # this write has not been sent
    assert box.begin() == []
    box.ended("a", KEY, 0)
    assert box.can_begin
    assert [one.write.number for one in box.begin()] == [1]
    box.copied(slot)
    with pytest.raises(EngineDead, match="twice"):
        box.copied(slot)


def test_peers_that_answer_nothing_leave_slots_for_others() -> None:
    box = Outbox(16)
    for peer in "abc":
        for number in range(40):
            box.put(write(number, peer))
    held = [one.write.peer for one in box.begin()]
    assert box.begin() == []
    assert {peer: held.count(peer) for peer in "abc"} == {"a": 4, "b": 4, "c": 4}
    for number in range(100):  # answered transfers continue through the remaining slots
        box.put(write(number, "d"))
        ((slot, mine),) = box.begin()
        assert mine.number == number
        assert box.copied(slot) is mine
        box.ended("d", KEY, number)


def test_cancelled_writes_are_not_sent_and_begun_copies_end() -> None:
    box = Outbox(8)
    for number in range(3):
        box.put(write(number))
        box.put(write(number, key=OTHER))
    begun = box.begin()
    assert [(one.write.key, one.write.number) for one in begun] == [
        (KEY, 0),
        (OTHER, 0),
        (KEY, 1),
        (OTHER, 1),
    ]
    sent = box.copied(begun[0].slot)
    assert sent is not None
    box.cancel(KEY)
    assert not box.quiet(KEY)
    assert box.copied(begun[2].slot) is None
    assert box.quiet(KEY)
    assert box.free == 5  # the sent write keeps its slot
    box.ended("a", KEY, 0)
    assert box.free == 6
    assert box.copied(begun[1].slot) is not None
    assert [one.write.key for one in box.begin()] == [OTHER]
    assert box.waiting == 0


def test_a_connection_that_ends_gives_back_what_was_sent_over_it() -> None:
    box = Outbox(8)
    for number in range(2):
        box.put(write(number, "a"))
        box.put(write(number, "b"))
    for slot, one in box.begin():
        if one.number == 0:
            box.copied(slot)
    box.lost("a")
    assert box.free == 5
    box.lost("b")
    assert box.free == 6


def test_no_slot_is_used_by_two_and_all_come_back() -> None:
    for seed in range(60):
        draw, box = random.Random(seed), Outbox(6)
        copying, sent, cancelled, number = list[Slotted](), list[Slotted](), set[TransferKey](), 0
        order: dict[tuple[str, TransferKey], int] = {}
        for _ in range(400):
            match draw.randrange(6):
                case 0 | 1:
                    key = TransferKey(draw.randrange(50), 0, 1)
                    if key not in cancelled:
                        number += 1
                        box.put(write(number, draw.choice("abc"), key))
                case 2:
                    begun = box.begin()
                    copying += begun
                    held = [one.slot for one in [*copying, *sent]]
                    assert len(held) == len(set(held))
                    assert len(held) + box.free == 6
                    for one in begun:
                        assert one.write.number > order.get((one.write.peer, one.write.key), 0)
                        order[one.write.peer, one.write.key] = one.write.number
                case 3 if copying:
                    one = copying.pop(draw.randrange(len(copying)))
                    made = box.copied(one.slot)
                    assert (made is None) == (one.write.key in cancelled)
                    sent += [] if made is None else [one]
                case 4 if sent:
                    one = sent.pop(draw.randrange(len(sent)))
                    box.ended(one.write.peer, one.write.key, one.write.number)
                case 5 if draw.random() < 0.2:
                    key = TransferKey(draw.randrange(50), 0, 1)
                    cancelled.add(key)
                    box.cancel(key)
                    assert box.quiet(key) == all(one.write.key != key for one in copying)
        while copying or sent or box.waiting:
            for one in copying:
                sent += [] if box.copied(one.slot) is None else [one]
            for one in sent:
                box.ended(one.write.peer, one.write.key, one.write.number)
            copying, sent = box.begin(), []
        assert box.free == 6
