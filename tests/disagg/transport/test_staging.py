"""Caches that leave through a ring of host memory and arrive through an inbox: safe reuse of memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.transport.rig import SMALL, LateCopies, Pair
from tests.support.slowness import until
from weft.common.errors import EngineDead
from weft.disagg.protocol.pushes import Write
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copies import HostCopies, rows_of, unit_of
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.types.transfer import Outcome, TransferKey

KEY, AGAIN = TransferKey(7, 0, 1), TransferKey(8, 0, 1)
KINDS = ["staged shm", "staged tcp"]


@pytest.fixture
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(kind: str, **more: Any) -> Pair:
        made.append(Pair(kind, tmp_path_factory.mktemp("t"), **more))
        return made[-1]

    yield make
    for one in made:
        for rank in one.senders:
            if isinstance(memory_of(rank), Staged) and isinstance(copies_of(rank), LateCopies):
                copies_of(rank).go.set()
        one.close()


def memory_of(rank: Any) -> Staged:
    memory: Staged = rank.transport._memory
    return memory


def copies_of(rank: Any) -> Any:
    return memory_of(rank)._copies


def same(pair: Pair, expected: list[list[np.ndarray]]) -> bool:
    pairs = zip(expected[0], pair.receiver.regions[0], strict=True)
    return all(np.array_equal(want, have) for want, have in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_larger_than_the_ring_goes_over_as_receivers_answer(
    pair: Callable[..., Pair], kind: str
) -> None:
    one = pair(kind, copies=LateCopies, kinds=("full", "latent, fp8", "state"))
    expected = one.expected()
    one.begin(KEY)
    one.compute(KEY)
    sender = one.senders[0]
    until(lambda: memory_of(sender).outbox.free <= 2 and not copies_of(sender).under_way)
    time.sleep(0.05)
    assert sender.transfer.pushes.queued_bytes > 0  # no thread waits, and no answer has come
    assert not same(one, expected)
    one.expect(KEY)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert same(one, expected)
    assert sender.wait(KEY).outcome is Outcome.done
    assert copies_of(sender).most <= 2
    assert memory_of(sender).outbox.free == SMALL.slots


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("kind", KINDS)
def test_a_transfer_that_was_stopped_has_ended_when_the_copies_out_of_its_blocks_have(
    pair: Callable[..., Pair], kind: str
) -> None:
    one = pair(kind, copies=LateCopies)
    sender = one.senders[0]
    copies_of(sender).go.clear()
    one.expect(KEY)
    one.begin(KEY)
    one.compute(KEY)
    until(lambda: copies_of(sender).under_way > 0)
    sender.transfer.stop(KEY)
    time.sleep(0.1)
    assert sender.told.empty() or not any(
        type(sender.told.get()).__name__ == "RankStopped" for _ in range(sender.told.qsize())
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.disagg.transport.transfer_thread._END_S", 0.1)
        with pytest.raises(EngineDead, match="does not stop"):
            sender.transfer.stop_all()
    copies_of(sender).go.set()
    sender.wait_stopped(KEY)
    assert copies_of(sender).under_way == 0
    sender.transfer.stop_all()
    for region in one.sender.regions[0]:
        region[:] = 170  # reused by another transfer
    one.receivers[0].transfer.stop(KEY)
    one.receivers[0].wait_stopped(KEY)
    expected = one.expected()
    assert one.transfer(AGAIN)[0].outcome is Outcome.done
    assert same(one, expected)


@pytest.mark.requirement("E8")
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_that_was_sent_is_used_again_only_when_its_receiver_has_answered(
    pair: Callable[..., Pair], kind: str
) -> None:
    """The transfer is stopped here. The other end has parked the bytes, and may read them at any time."""
    one = pair(kind, copies=LateCopies, kinds=("full",))
    sender, receiver = one.senders[0], one.receivers[0]
    one.begin(KEY)
    one.compute(KEY)
    until(lambda: receiver.transfer.arrivals.parked > 0 and not copies_of(sender).under_way)
    held = SMALL.slots - memory_of(sender).outbox.free
    assert held
    ring = memory_of(sender).shown[0].clone()
    sender.transfer.stop(KEY)
    sender.wait_stopped(KEY)
    one.begin(AGAIN)
    one.compute(AGAIN)
    time.sleep(0.1)
    taken = memory_of(sender).outbox._taken
    slots = [slot for slot, one in taken.items() if one.write.key == KEY]
    assert len(slots) == held
    for slot in slots:
        mine = slice(slot * SMALL.slot, (slot + 1) * SMALL.slot)
        assert torch.equal(memory_of(sender).shown[0][mine], ring[mine])
    receiver.transfer.stop(KEY)  # drops the parked bytes, and answers
    receiver.wait_stopped(KEY)
    expected = one.expected()
    one.expect(AGAIN)
    assert receiver.wait(AGAIN).outcome is Outcome.done
    assert same(one, expected)
    until(lambda: memory_of(sender).outbox.free == SMALL.slots)


@pytest.mark.parametrize("kind", KINDS)
def test_a_receiver_that_is_gone_keeps_no_slot(pair: Callable[..., Pair], kind: str) -> None:
    one, other = pair(kind, copies=LateCopies), pair(kind, copies=LateCopies)
    one.begin(KEY)
    one.compute(KEY)
    sender = one.senders[0]
    until(lambda: one.receivers[0].transfer.arrivals.parked > 0)
    one.receivers[0].transfer.close()
    assert sender.wait(KEY).outcome is Outcome.failed
    sender.transfer.stop(KEY)
    sender.wait_stopped(KEY)
    until(lambda: memory_of(sender).outbox.free == SMALL.slots)
    assert other.transfer(KEY)[0].outcome is Outcome.done


def test_a_receiver_that_does_not_answer_leaves_the_ring_to_others(pair: Callable[..., Pair]) -> None:
    one, other = (pair("staged shm", copies=LateCopies, kinds=("full",)) for _ in range(2))
    one.begin(KEY)  # and is not expected
    one.compute(KEY)
    until(lambda: one.receivers[0].transfer.arrivals.parked > 0)
    bound = other.bound(AGAIN)
    other.expect(AGAIN)
    one.push(bound)
    one.compute(AGAIN)
    assert other.receivers[0].wait(AGAIN).outcome is Outcome.done


def test_a_failed_thread_ends_its_copies_before_it_reports_the_stop(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair("staged shm", copies=LateCopies)
    sender = one.senders[0]
    copies = copies_of(sender)
    copies.go.clear()
    one.begin(KEY)
    one.compute(KEY)
    until(lambda: copies.under_way > 0)
    sender.transfer.stop(KEY)
    until(lambda: bool(sender.transfer._stopping))
    closed = list[bool]()
    monkeypatch.setattr(copies, "close", lambda: closed.append(sender.told.empty()))

    def poll(*rest: Any) -> Any:
        raise ValueError("planted")

    while not sender.told.empty():
        sender.told.get()
    monkeypatch.setattr(sender.transport, "poll", poll)
    sender.transport.wake()
    sender.wait_stopped(KEY)
    assert closed[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_failed_copy_ends_its_transfer_alone(
    pair: Callable[..., Pair], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair(kind, kinds=("full",))
    sender, planted = one.senders[0], list[int]()
    out = copies_of(sender).out

    def fails(*given: Any) -> Any:
        if not planted:
            planted.append(1)
            raise IndexError("planted")
        return out(*given)

    monkeypatch.setattr(copies_of(sender), "out", fails)
    one.expect(KEY)
    one.begin(KEY)
    one.compute(KEY)
    said = sender.wait(KEY)
    assert said.error is not None
    assert "could not copy" in said.error.message
    sender.transfer.stop(KEY)
    sender.wait_stopped(KEY)
    expected = one.expected()
    assert one.transfer(AGAIN)[0].outcome is Outcome.done
    assert same(one, expected)
    assert sender.transfer.failure is None
    until(lambda: memory_of(sender).outbox.free == SMALL.slots)


def test_spans_longer_than_the_inbox_fail_their_transfer_with_a_message(pair: Callable[..., Pair]) -> None:
    one = pair("shm to staged shm", kinds=("full",))
    memory_of(one.receivers[0])._inbox.nbytes = 16
    one.expect(KEY)
    one.begin(KEY)
    one.compute(KEY)
    said = one.receivers[0].wait(KEY)
    assert said.error is not None
    assert said.outcome is Outcome.failed


def test_a_receiving_rank_has_no_ring_and_cannot_send() -> None:
    memory = Staged([torch.zeros(8, dtype=torch.uint8)], HostCopies(), Sizes(), sends=False, takes=True)
    assert memory.shared[0].nbytes == 0
    with pytest.raises(EngineDead, match="only receives"):
        memory.put(Write(KEY, "a", 0, (), np.empty(0, np.uint64)))
    memory.close()


def test_rows_of_spans() -> None:
    """The rows use the largest common size of all spans."""
    rng = np.random.default_rng(3)
    for _ in range(50):
        unit = int(rng.choice([1, 3, 8, 24, 64]))
        firsts = rng.permutation(40)[:6] * 3
        spans = np.stack([firsts, rng.integers(1, 4, 6)], axis=1).astype(np.int64) * unit
        size = 124 * unit
        found = unit_of(size, spans)
        assert found % unit == 0
        data = rng.integers(0, 256, size, dtype=np.uint8)
        wanted = np.concatenate([data[at : at + n] for at, n in spans.tolist()])
        assert np.array_equal(data.reshape(-1, found)[rows_of(spans, found)].ravel(), wanted)


def test_bytes_go_out_and_in_as_parts_say() -> None:
    rng, copies = np.random.default_rng(4), HostCopies()
    regions = [torch.from_numpy(rng.integers(0, 256, 100, dtype=np.uint8)) for _ in range(2)]
    parts = [SpanPart(1, 0, np.array([[10, 0, 5], [90, 0, 10]])), SpanPart(0, 0, np.array([[3, 0, 7]]))]
    to = torch.zeros(32, dtype=torch.uint8)
    assert copies.ended(copies.out(regions, parts, to, None))
    wanted = torch.cat([regions[1][10:15], regions[1][90:100], regions[0][3:10]])
    assert torch.equal(to[:22], wanted)
    copies.into(to[:15], regions[0], np.array([[50, 5], [70, 10]]))
    copies.settle()
    assert torch.equal(regions[0][50:55], wanted[:5])
    assert torch.equal(regions[0][70:80], wanted[5:15])
