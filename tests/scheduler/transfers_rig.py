"""Two schedulers with fake runners, joined by the real transfer classes over an unreliable network.

Ranks copy at any time. Bytes are the prefix hashes that the fake runner keeps for each cache position. A read
of a wrong block, or a write to a block of another sequence, therefore fails at the next reader, or in
``_check_blocks``. A simulated API server receives the events of both engines, joins their tokens by position,
and submits returned sequences again.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.scheduler.fake_runner import VOCAB, FakeRunner, alone, kv_config, prefix_hashes
from tests.scheduler.harness import Follower, audit
from weft.common.errors import Unavailable
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, SpeculationSection, TransferSection
from weft.disagg.protocol import transfer_events as ev
from weft.disagg.protocol.receiver import TransferReceiver
from weft.disagg.protocol.sender import TransferSender, not_needed
from weft.disagg.protocol.spans import first_position
from weft.disagg.protocol.transfer_table import TransferPatience, TransferTable
from weft.kv.cache_groups import ids_of
from weft.scheduler import Scheduler
from weft.types import transfer as r
from weft.types.messages import Submit, TokenEvent, ids_from_bytes, ids_to_bytes
from weft.types.plan import AllocSlot, AppendBlocks, AppendEach, SaveState, StepPlan, StepResult
from weft.types.transfer import (
    Blocks,
    CacheGroupDims,
    Endpoint,
    GroupDims,
    Outcome,
    Peer,
    TensorDims,
    TransferKey,
    TransferParameters,
)

RANKS = 2
PATIENCE = TransferPatience(retry=0.3, bind=15.0, fence=5.0, remember=300.0)
MINE = Unavailable("planted").info()


def dims_of(kv: KVConfig) -> GroupDims:
    """Return the dimensions of the caches, with one tensor for each KV cache group."""
    kinds = []
    for pool in kv.pools:
        cache = pool.cache
        shape = [("layer", len(cache.layers)), ("block", pool.num_blocks + 1)]
        if cache.kind != "state":
            shape.append(("position", pool.block_size // cache.ratio))
        tensor = TensorDims(name="t", dims=tuple(shape), dtype="bfloat16")
        kinds.append(
            CacheGroupDims(
                kind=cache.kind,
                layers=cache.layers,
                block_size=pool.block_size,
                window=cache.window,
                ratio=cache.ratio,
                kv_heads=cache.kv_heads,
                tensors=(tensor,),
            )
        )
    return GroupDims(ranks=RANKS, kinds=tuple(kinds))


@dataclass
class Part:
    """A transfer, from the view of the ranks of one side."""

    offer: r.Admitted
    bound: r.Bound
    num_cached: int
    tables: list[dict[int, int]]
    """For each KV cache group: entry of the block table -> block."""
    copied: dict[tuple[int, int], None] = field(default_factory=dict)
    """(KV cache group, position) of the copied positions."""
    done: bool = False


class Engine:
    """One side: scheduler, fake runner, transfers and ranks."""

    def __init__(self, world: World, name: str, kv: KVConfig, depth: int, section: SchedulerSection) -> None:
        self.world, self.name, self.kv, self.depth = world, name, kv, depth
        self.peer = Peer(name, 1)
        self.dims = dims_of(kv)
        transfer = TransferSection(role="prefill" if name == "P" else "decode")
        speculation = SpeculationSection(speculative_adaptive=False)
        self.scheduler = Scheduler(kv, section, VOCAB, speculation, transfer)
        self.runner = FakeRunner(kv)
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.transfers: TransferTable = (
            TransferSender(RANKS, patience=PATIENCE)
            if name == "P"
            else TransferReceiver(self.dims, patience=PATIENCE)
        )
        self.parts: dict[TransferKey, Part] = {}
        """Transfers that the ranks work on, from Push or Expect to Stop."""
        self.promised: dict[TransferKey, dict[tuple[int, int], None]] = {}
        """Transfer -> (KV cache group, block) that the transfer may read or write until it ends."""
        self.ended: dict[int, str] = {}
        """Sequence -> finish reason at this side."""
        self.exported: dict[TransferKey, list[Any]] = {}
        self.stops: dict[TransferKey, None] = {}
        self.seen: set[str] = set()
        self.lag = world.rng.random() * 0.1
        """Seconds for a message from the API server to this side."""

    # ---- what the front does

    def submit(self, request: Submit) -> None:
        events = self.scheduler.add(request, self.world.now)
        if (parameters := request.transfer) is not None:
            self.feed(ev.Open(parameters.key, parameters.peer, parameters.seconds))
        self.collect(events)
        if request.grammar is not None and not events:
            # The grammar may be compiled before or after the other side's part of the work.
            delay = self.lag * (1 + request.sequence % 3)
            self.world.later(delay, lambda: self._constrain(request.sequence, request.params.stop_ids))

    def _constrain(self, sequence: int, stop_ids: tuple[int, ...]) -> None:
        self.collect(self.scheduler.constrain(sequence, Follower(), stop_ids))
        self.drain()

    def _mask(self) -> None:
        """Check the masks of the oldest step, and that each matcher has accepted the output of its
        sequence."""
        if self.in_flight and self.in_flight[0][0].constrained:
            self.scheduler.masks(self.in_flight[0][0]).check(self.in_flight[0][0], VOCAB)
            self.seen.add("masks")
        for one in self.scheduler._state.live.values():
            if one.constraint is not None:
                assert one.constraint._matcher.tokens == list(one.tokens[one.num_prompt :])

    def finish(self, sequence: int) -> None:
        self.collect(self.scheduler.finish(sequence))
        self.drain()

    # ---- steps

    def turn(self) -> None:
        """Run one iteration of an engine's loop. Some iterations plan without a commit."""
        self.collect(self.scheduler.expire(self.world.now))
        self.drain()
        while len(self.in_flight) < self.depth and self.scheduler.has_work():
            plan = self.scheduler.plan(self.world.now)
            if plan is None:
                break
            self._check_blocks(plan)
            before = len(self.runner.exports)
            self.in_flight.append((plan, self.runner.launch(plan)))
            self._export(plan, self.runner.exports[before:])
            audit(self.scheduler)
            self.drain()
        if self.in_flight and self.world.rng.random() < 0.8:
            plan, result = self.in_flight.popleft()
            self.collect(self.scheduler.commit(plan, result, self.world.now))
            self.runner.committed(plan.step)
            self.drain()
        self._mask()
        audit(self.scheduler)

    def lose(self) -> None:
        """Lose rank 0 and form the group again. The memory of the runner stays."""
        events = self.scheduler.requeue_all()
        self.in_flight.clear()
        memory = self.runner.memory
        self.runner = self.runner.anew()
        self.runner.memory = memory
        self.runner.exports = []
        audit(self.scheduler)
        self.collect(events)
        self.drain()
        self.feed(ev.RankGone(0))
        self.feed(ev.RankBack(0))
        self.seen.add("lost")

    # ---- rooms

    def feed(self, event: Any) -> None:
        self.carry(self.transfers.on(event, self.world.now))  # type: ignore[attr-defined]
        self.drain()

    def drain(self) -> None:
        while asked := self.scheduler.transfer_requests():
            for request in asked:
                self.carry(self.transfers.on(self._word(request), self.world.now))  # type: ignore[attr-defined]

    def _word(self, request: r.TransferRequest) -> Any:
        self.seen.add(type(request).__name__)
        match request:
            case r.OfferTransfer(key, num_prompt, num_cached, hashes):
                offer = r.Admitted(key=key, num_prompt=num_prompt, dims=self.dims, hashes=hashes)
                return ev.Offer(offer, num_cached)
            case r.FinishTransfer(key, first):
                return ev.Finished(r.Metadata(key=key, first=(first,)))
            case r.CancelTransfer(key, error):
                return ev.Cancel(key, error or not_needed())
            case r.ReserveTransfer(key, start, blocks):
                self._promise(key, blocks)
                ends = tuple(Endpoint(transport="x", address=str(n), incarnation=1) for n in range(RANKS))
                return ev.Reserve(
                    r.Bound(key=key, start=start, dims=self.dims, blocks=blocks, endpoints=ends)
                )
            case r.PostponeTransfer(key, seconds):
                return ev.Postpone(key, seconds)
            case r.RefuseTransfer(key, error):
                return ev.Refuse(key, error)

    def carry(self, actions: list[Any]) -> None:
        world = self.world
        for action in actions:
            match action:
                case ev.SendToPeer(peer, message):
                    world.send(self.peer, peer, message)
                case ev.Push(key, offer, bound, num_cached):
                    own = self.scheduler.transfer_blocks(key)
                    assert own
                    self._begin(key, offer, bound, own, num_cached)
                case ev.Expect(key, offer, bound):
                    self._begin(key, offer, bound, bound.blocks, 0)
                case ev.StopRanks(key):
                    world.later(world.delay(), lambda key=key: self._stop(key))  # type: ignore[misc]
                case ev.TellScheduler(event):
                    self.seen.add(type(event).__name__)
                    self.collect(self.scheduler.transfer(event, world.now))
                    if isinstance(event, r.TransferReceived | r.TransferFreed):
                        self.promised.pop(event.key, None)
                case ev.Revoke():
                    pass  # the transfer ends without help

    def _promise(self, key: TransferKey, blocks: tuple[Blocks, ...]) -> None:
        promised = self.promised.setdefault(key, {})
        for kind, each in enumerate(blocks):
            promised.update({(kind, block): None for block in ids_of(each)})

    def _begin(
        self, key: TransferKey, offer: r.Admitted, bound: r.Bound, own: tuple[Blocks, ...], num_cached: int
    ) -> None:
        tables = [dict(enumerate(ids_of(each), each.first)) for each in own]
        if self.name == "P":
            self._promise(key, own)
        self.parts[key] = Part(offer, bound, num_cached, tables)

    def _stop(self, key: TransferKey) -> None:
        self.parts.pop(key, None)
        self.exported.pop(key, None)
        for rank in range(RANKS):
            self.feed(ev.RankStopped(key, rank))

    def _export(self, plan: StepPlan, exports: list[Any]) -> None:
        for op in exports:
            self.exported.setdefault(op.key, []).append(op)
            if self.transfers.state(op.key) in (r.State.bound, r.State.active):
                self._promise(op.key, op.blocks)

    def _check_blocks(self, plan: StepPlan) -> None:
        """Check that the plan gives no sequence a block that another transfer may still touch."""
        state = self.scheduler._state
        cached = {op.slot: op.num_cached for op in plan.ops if isinstance(op, AllocSlot)}
        length: dict[tuple[int, int], int] = {}
        for op in plan.ops:
            given: list[tuple[int, int, int]] = []
            if isinstance(op, AppendBlocks):
                given = [(op.slot, op.kind, block) for block in op.blocks.tolist()]
            elif isinstance(op, AppendEach):
                pairs = zip(op.slots.tolist(), op.blocks.tolist(), strict=True)
                given = [(slot, op.kind, block) for slot, block in pairs]
            elif isinstance(op, SaveState):
                given = [(-1, op.kind, op.block)]
            for slot, kind, block in given:
                entry = length.get((slot, kind), 0)
                length[slot, kind] = entry + 1
                if block == 0 or entry * self.kv.pools[kind].block_size < cached.get(slot, 0):
                    continue  # a cached block, or a received block
                mine = state.in_slot[slot].transfer if slot >= 0 and state.in_slot[slot] else None
                for key, blocks in self.promised.items():
                    if mine is None or key != mine.key:
                        assert (kind, block) not in blocks, "a block was given away while a room may touch it"

    # ---- what clients hear

    def collect(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.sequence not in self.ended, "an event after the end"
            if event.finish is not None:
                self.ended[event.sequence] = event.finish
            self.world.collect(self, event)


@dataclass
class Stream:
    """One client request for one sequence, and the received output."""

    request: Submit
    tokens: dict[int, int] = field(default_factory=dict)
    finish: str | None = None
    aborted: bool = False
    attempt: int = 0
    sequence: int = 0
    local: bool = False
    """True if the decode group also computes the prompt."""

    @property
    def outputs(self) -> list[int]:
        first = len(self.request.emitted_ids) // 4
        output = []
        while first + len(output) in self.tokens:
            output.append(self.tokens[first + len(output)])
        return output


class World:
    """Both engines, the network, the copies of the ranks and the API server, on virtual time."""

    def __init__(self, seed: int, harm: float = 1.0, tight: int = 0) -> None:
        """Build the world. With ``tight`` > 0 the decode caches hold little more than one sequence.

        ``tight`` is also ``max_num_seqs`` of the decode side, and some prompts are then computed at the
        decode side. With 0 caches are larger and no prompt is.
        """
        self.tight = tight
        self.rng = rng = random.Random(seed)
        self.harm = harm
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.streams: dict[int, Stream] = {}
        self.of: dict[int, Stream] = {}
        """Sequence of an attempt -> the stream of the sequence."""
        self.submits: dict[int, Submit] = {}
        """Sequence of an attempt -> the submitted message."""
        self._sequences = 0
        self.copied = 0
        facts: dict[str, Any] = {
            "window": rng.choice([None, None, 3, 6, 9]),
            "latent": rng.random() < 0.3,
            "sliding": rng.choice([0, 0, 5, 8]),
            "ratio": rng.choice([0, 0, 4]),
            "states": rng.choice([0, 0, 3, 8]),
            "copies": rng.choice([1, 1, 2, 3]),
        }
        kvs = [
            kv_config(
                **facts,
                block=rng.choice([4, 4, 8]),
                blocks=rng.choice([14, 24, 64]),
                window_blocks=rng.choice([12, 24, 64]),
                caching=rng.random() < 0.6,
                slots=rng.choice([4, 12]),
                stride=rng.choice([0, 8]),
            )
            for _ in range(2)
        ]
        if tight:
            blocks = rng.choice([12, 15, 18])
            small = {"blocks": blocks, "window_blocks": blocks, "caching": rng.random() < 0.6}
            kvs[1] = kv_config(**facts, **small)
        depth = rng.choice([1, 2])
        engines = []
        for name, kv in zip("PD", kvs, strict=True):
            section = SchedulerSection(
                max_num_seqs=tight if tight and name == "D" else rng.choice([2, 4]),
                max_num_batched_tokens=24 + 8 * kv.drafts,
                step_policy=rng.choice(["mixed", "exclusive"]),
                long_prefill_token_threshold=rng.choice([0, 3, 7]),
            )
            engines.append(Engine(self, name, kv, depth, section))
        self.sender, self.receiver = engines

    # ---- time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, what))

    def delay(self) -> float:
        rng = self.rng
        return rng.random() * (0.02 if rng.random() > 0.1 * self.harm else 2.0)

    def run(self, seconds: float) -> None:
        """Advance time for at most ``seconds``, until all is idle. Both engines run in turn."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.01
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            for engine in (self.sender, self.receiver):
                due = engine.transfers.next_due()
                if due is not None and due <= self.now:
                    engine.feed(ev.TransferTick())
                engine.turn()
            self._copy()
            if self.idle():
                return

    def idle(self) -> bool:
        return (
            not self._events
            and all(s.finish for s in self.streams.values())
            and not any(
                len(h.transfers) or h.in_flight or h.scheduler.has_work()
                for h in (self.sender, self.receiver)
            )
        )

    # ---- network

    def send(self, source: Peer, target: Peer, message: Any) -> None:
        data = r.encode(message)
        if self.rng.random() < 0.15 * self.harm:
            return
        engine = self.sender if target.name == "P" else self.receiver
        for _ in range(1 + (self.rng.random() < 0.1 * self.harm)):
            self.later(self.delay(), lambda: engine.feed(ev.PeerMessage(source, r.decode(data))))

    # ---- ranks

    def _copy(self) -> None:
        """Copy computed positions and states. The ranks report ``done`` when a transfer is complete."""
        for key in list(self.receiver.parts):
            mine, theirs = self.receiver.parts.get(key), self.sender.parts.get(key)
            if mine is None or theirs is None or mine.done or self.rng.random() < 0.3:
                continue
            sent = self.sender.exported.get(key, [])
            for op in sent:
                for kind, blocks in enumerate(op.blocks):
                    theirs.tables[kind].update(enumerate(ids_of(blocks), blocks.first))
            # The sender's ranks have all positions below `reach`: found in the cache or exported by a step.
            reach = max([theirs.num_cached, *(op.end for op in sent)])
            whole = self._copy_positions(key, mine, theirs, reach)
            if whole and self._copy_states(key, mine, theirs, sent):
                mine.done = True
                self._report(key)
            elif self.rng.random() < 0.01 * self.harm:
                engine = self.rng.choice([self.sender, self.receiver])
                engine.feed(ev.RankReport(key, 1, Outcome.failed, MINE))

    def _report(self, key: TransferKey) -> None:
        for engine in (self.sender, self.receiver):
            for rank in range(RANKS):
                word = ev.RankReport(key, rank, Outcome.done)
                self.later(self.delay(), lambda engine=engine, word=word: engine.feed(word))  # type: ignore[misc]

    def _copy_positions(self, key: TransferKey, mine: Part, theirs: Part, reach: int) -> bool:
        end = mine.offer.num_prompt
        prefix = prefix_hashes(self._known(key))
        for kind, (to, source) in enumerate(
            zip(self.receiver.dims.kinds, self.sender.dims.kinds, strict=True)
        ):
            if to.kind == "state":
                continue
            begin = first_position(source, to, mine.bound.start, end)
            for p in range(begin, min(reach, end)):
                if (p + 1) % to.ratio or (kind, p) in mine.copied:
                    continue
                mine.copied[kind, p] = None
                line = (theirs.tables[kind][p // source.block_size], p % source.block_size // to.ratio)
                content = self.sender.runner.memory[kind].get(line)
                assert content == prefix[p], "a room reads what somebody else has written"
                at = (mine.tables[kind][p // to.block_size], p % to.block_size // to.ratio)
                assert (kind, at[0]) in self.receiver.promised.get(key, {})
                self.receiver.runner.memory[kind][at] = content
                self.copied += 1
        return reach >= end

    def _copy_states(self, key: TransferKey, mine: Part, theirs: Part, sent: list[Any]) -> bool:
        kinds = [n for n, kind in enumerate(self.sender.dims.kinds) if kind.kind == "state"]
        if kinds and not any(op.states for op in sent) and not any(theirs.tables[n] for n in kinds):
            return False
        for kind in kinds:
            content = self.sender.runner.memory[kind].get((theirs.tables[kind][0], 0))
            assert content == prefix_hashes(self._known(key))[-1], "a room reads a state that is not its own"
            self.receiver.runner.memory[kind][mine.tables[kind][0], 0] = content
        return True

    def _known(self, key: TransferKey) -> list[int]:
        request = self.submits[key.transfer]
        return [*ids_from_bytes(request.prompt_ids).tolist(), *ids_from_bytes(request.emitted_ids).tolist()]

    # ---- front

    def submit(self, requests: list[Submit]) -> None:
        """Start one stream for each request. All requests have the same prompt."""
        for request in requests:
            local = self.tight > 0 and self.rng.random() < 0.4
            stream = self.streams[len(self.streams)] = Stream(request, local=local)
            self._try(stream)

    def abort(self, stream: Stream) -> None:
        """Close the connection of the client."""
        if stream.finish is None:
            stream.finish, stream.aborted = "abort", True
            self._end(stream.sequence)

    def collect(self, engine: Engine, event: TokenEvent) -> None:
        stream = self.of[event.sequence]
        params = stream.request.params
        if stream.local:
            self._hear_local(stream, event)
            return
        if event.token_ids:
            assert event.position >= 0
            assert (event.logprobs is None) == (params.logprobs < 0)
        assert event.prompt_logprobs is None or engine is self.sender
        if event.logprobs is not None:
            assert event.logprobs.arrays()[0][:, 0].tolist() == list(event.token_ids)
        # Both engines report the first token: the values must be equal.
        for number, token in enumerate(event.token_ids, event.position):
            assert stream.tokens.setdefault(number, token) == token, "the two heads tell different tokens"
        if event.finish is not None:
            engine.seen.add(event.finish)
        # "moved" ends the sequence at the prefill engine only; "evicted" starts the next attempt.
        if event.finish in (None, "moved", "abort") or stream.finish is not None:
            return
        if stream.sequence != event.sequence:
            return
        if event.finish == "evicted":
            stream.sequence, stream.attempt = 0, stream.attempt + 1
            self._end(event.sequence)
            self.later(0.1 + self.delay(), lambda: self._try(stream))
            return
        stream.finish = event.finish
        self._end(event.sequence)

    def _hear_local(self, stream: Stream, event: TokenEvent) -> None:
        assert event.finish not in ("moved", "evicted")
        begun = len(stream.request.emitted_ids) // 4
        stream.tokens |= dict(enumerate(event.token_ids, begun + len(stream.tokens)))
        if event.error is not None and event.error.code == "engine_dead":
            stream.aborted = True  # lost too many times with the group
        stream.finish = stream.finish or event.finish

    def _try(self, stream: Stream) -> None:
        if stream.finish is not None:
            return
        self._sequences += 1
        number = stream.sequence = self._sequences
        self.of[number] = stream
        emitted = ids_from_bytes(stream.request.emitted_ids).tolist() + stream.outputs
        sent = msgspec.structs.replace(stream.request, sequence=number, emitted_ids=ids_to_bytes(emitted))
        self.submits[number] = sent
        if stream.local:
            self.later(self.receiver.lag, lambda: self.receiver.submit(sent))
            return
        key = TransferKey(number, stream.attempt, 1)
        seconds = self.rng.choice([30.0, 30.0, 3.0]) if self.harm else 500.0
        for engine, other in ((self.sender, self.receiver), (self.receiver, self.sender)):
            parameters = TransferParameters(
                key=key, sends=engine is self.sender, peer=other.peer, seconds=seconds
            )
            both = msgspec.structs.replace(sent, transfer=parameters)
            # Each engine gets messages in order, as on one connection, but one engine may be much later.
            self.later(engine.lag, lambda engine=engine, both=both: engine.submit(both))  # type: ignore[misc]

    def _end(self, sequence: int) -> None:
        for engine in (self.sender, self.receiver):
            self.later(engine.lag, lambda engine=engine: engine.finish(sequence))  # type: ignore[misc]

    # ---- what has to hold in the end

    def check_end(self) -> None:
        """Check that each stream got all tokens and one end, and that neither side has state left."""
        for stream in self.streams.values():
            tokens, finish = alone(stream.request, self.sender.kv.max_model_len)
            if stream.aborted:
                assert stream.outputs == tokens[: len(stream.outputs)]
                continue
            assert (stream.outputs, stream.finish) == (tokens, finish)
        for engine in (self.sender, self.receiver):
            here = [n for n, stream in self.of.items() if engine is self.receiver or not stream.local]
            assert sorted(engine.ended) == sorted(here), "a sequence had no end"
            state = engine.scheduler._state
            assert not state.live
            assert not len(engine.transfers)
            assert not len(state.transfers)
            assert not state.transfers.unsaved
            assert not state.pins._until
            assert not engine.promised
            stats = engine.scheduler.stats()
            assert stats.free_blocks == tuple(pool.num_blocks for pool in engine.kv.pools)
            assert stats.free_slots == engine.kv.num_slots
            assert stats.transfers is not None
            assert (stats.transfers.blocked, stats.transfers.fetching) == (0, 0)
            assert stats.transfers.pinned_blocks == 0
