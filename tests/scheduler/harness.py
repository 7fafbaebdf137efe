"""A rig that drives the real scheduler with the fake runner, and random loads for the rig."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from tests.scheduler.fake_runner import (
    BAD_SEED,
    ROW_ERROR,
    VOCAB,
    FakeRunner,
    alone,
    kv_config,
    submit,
)
from weft.common.errors import ErrorInfo
from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection, SpeculationSection
from weft.grammar.base import Matcher, fill_one_by_one
from weft.kv.snapshots import StateGroup
from weft.scheduler import Scheduler
from weft.scheduler.sequence import MOST_YIELDS, PROTECT_AFTER, Waiting
from weft.types.grammar import Text
from weft.types.media_item import MediaItem
from weft.types.messages import Submit, TokenEvent, ids_from_bytes
from weft.types.plan import StepPlan, StepResult, TokenMasks
from weft.types.priority import BATCH_PRIORITY


@dataclass
class Output:
    """The events that a client received for one sequence."""

    request: Submit
    tokens: list[int] = field(default_factory=list)
    logprob_ids: list[list[int]] = field(default_factory=list)
    prompt_logprob_ids: list[list[int]] = field(default_factory=list)
    finish: str | None = None
    stop_id: int | None = None
    num_cached: int = 0
    error: ErrorInfo | None = None
    aborted: bool = False
    given_up: bool = False


def audit(scheduler: Scheduler) -> None:
    """Check that every block and slot is in exactly one place, and that all counts agree with the tables."""
    state = scheduler._state
    for kind in state.caches.kinds:
        pool = kind.pool  # type: ignore[attr-defined]
        held: dict[int, int] = {}
        if isinstance(kind, StateGroup):
            savings = [saving for savings in kind._saving.values() for saving in savings]
            tables = [list(kind._loaded.values()), [saving.block for saving in savings]]
            tables.append(list(kind._fetched.values()))
            assert {key: slot for slot, key in kind._newest.items()} == kind._owner
        else:
            tables = [table.blocks[table.live :] for table in kind._tables.values()]  # type: ignore[attr-defined]
        is_pinned = [[block] * count for block, count in pool._pins.items()]
        # Count the references of each block: tables, releases that wait for a step, and pins.
        for blocks in [*tables, *pool._pending.values(), *is_pinned]:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        assert 0 not in held
        places = [*pool._free, *pool._cached, *pool._retained, *held]
        assert sorted(places) == list(range(1, pool.num_blocks + 1))
        assert all(pool._references[block] == held.get(block, 0) for block in places)
        assert {pool._index[key] for key in pool._index} == {b for b in places if pool._key[b]}
        assert all(pool._key[block] is not None for block in [*pool._cached, *pool._retained])
        assert all(pool._key[block] in pool._retains for block in pool._retained)
        assert not any(pool._key[block] in pool._retains for block in pool._cached)
    slots = state.slots
    taken = [s.state.slot for s in state.running]  # type: ignore[union-attr]
    taken += [state.transfers._records[key].slot for key in state.transfers.unsaved]
    pending = [slot for due in slots._pending.values() for slot in due]
    assert sorted([*slots._free, *taken, *pending]) == list(range(slots.num_slots))
    states = [type(s.state).__name__ for s in state.live.values()]
    assert len(state.running) == states.count("Running")
    assert len(state.waiting) == states.count("Waiting")
    # The fair shares must agree with the live sequences, and the queue with the fair shares.
    waiting, shares = state.waiting, list(state.waiting._shares.values())
    assert all(any(s.share is share for share in shares) for s in state.live.values())
    for share in shares:
        mine = [s for s in state.live.values() if s.share is share]
        assert share.live == len(mine) > 0
        assert share.running == sum(s in mine for s in state.running)
        assert share.waiting == sorted((s for s in mine if isinstance(s.state, Waiting)), key=lambda s: s.key)
    assert waiting.large == sum(share.running > 1 for share in shares)
    assert [share.place for share in waiting._order] == sorted(
        (share.priority, -1 if share.invited else share.running, *share.waiting[0].key[1:])
        for share in shares
        if share.waiting
    )
    members = [i for request in state.requests.values() for i in request.members]
    assert sorted(members) == sorted(state.live)


class Rig:
    """The real scheduler and the fake runner, with up to ``depth`` steps in flight."""

    def __init__(self, kv: KVConfig, depth: int = 2, adaptive: bool = False, **section: object) -> None:
        section.setdefault("max_num_seqs", 8)
        section.setdefault("max_num_batched_tokens", 24 + 8 * kv.drafts)
        self.kv = kv
        self.now = 0.0
        self.section = SchedulerSection(**section)  # type: ignore[arg-type]
        speculation = SpeculationSection(speculative_adaptive=adaptive)
        self.scheduler = Scheduler(kv, self.section, VOCAB, speculation)
        self.runner = FakeRunner(kv)
        self.depth = depth
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.outputs: dict[int, Output] = {}
        self.plans: list[StepPlan] = []
        self.most_preempted = 0
        self.followers: dict[int, Follower] = {}
        self.masks: dict[int, TokenMasks] = {}
        """Step -> masks, for constrained steps."""

    def submit(self, request: Submit) -> None:
        """Add a sequence. Any grammar becomes a ``Follower``, which allows every token."""
        events = self.scheduler.add(request, self.now)
        self.outputs[request.sequence] = Output(request)
        self.collect(events)
        if request.grammar is not None and not events:
            self.followers[request.sequence] = follower = Follower()
            self.collect(self.scheduler.constrain(request.sequence, follower, request.params.stop_ids))

    def finish(self, sequence: int) -> None:
        events = self.scheduler.finish(sequence)
        if events:
            self.outputs[sequence].aborted = True
        self.collect(events)

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.plan(self.now)
        for sequence in self.scheduler._state.live.values():
            if sequence.key[0] < BATCH_PRIORITY:  # batches give way any number of times
                self.most_preempted = max(self.most_preempted, sequence.preemptions)
        if plan is None:
            return None
        self._check_shape(plan)
        self.plans.append(plan)
        self.runner.media_of = self.media_of
        self.in_flight.append((plan, self.runner.launch(plan)))
        self._check_snapshots(plan)
        self.mask()
        return plan

    def media_of(self, slot: int) -> tuple[MediaItem, ...]:
        """Return the images of the sequence in ``slot``, with pixels."""
        return self.scheduler._state.in_slot[slot].media  # type: ignore[no-any-return]

    def commit(self) -> None:
        plan, result = self.in_flight.popleft()
        self.collect(self.scheduler.commit(plan, result, self.now))
        self.scheduler.observe(plan, 1e-3)  # a constant step time, so that drafts pay
        self.runner.committed(plan.step)
        self.mask()

    def mask(self) -> None:
        """Compute and check the masks of the oldest step in flight, if the step is constrained and has no
        masks yet."""
        if not self.in_flight or self.in_flight[0][0].step in self.masks:
            return
        plan = self.in_flight[0][0]
        if plan.constrained:
            masks = self.masks[plan.step] = self.scheduler.masks(plan)
            masks.check(plan, VOCAB)

    def step(self) -> None:
        """Run one iteration of an engine's loop."""
        while len(self.in_flight) < self.depth and self.plan() is not None:
            pass
        if self.in_flight:
            self.commit()

    def lose(self) -> None:
        """Lose the ranks and all steps in flight, then form the group again. The new runner is empty."""
        ran, waited = len(self.scheduler._state.running), self.scheduler.stats().waiting
        events = self.scheduler.requeue_all()
        self.in_flight.clear()
        self.runner = self.runner.anew()
        stats = self.scheduler.stats()
        assert stats.free_blocks == tuple(pool.num_blocks for pool in self.kv.pools)
        assert stats.free_slots == self.kv.num_slots
        assert (stats.running, stats.waiting) == (0, waited + ran - len(events))
        for event in events:
            self.outputs[event.sequence].given_up = True
        self.collect(events)

    def drain(self, most: int = 5000) -> None:
        for _ in range(most):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("work is left after many steps")

    def collect(self, events: list[TokenEvent]) -> None:
        for event in events:
            output = self.outputs[event.sequence]
            assert output.finish is None, "an event after the terminal one"
            output.tokens += event.token_ids
            if event.logprobs is not None:
                ids = event.logprobs.arrays()[0].tolist()
                assert len(ids) == len(event.token_ids)
                output.logprob_ids += ids
            if event.prompt_logprobs is not None:
                assert not output.tokens or len(output.tokens) == len(event.token_ids)
                output.prompt_logprob_ids += event.prompt_logprobs.arrays()[0].tolist()
            output.finish, output.stop_id = event.finish, event.stop_id
            output.num_cached = event.num_cached
            output.error = event.error

    def check_outputs(self) -> None:
        """Check that each sequence got exactly one end and the tokens of a run alone."""
        for sequence, output in self.outputs.items():
            tokens, finish = alone(output.request, self.kv.max_model_len)
            if (follower := self.followers.get(sequence)) is not None:
                emitted = ids_from_bytes(output.request.emitted_ids).tolist()
                assert follower.tokens == emitted + output.tokens, "a matcher is not where its sequence is"
            assert output.finish is not None, f"sequence {sequence} had no end"
            if output.given_up:
                assert output.tokens == tokens[: len(output.tokens)]
                assert (output.finish, output.error and output.error.code) == ("error", "engine_dead")
                continue
            if output.aborted:
                assert output.tokens == tokens[: len(output.tokens)]
                assert output.finish == "abort"
                continue
            assert output.tokens == tokens
            assert output.finish == finish
            assert (output.stop_id is not None) == (finish == "stop")
            assert output.error == (ROW_ERROR if finish == "error" else None)
            params = output.request.params
            prompt = ids_from_bytes(output.request.prompt_ids).tolist()
            # Prompt logprobs are expected only for choice 0 of a sequence without emitted tokens.
            whole = (
                params.prompt_logprobs >= 0 and output.request.choice == 0 and not output.request.emitted_ids
            )
            got = [ids[0] for ids in output.prompt_logprob_ids]
            assert got == (prompt[1:] if whole and (tokens or finish != "error") else got[:0])
            assert all(len(ids) == 1 + params.prompt_logprobs for ids in output.prompt_logprob_ids)
            if params.logprobs >= 0:
                assert [ids[0] for ids in output.logprob_ids] == tokens
                assert all(len(ids) == 1 + params.logprobs for ids in output.logprob_ids)
            else:
                assert not output.logprob_ids

    def check_idle(self) -> None:
        """Check that no block, slot or sequence is in use, and that preemptions were bounded."""
        assert self.most_preempted <= PROTECT_AFTER + MOST_YIELDS
        assert not self.scheduler.has_work()
        stats = self.scheduler.stats()
        assert stats.free_blocks == tuple(pool.num_blocks for pool in self.kv.pools)
        assert stats.free_slots == self.kv.num_slots
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)

    def audit(self) -> None:
        """Call ``audit`` for the scheduler of the rig."""
        audit(self.scheduler)

    def _check_snapshots(self, plan: StepPlan) -> None:
        """Check that each saved snapshot is the state of exactly the prefix named by the key of the
        snapshot."""
        state = self.scheduler._state
        for kind in state.caches.kinds:
            for saving in kind._saving.get(plan.step, []) if isinstance(kind, StateGroup) else []:
                sequence = state.in_slot[saving.slot]
                length = (sequence.chain.hashes.index(saving.key) + 1) * self.kv.block_size
                found = self.runner.memory[kind.number][saving.block, 0]
                assert found == self.runner.in_slot[saving.slot].prefix[length - 1], (
                    "a state of another prefix"
                )

    def _check_shape(self, plan: StepPlan) -> None:
        section = self.section
        slots = [*plan.prefill.slot[plan.prefill.sample > 0].tolist(), *plan.decode.slot.tolist()]
        ids = {self.scheduler._state.in_slot[slot].id for slot in slots}
        assert plan.constrained == any(self.outputs[one].request.grammar is not None for one in ids)
        assert plan.tokens <= section.max_num_batched_tokens
        assert plan.rows <= section.max_num_seqs
        if section.long_prefill_token_threshold and plan.prefill.rows:
            assert plan.prefill.count.max() <= section.long_prefill_token_threshold
        if section.step_policy == "exclusive":
            assert not (plan.prefill.rows and plan.decode.rows)


class Follower:
    """A matcher that allows every token and records the accepted tokens."""

    ended = False

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.rolled = 0

    def accept(self, token: int) -> bool:
        self.tokens.append(token)
        return True

    def rollback(self, tokens: int) -> None:
        assert 0 < tokens <= len(self.tokens)
        self.rolled += tokens
        del self.tokens[-tokens:]

    def fill(self, words: np.ndarray) -> None:
        words[:] = -1

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        return fill_one_by_one(matchers, words)


R = TypeVar("R", bound=Rig)


def random_bases(rng: random.Random) -> list[list[int]]:
    """Return three prompts to cut prefixes from: two random prompts and one prompt of a repeated token."""
    return [*([rng.randrange(VOCAB) for _ in range(40)] for _ in range(2)), [rng.randrange(VOCAB)] * 40]


def next_turn(rng: random.Random, rig: Rig) -> list[int]:
    """Return the prompt and the output of an earlier sequence, cut to 40 tokens."""
    output = rng.choice(list(rig.outputs.values()))
    return (ids_from_bytes(output.request.prompt_ids).tolist() + output.tokens)[:40]


def random_submits(rng: random.Random, first: int, request: int, bases: list[list[int]]) -> list[Submit]:
    """Return the sequences of one request, 1 to 3 choices. The prompt may share a prefix with other
    prompts."""
    base = rng.choice(bases)
    length = rng.choice([rng.randint(1, 40), len(base)])
    prompt = base[: min(length, 40)] + [rng.randrange(VOCAB)] * rng.randint(0, 3)
    most = rng.randint(1, 20)
    emitted = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))] if rng.random() < 0.1 else []
    owner = (0, 0, 1 << 32, 1 << 33)[request % 4]
    return [
        submit(
            first + choice,
            prompt,
            request=request,
            choice=choice,
            seed=rng.choice([1, 2, BAD_SEED]),
            emitted=emitted,
            priority=rng.choice([0, 0, 0, 1]),
            owner=owner,
            salt=rng.choice(["", "", "x"]),
            max_tokens=most,
            min_tokens=rng.randint(0, most),
            stop_ids=tuple(sorted(rng.sample(range(VOCAB), 2))),
            grammar=Text("anything") if request % 3 == 1 else None,
            logprobs=rng.choice([-1, 0, 2]),
            prompt_logprobs=rng.choice([-1, -1, 1]),
        )
        for choice in range(rng.choice([1, 1, 2, 3]))
    ]


def random_rig(rng: random.Random, depth: int, drafts: bool = True, make: type[R] = Rig) -> R:  # type: ignore[assignment]
    """Return a rig with small pools and random KV cache groups. Some rows have drafts if ``drafts`` is
    true."""
    window = rng.choice([None, None, 1, 3, 6, 9])
    kv = kv_config(
        blocks=rng.choice([12, 18, 64]),
        window=window,
        window_blocks=rng.choice([4, 6, 18, 64]),
        window_block=rng.choice([4, 8]),
        full=window is None or rng.random() < 0.7,
        caching=rng.random() < 0.6,
        slots=rng.choice([4, 12]),
        latent=rng.random() < 0.3,
        sliding=rng.choice([0, 0, 0, 2, 8]),
        ratio=rng.choice([0, 0, 0, 2, 4, 6]),
        states=rng.choice([0, 0, 1, 2, 5, 40]),
        stride=rng.choice([0, 8, 16]),
        copies=rng.choice([1, 1, 2, 4]) if drafts else 1,
    )
    return make(
        kv,
        depth,
        adaptive=rng.random() < 0.3,
        step_policy=rng.choice(["mixed", "exclusive"]),
        long_prefill_token_threshold=rng.choice([0, 1, 3, 7]),
        max_num_seqs=rng.choice([1, 3, 8]),
    )


def random_arrivals(rng: random.Random, rig: Rig, bases: list[list[int]], request: int, most: int) -> bool:
    """Submit request number ``request`` at times, up to ``most`` sequences, and abort a sequence at times.
    Return True if the request was submitted."""
    arrives = rng.random() < 0.3 and len(rig.outputs) < most
    if arrives:
        turn = [next_turn(rng, rig)] if rig.outputs and rng.random() < 0.5 else []
        for one in random_submits(rng, len(rig.outputs), request, turn or bases):
            rig.submit(one)
    if rng.random() < 0.05 and rig.outputs:
        rig.finish(rng.randrange(len(rig.outputs)))
    return arrives


def random_run(seed: int, depth: int, drafts: bool = True, losses: float = 0.0, forgets: float = 0.0) -> Rig:
    """Run a random load to the end, with all checks. Ranks are lost with probability ``losses`` per round,
    and the prefix cache is emptied with probability ``forgets``."""
    rng = random.Random(seed)
    rig = random_rig(rng, depth, drafts)
    rig.runner.right = rng.choice([0.0, 0.5, 0.8, 1.0])
    bases = random_bases(rng)
    request = 0
    # Submits, aborts, losses, plans and commits interleave in any order.
    for _ in range(150):
        request += random_arrivals(rng, rig, bases, request, most=40)
        if losses and rng.random() < losses:
            rig.lose()
        if forgets and rng.random() < forgets:
            rig.scheduler.forget_prefixes()
            rig.audit()
        if rng.random() < 0.5 and len(rig.in_flight) < depth:
            rig.plan()
        elif rig.in_flight:
            rig.commit()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    return rig
