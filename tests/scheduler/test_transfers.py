"""Transfers from the view of one scheduler: requests, events and tokens, step by step."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import VOCAB, FakeRunner, alone, kv_config, prefix_hashes, submit
from tests.scheduler.harness import audit
from tests.scheduler.transfers_rig import dims_of
from weft.common.errors import Cancelled, EndedElsewhere, ErrorInfo, InvalidRequest, Unavailable
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, SpeculationSection, TransferSection
from weft.kv.cache_groups import ids_of
from weft.scheduler import Scheduler
from weft.scheduler.scheduler import MAX_EMPTY_PLANS
from weft.scheduler.sequence import Blocked, Fetching, Waiting
from weft.scheduler.transfer_book import FENCE_S
from weft.types import transfer as r
from weft.types.messages import LogprobColumns, Submit, TokenEvent
from weft.types.plan import AllocSlot, AppendBlocks, Export, LoadState, SaveState, StepPlan, StepResult
from weft.types.transfer import FirstToken, Peer, TransferKey, TransferParameters

ERROR = Unavailable("planted").info()
PROMPT = list(range(1, 11))


def key_of(sequence: int) -> TransferKey:
    return TransferKey(sequence, 0, 1)


class Side:
    """A scheduler of one role with a fake runner. The test plays everything else."""

    def __init__(
        self,
        role: str,
        kv: KVConfig,
        depth: int = 1,
        watermark: float = 0.0,
        mode: str = "push",
        places: int = 0,
        **section: Any,
    ) -> None:
        section.setdefault("max_num_seqs", 4)
        section.setdefault("max_num_batched_tokens", 24 + 8 * kv.drafts)
        transfer = TransferSection(role=role, decode_watermark=watermark, transfer_mode=mode)  # type: ignore[arg-type]
        speculation = SpeculationSection(speculative_adaptive=False)
        self.kv, self.depth, self.now, self.sends = kv, depth, 0.0, role == "prefill"
        self.scheduler = Scheduler(
            kv, SchedulerSection(**section), VOCAB, speculation, transfer, places=places
        )
        self.runner = FakeRunner(kv)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.events: list[TokenEvent] = []

    def submit(
        self,
        sequence: int,
        prompt: list[int] | None = None,
        seconds: float = 10.0,
        adapter: str = "",
        **facts: Any,
    ) -> Submit:
        request = msgspec.structs.replace(submit(sequence, prompt or PROMPT, **facts), adapter=adapter)
        parameters = TransferParameters(
            key=key_of(sequence), sends=self.sends, peer=Peer("x", 1), seconds=seconds
        )
        self.events += self.scheduler.add(msgspec.structs.replace(request, transfer=parameters), self.now)
        return request

    def local(self, sequence: int, prompt: list[int], **facts: Any) -> None:
        self.events += self.scheduler.add(submit(sequence, prompt, **facts), self.now)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        if plan is not None:
            self.in_flight.append((plan, self.runner.launch(plan)))
        audit(self.scheduler)
        return plan

    def commit(self) -> list[TokenEvent]:
        plan, result = self.in_flight.popleft()
        events = self.scheduler.commit(plan, result, self.now)
        self.runner.committed(plan.step)
        audit(self.scheduler)
        self.events += events
        return events

    def step(self) -> list[TokenEvent]:
        while len(self.in_flight) < self.depth and self.scheduler.has_work() and self.plan() is not None:
            pass
        return self.commit() if self.in_flight else []

    def drain(self) -> None:
        for _ in range(300):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("work is left")

    def lose(self) -> list[TokenEvent]:
        self.in_flight.clear()
        events = self.scheduler.requeue_all()
        self.runner = self.runner.anew()
        audit(self.scheduler)
        return events

    def transfer(self, event: r.TransferEvent) -> list[TokenEvent]:
        events = self.scheduler.transfer(event, self.now)
        audit(self.scheduler)
        self.events += events
        return events

    def want(self, sequence: int, length: int = len(PROMPT)) -> list[r.TransferRequest]:
        offer = r.Admitted(key=key_of(sequence), num_prompt=length, dims=dims_of(self.kv))
        assert self.transfer(r.TransferWanted(key_of(sequence), offer)) == []
        return self.scheduler.transfer_requests()

    def land(
        self, sequence: int, reserved: r.TransferRequest, request: Submit, logprobs: bytes = b""
    ) -> list[TokenEvent]:
        """Write the whole cache of ``sequence`` and report the transfer as received. Return the token
        events."""
        assert isinstance(reserved, r.ReserveTransfer)
        known = np.frombuffer(request.prompt_ids + request.emitted_ids, "<i4").tolist()
        prefix = prefix_hashes(known)
        for kind, (blocks, pool) in enumerate(zip(reserved.blocks, self.kv.pools, strict=True)):
            memory = self.runner.memory[kind]
            if pool.cache.kind == "state":
                memory[ids_of(blocks)[0], 0] = prefix[-1]
                continue
            table = dict(enumerate(ids_of(blocks), blocks.first))
            ratio = pool.cache.ratio
            for p in range(max(reserved.start, blocks.first * pool.block_size), len(known)):
                if (p + 1) % ratio == 0:
                    memory[table[p // pool.block_size], p % pool.block_size // ratio] = prefix[p]
        first = alone(request, self.kv.max_model_len)[0][0]
        return self.transfer(
            r.TransferReceived(
                key_of(sequence), (FirstToken(choice=request.choice, token=first, logprobs=logprobs),)
            )
        )

    def state(self, sequence: int) -> Any:
        return self.scheduler._state.live[sequence].state

    @property
    def held(self) -> int:
        stats = self.scheduler.stats().transfers
        assert stats is not None
        return stats.pinned_blocks

    def check_idle(self) -> None:
        assert not self.scheduler.has_work()
        stats = self.scheduler.stats()
        assert stats.free_blocks == tuple(pool.num_blocks for pool in self.kv.pools)
        assert stats.free_slots == self.kv.num_slots
        assert not len(self.scheduler._state.transfers)


def names(asked: list[r.TransferRequest]) -> list[str]:
    return [type(request).__name__ for request in asked]


# ---- sender


@pytest.mark.requirement("E3")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_sender_offers_exports_each_chunk_and_leaves_with_the_first_token(depth: int) -> None:
    side = Side("prefill", kv_config(), depth, long_prefill_token_threshold=6)
    request = side.submit(1, logprobs=1)
    side.step()
    (offer,) = side.scheduler.transfer_requests()
    assert isinstance(offer, r.OfferTransfer)
    assert (offer.num_prompt, offer.num_cached, len(offer.hashes)) == (10, 0, 2 * 16)
    side.drain()
    (finish,) = side.scheduler.transfer_requests()
    first = alone(request, 48)[0][0]
    assert isinstance(finish, r.FinishTransfer)
    assert (finish.first.choice, finish.first.token, finish.first.drafts) == (0, first, b"")
    columns = msgspec.msgpack.decode(finish.first.logprobs, type=LogprobColumns)
    (event,) = side.events
    assert event == TokenEvent(
        sequence=1, token_ids=(first,), position=0, finish="moved", num_cached=0, logprobs=columns
    )
    exports = side.runner.exports
    assert [(op.start, op.end, op.states) for op in exports] == [(0, 6, False), (6, 10, False)]
    table = [block for op in exports for block in ids_of(op.blocks[0])]
    assert [op.blocks[0].first for op in exports] == [0, 2]
    assert ids_of(side.scheduler.transfer_blocks(key_of(1))[0]) == table
    assert side.scheduler.stats().free_slots == 12
    assert side.held == 3
    assert side.transfer(r.TransferBound(key_of(1), 4)) == []
    assert side.held == 3
    assert side.transfer(r.TransferReceived(key_of(1))) == []
    assert side.scheduler.transfer_blocks(key_of(1)) == ()
    side.check_idle()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_sender_that_is_pulled_from_offers_what_it_has_computed(depth: int) -> None:
    side = Side("prefill", kv_config(), depth, mode="pull", long_prefill_token_threshold=6)
    side.submit(1)
    side.step()
    assert side.scheduler.transfer_requests() == []
    side.drain()
    assert names(side.scheduler.transfer_requests()) == ["OfferTransfer", "FinishTransfer"]
    assert [(op.start, op.end) for op in side.runner.exports] == [(0, 6), (6, 10)]
    assert side.held == 3
    side.transfer(r.TransferBound(key_of(1), 0))
    side.transfer(r.TransferReceived(key_of(1)))
    side.check_idle()


def test_a_sender_that_is_pulled_from_and_ends_before_has_nothing_to_offer() -> None:
    side = Side("prefill", kv_config(), mode="pull", long_prefill_token_threshold=6)
    side.submit(1)
    side.step()
    side.scheduler.finish(1)
    side.drain()
    assert names(side.scheduler.transfer_requests()) == ["CancelTransfer"]
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


@pytest.mark.requirement("E5")
def test_a_transfer_that_failed_after_the_move_keeps_its_blocks_until_nobody_reads_them() -> None:
    side = Side("prefill", kv_config())
    side.submit(1)
    side.drain()
    before = list(side.events)
    assert side.transfer(r.TransferFailed(key_of(1), ERROR)) == []
    assert side.events == before
    assert side.held == 3
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


@pytest.mark.parametrize(
    ("facts", "finish"), [({"max_tokens": 1}, "length"), ({"seed": 666, "emitted": [1, 2]}, "error")]
)
def test_a_sequence_that_ends_with_prefill_needs_no_transfer(facts: dict[str, Any], finish: str) -> None:
    side = Side("prefill", kv_config())
    side.submit(1, **facts)
    side.drain()
    _, cancel = side.scheduler.transfer_requests()
    assert isinstance(cancel, r.CancelTransfer)
    assert cancel.error is None  # not a failure: the API server gets the end from this side
    assert [event.finish for event in side.events] == [finish]
    side.transfer(r.TransferFailed(key_of(1), ERROR))
    assert side.held == 3
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


@pytest.mark.requirement("E5")
def test_states_leave_in_the_plan_after_and_wait_for_a_snapshot() -> None:
    """With two snapshots for each group, the third handed-off sequence waits until another transfer ends."""
    side = Side("prefill", kv_config(states=2, caching=False), max_num_batched_tokens=64)
    for number in (1, 2, 3):
        side.submit(number, [number] * 10)
    side.step()
    assert [event.finish for event in side.events] == ["moved"] * 3
    assert not side.scheduler._state.running
    plan = side.plan()
    assert plan is not None
    assert (plan.rows, [type(op) for op in plan.ops]) == (0, [SaveState, SaveState, Export] * 2)
    export = plan.ops[2]
    assert isinstance(export, Export)
    assert (export.states, export.end) == (True, 10)
    assert [len(ids_of(blocks)) for blocks in export.blocks] == [0, 1, 1]
    assert side.scheduler.transfer_blocks(key_of(1))[1:] == export.blocks[1:]
    assert side.scheduler.transfer_blocks(key_of(3))[1].ids == b""
    side.commit()
    assert side.scheduler.stats().free_slots == 12 - 1
    assert not side.scheduler.has_work()
    side.transfer(r.TransferReceived(key_of(1)))
    side.drain()
    for number in (2, 3):
        side.transfer(r.TransferReceived(key_of(number)))
    side.drain()
    side.check_idle()


def test_an_unwanted_state_keeps_no_slot() -> None:
    side = Side("prefill", kv_config(states=1, caching=False), max_num_batched_tokens=64)
    for number in (1, 2, 3):
        side.submit(number, [number] * 10)
    side.drain()
    side.transfer(r.TransferFailed(key_of(2), ERROR))
    side.transfer(r.TransferFreed(key_of(2)))
    assert side.scheduler.stats().free_slots == 12 - 1
    assert [event.finish for event in side.lose()] == []
    assert side.held > 0
    for number in (1, 3):
        side.transfer(r.TransferReceived(key_of(number)))
    side.check_idle()


def test_slots_that_wait_for_snapshots_excuse_others_until_the_transfers_are_late() -> None:
    side = Side(
        "prefill", kv_config(states=1, caching=False, slots=2), max_num_seqs=2, max_num_batched_tokens=64
    )
    for number in (1, 2, 3, 4):
        side.submit(number, [number] * 10)
    for _ in range(3 * MAX_EMPTY_PLANS):
        side.step()
    assert not side.scheduler.has_work()
    for number in (1, 2, 3, 4):
        side.transfer(r.TransferReceived(key_of(number)))
        side.drain()
    assert [event.finish for event in side.events] == ["moved"] * 4
    side.check_idle()


@pytest.mark.requirement("E6")
def test_the_drafter_fills_its_cache_with_the_last_chunk() -> None:
    side = Side("prefill", kv_config(copies=3))
    side.submit(1, max_tokens=2)
    side.submit(2, max_tokens=1)
    plan = side.plan()
    assert plan is not None
    assert plan.prefill.next_k.tolist() == [1, 0]


@pytest.mark.parametrize("when", ["queued", "prefilling"])
def test_a_failed_transfer_returns_the_sequence_to_the_router(when: str) -> None:
    side = Side("prefill", kv_config(), long_prefill_token_threshold=4)
    side.submit(1)
    if when == "prefilling":
        side.step()
    side.scheduler.transfer_requests()
    (event,) = side.transfer(r.TransferFailed(key_of(1), ERROR))
    assert event.error == ERROR
    assert (event.finish, event.position) == ("evicted", 0)
    assert side.scheduler.transfer_requests() == []
    assert side.held == (1 if when == "prefilling" else 0)
    side.transfer(r.TransferFreed(key_of(1)))
    side.drain()
    side.check_idle()


def test_a_preempted_sender_is_given_back_and_its_blocks_are_not_given_away() -> None:
    side = Side("prefill", kv_config(), long_prefill_token_threshold=4)
    side.submit(1)
    side.submit(2, [2] * 10)
    side.step()
    side.scheduler.transfer_requests()
    state = side.scheduler._state
    state.preempt(state.live[2], side.state(2))
    assert side.held == 1
    assert [(event.sequence, event.finish) for event in side.scheduler.expire(0.0)] == [(2, "evicted")]
    assert names(side.scheduler.transfer_requests()) == ["CancelTransfer"]
    side.drain()
    side.transfer(r.TransferFreed(key_of(2)))
    side.transfer(r.TransferReceived(key_of(1)))
    side.check_idle()


def test_a_lost_group_gives_back_what_ran_and_keeps_on_hold_what_transfers_read() -> None:
    side = Side("prefill", kv_config(), depth=2, max_num_seqs=1, long_prefill_token_threshold=4)
    side.submit(1)
    side.submit(2)
    side.plan()
    side.plan()
    side.scheduler.transfer_requests()
    (event,) = side.lose()
    assert (event.sequence, event.finish) == (1, "evicted")
    assert names(side.scheduler.transfer_requests()) == ["CancelTransfer"]
    assert side.held == 2
    assert isinstance(side.state(2), Waiting)
    side.drain()  # the second transfer was not begun
    assert side.events[-1].finish == "moved"
    side.transfer(r.TransferFreed(key_of(1)))
    side.transfer(r.TransferReceived(key_of(2)))
    side.check_idle()


def test_parallel_samples_have_transfers_of_their_own_and_share_what_is_full() -> None:
    for caching in (True, False):
        side = Side("prefill", kv_config(caching=caching))
        for choice in range(3):
            side.submit(choice, request=9, choice=choice, seed=choice)
        side.drain()
        asked = side.scheduler.transfer_requests()
        offers = [request for request in asked if isinstance(request, r.OfferTransfer)]
        assert [(offer.key.transfer, offer.num_cached) for offer in offers] == [(0, 0), (1, 8), (2, 8)]
        assert names(asked).count("FinishTransfer") == 3
        assert side.held == 2 + 3  # two full blocks, and the last block of each sequence
        for choice in (1, 0, 2):
            side.transfer(r.TransferReceived(key_of(choice)))
        side.check_idle()


# ---- receiver


@pytest.mark.requirement("E4", "E6")
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("facts", [{}, {"states": 3}, {"window": 6, "ratio": 4}, {"copies": 3}])
def test_a_receiver_decodes_from_its_first_step_on(facts: dict[str, Any], depth: int) -> None:
    kv = kv_config(**facts)
    side = Side("decode", kv, depth)
    request = side.submit(1, max_tokens=6)
    assert isinstance(side.state(1), Blocked)
    assert not side.scheduler.has_work()
    assert side.scheduler.blocked
    (reserved,) = side.want(1)
    assert isinstance(reserved, r.ReserveTransfer)
    assert reserved.start == 0
    assert isinstance(side.state(1), Fetching)
    assert not side.scheduler.has_work()
    assert side.held == sum(len(ids_of(blocks)) for blocks in reserved.blocks)
    (event,) = side.land(1, reserved, request)
    tokens, finish = alone(request, 48)
    assert (event.token_ids, event.position, event.finish) == ((tokens[0],), 0, None)
    assert side.held == 0
    plan = side.plan()
    assert plan is not None
    # The received token is the only id without a cache entry: the first row is a decode row at position 10.
    assert (plan.prefill.rows, plan.decode.rows) == (0, 1)
    assert plan.decode.start.tolist() == [10]
    (alloc,) = [op for op in plan.ops if isinstance(op, AllocSlot)]
    assert (alloc.num_cached, len(alloc.token_ids), alloc.num_prompt) == (10, 11, 10)
    assert sum(isinstance(op, LoadState) for op in plan.ops) == (2 if "states" in facts else 0)
    assert sum(isinstance(op, AppendBlocks) for op in plan.ops) >= 1
    side.drain()
    output = [token for event in side.events for token in event.token_ids]
    assert (output, side.events[-1].finish) == (tokens, finish)
    positions = [event.position for event in side.events]
    lengths = [len(event.token_ids) for event in side.events]
    assert positions == [sum(lengths[:number]) for number in range(len(lengths))]
    side.check_idle()


def test_a_quiet_row_gives_the_snapshot_back_that_it_came_from() -> None:
    side = Side("decode", kv_config(states=1, caching=False))
    request = side.submit(1, max_tokens=9)
    side.land(1, side.want(1)[0], request)
    side.step()
    side.step()
    assert side.scheduler.stats().free_blocks[1:] == (1, 1)


@pytest.mark.requirement("E4")
def test_logprobs_of_the_first_token_come_along() -> None:
    side = Side("decode", kv_config())
    request = side.submit(1, logprobs=0)
    columns = LogprobColumns(width=1, ids=bytes(4), values=bytes(4), rank=bytes(4))
    (event,) = side.land(1, side.want(1)[0], request, msgspec.msgpack.encode(columns))
    assert event.logprobs == columns


def test_a_first_token_that_ends_the_sequence_leaves_its_blocks_to_find() -> None:
    side = Side("decode", kv_config())
    request = side.submit(1, max_tokens=1)
    (event,) = side.land(1, side.want(1)[0], request)
    assert (event.finish, event.position) == ("length", 0)
    side.check_idle()
    side.submit(2)
    (reserved,) = side.want(2)
    assert isinstance(reserved, r.ReserveTransfer)
    assert (reserved.start, reserved.blocks[0].first) == (8, 2)


def test_parallel_samples_are_answered_once_the_first_sample_has_received_or_ended() -> None:
    for caching in (True, False):
        side = Side("decode", kv_config(caching=caching))
        requests = [
            side.submit(c, request=9, choice=c, seed=c, emitted=[c] if c == 2 else None) for c in range(3)
        ]
        assert side.want(1) == []
        assert side.want(2, 11) == []
        (first_sample,) = side.want(0)
        side.land(0, first_sample, requests[0])
        one, two = side.scheduler.transfer_requests()
        for reserved, key in ((one, 1), (two, 2)):
            assert isinstance(reserved, r.ReserveTransfer)
            assert (reserved.key.transfer, reserved.start) == (key, 8)
        side.land(2, two, requests[2])
        side.land(1, one, requests[1])
        side.drain()
        for number, request in enumerate(requests):
            output = [t for event in side.events if event.sequence == number for t in event.token_ids]
            assert output == alone(request, 48)[0]
        side.check_idle()
    side = Side("decode", kv_config())
    for choice in range(3):
        side.submit(choice, request=9, choice=choice)
    side.want(0)
    assert side.want(2) == []
    assert side.want(1) == []
    side.scheduler.finish(0)
    assert [(type(q).__name__, q.key.transfer) for q in side.scheduler.transfer_requests()] == [
        ("CancelTransfer", 0),
        ("ReserveTransfer", 1),
    ]


@pytest.mark.requirement("E29")
def test_running_sequences_keep_a_share_of_the_blocks() -> None:
    side = Side("decode", kv_config(blocks=10, max_model_len=40), watermark=0.35)
    request = side.submit(1, max_tokens=20)
    side.land(1, side.want(1)[0], request)
    side.submit(2, [2] * 10)
    (reserved,) = side.want(2)
    assert isinstance(reserved, r.ReserveTransfer)
    side.submit(3, [3] * 10)
    (postponed,) = side.want(3)
    assert isinstance(postponed, r.PostponeTransfer)
    side.scheduler.finish(2)
    side.transfer(r.TransferFreed(key_of(2)))
    assert names(side.scheduler.transfer_requests()) == ["CancelTransfer", "ReserveTransfer"]


@pytest.mark.requirement("E6")
@pytest.mark.parametrize(("max_tokens", "taken"), [(9, 4), (2, 3)])
def test_a_reservation_has_room_for_the_drafts_of_the_first_step(max_tokens: int, taken: int) -> None:
    """The reservation covers the first token and two drafts, within ``max_tokens``. Blocks have four
    tokens."""
    kv = kv_config(copies=3)
    side = Side("decode", kv)
    request = side.submit(1, max_tokens=max_tokens)
    (reserved,) = side.want(1)

    def blocks() -> int:
        return kv.pools[0].num_blocks - side.scheduler.stats().free_blocks[0]

    assert blocks() == taken
    side.land(1, reserved, request)
    plan = side.plan()
    if max_tokens > 2:  # otherwise the last token follows the received token
        assert plan is not None
        assert plan.decode.next_k.tolist() == [2]
    assert blocks() == taken
    side.drain()
    side.check_idle()


@pytest.mark.requirement("E29")
def test_a_lone_sequence_may_have_what_the_watermark_keeps() -> None:
    side = Side("decode", kv_config(blocks=10, max_model_len=40), watermark=0.5)
    side.submit(1, [1] * 36)
    assert names(side.want(1, 36)) == ["ReserveTransfer"]


def test_offers_that_do_not_fit_the_sequence_are_refused() -> None:
    side = Side("decode", kv_config())
    side.submit(1)
    assert names(side.want(1, 9)) == ["RefuseTransfer"]
    assert names(side.want(7)) == ["CancelTransfer"]
    side.transfer(r.TransferFailed(key_of(1), ERROR))
    assert side.events[-1].finish == "evicted"
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


@pytest.mark.parametrize("when", ["awaiting", "fetching"])
@pytest.mark.parametrize(
    ("error", "returns"),
    [(EndedElsewhere("it has ended").info(), 0), (Cancelled("the client went away").info(), 0), (ERROR, 1)],
)
def test_a_sequence_that_ended_at_the_other_end_is_no_eviction(
    when: str, error: ErrorInfo, returns: int
) -> None:
    side = Side("decode", kv_config())
    side.submit(1)
    if when == "fetching":
        side.want(1)
    (event,) = side.transfer(r.TransferFailed(key_of(1), error))
    assert (event.finish, event.error) == ("evicted", error)
    stats = side.scheduler.stats().transfers
    assert stats is not None
    assert stats.returns == returns
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


@pytest.mark.requirement("E17")
@pytest.mark.parametrize("when", ["awaiting", "fetching"])
@pytest.mark.parametrize("how", ["abort", "late", "failed", "lost"])
def test_a_receiver_ends_before_its_transfer(when: str, how: str) -> None:
    """The blocks stay pinned until the writes end. The transfer is cancelled unless the transfer failed
    first."""
    side = Side("decode", kv_config(states=2))
    side.submit(1, seconds=5.0)
    asked = side.want(1) if when == "fetching" else []
    held = 5 if asked else 0
    if how == "abort":
        events = side.scheduler.finish(1)
    elif how == "late":
        if when == "awaiting":  # the deadline counts from the offer, because the sender's queue may be long
            assert side.scheduler.expire(1e3) == []
            side.scheduler._state.caches.fits = lambda *args, **kwargs: False  # type: ignore[method-assign]
            assert names(side.want(1)) == ["PostponeTransfer"]
        assert side.scheduler.expire(4.9) == []
        events = side.scheduler.expire(5.0)
    elif how == "failed":
        events = side.transfer(r.TransferFailed(key_of(1), ERROR))
    else:
        events = side.lose()
        if when == "awaiting":
            assert events == []
            events = side.transfer(r.TransferFailed(key_of(1), ERROR))
    assert [event.finish for event in events] == ["abort" if how == "abort" else "evicted"]
    output = how == "failed" or (how == "lost" and when == "awaiting")
    assert names(side.scheduler.transfer_requests()) == ([] if output else ["CancelTransfer"])
    assert side.held == held
    assert side.scheduler.transfer(r.TransferReceived(key_of(1), (FirstToken(0, 1),)), 6.0) == []
    side.transfer(r.TransferFreed(key_of(1)))
    side.check_idle()


def test_blocks_of_transfers_on_hold_excuse_a_lack_of_progress_until_they_are_late() -> None:
    side = Side("decode", kv_config(blocks=12))
    side.submit(1, [1] * 40, seconds=5.0)
    side.want(1, 40)
    side.scheduler.finish(1)
    side.local(2, [2] * 40)
    for now in (1.0, 4.0 + FENCE_S):
        side.now = now
        side.scheduler.expire(now)
        for _ in range(2 * MAX_EMPTY_PLANS):
            assert side.plan() is None
        assert not side.scheduler.has_work()
    side.transfer(r.TransferFreed(key_of(1)))
    side.drain()
    side.check_idle()


def test_preempted_and_lost_receivers_are_given_back() -> None:
    side = Side("decode", kv_config(blocks=7, max_model_len=28))
    requests = [side.submit(n, [n] * 10, max_tokens=18) for n in (1, 2)]
    for number, request in zip((1, 2), requests, strict=True):
        side.land(number, side.want(number)[0], request)
    for _ in range(40):
        if any(event.finish for event in side.step()):
            break
    ends = {event.sequence: event for event in side.events if event.finish}
    assert (ends[2].finish, ends[2].position) == (
        "evicted",
        len([e for e in side.events if e.sequence == 2]) - 1,
    )
    assert side.scheduler.stats().preemptions == 1
    assert [event.finish for event in side.lose()] == ["evicted"]
    stats = side.scheduler.stats().transfers
    assert stats is not None
    assert stats.returns == 2
    assert side.scheduler.transfer_requests() == []
    side.check_idle()


@pytest.mark.requirement("E5")
def test_received_sequences_get_slots_in_order_before_sequences_without_blocks() -> None:
    side = Side("decode", kv_config(blocks=12), max_num_seqs=1)
    requests = {n: side.submit(n, [n] * 10, max_tokens=3) for n in (1, 2)}
    side.local(3, [3] * 10, max_tokens=3)
    for number in (2, 1):
        side.land(number, side.want(number)[0], requests[number])
    side.drain()
    order = [event.sequence for event in side.events if event.finish]
    assert order == [1, 2, 3]
    side.check_idle()
    side = Side("decode", kv_config(blocks=12), max_num_seqs=2)
    side.local(1, [1] * 40, max_tokens=3)  # the oldest sequence, which will lack blocks
    request = side.submit(2, [2] * 10, max_tokens=3)
    reserved = side.want(2)
    side.land(2, reserved[0], request)
    side.submit(3, [3] * 10)
    side.step()
    assert names(side.want(3)) == ["PostponeTransfer"]  # not before the starving sequence
    side.drain()
    assert [event.sequence for event in side.events if event.finish] == [2, 1]


def test_a_parameters_must_be_for_this_group() -> None:
    for role, wrong in (("prefill", False), ("decode", True), ("unified", True), ("unified", False)):
        side = Side(role, kv_config())
        side.sends = wrong
        with pytest.raises(InvalidRequest, match="role"):
            side.submit(1)
    side = Side("decode", kv_config())
    for seconds in (0.0, float("nan"), 1e9):
        with pytest.raises(InvalidRequest, match="seconds"):
            side.submit(1, seconds=seconds)
    side.submit(1)
    side.scheduler.finish(1)
    side.scheduler.transfer_requests()
    side.submit(2)
    side.want(2)
    side.scheduler.finish(2)
    with pytest.raises(InvalidRequest, match="attempt"):
        side.submit(2)


def test_a_complete_sequence_cancels_its_transfer_at_once() -> None:
    side = Side("decode", kv_config())
    side.submit(1, emitted=[1, 2], max_tokens=2)
    assert [(event.finish, event.position) for event in side.events] == [("length", 2)]
    assert names(side.scheduler.transfer_requests()) == ["CancelTransfer"]
    side.check_idle()


def test_a_group_alone_has_nothing_to_say_of_transfers() -> None:
    side = Side("unified", kv_config())
    side.local(1, PROMPT)
    side.drain()
    assert side.scheduler.stats().transfers is None
    assert side.scheduler.transfer_requests() == []
    assert all(event.position == -1 for event in side.events)
    side.check_idle()
