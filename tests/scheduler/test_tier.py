"""The KV tier in the scheduler: the same tokens with hits from a store, whatever the store does."""

from __future__ import annotations

import itertools
import random

import msgspec
import pytest

from tests.scheduler.fake_runner import kv_config, submit
from tests.scheduler.harness import random_arrivals, random_bases, random_rig
from tests.scheduler.tier_rig import FakeDisk, TierRig, faulty
from tests.support.slow import mostly_slow
from weft.kv import tiers
from weft.kv.prefix_memory import PrefixMemory
from weft.kv.tiers import Changed, Copied, Flushed, Stopped
from weft.scheduler.policy.load_speed import LARGE, LoadSpeed
from weft.scheduler.policy.retention import Retention
from weft.types.messages import Submit, TokenEvent
from weft.types.tiers import DISK, HOST, REMOTE, BlockOutcome, StoredElsewhere, StoreMode

PROMPT = [7, 3] * 16
SEEDS = [
    range(3),
    pytest.param(range(3, 12), marks=pytest.mark.slow),
    pytest.param(range(12, 60), marks=pytest.mark.grid),
]
KINDS = {
    "full": {},
    "window": {"window": 6, "window_block": 8},
    "latent": {"latent": True, "full": False},
    "compressed": {"ratio": 6, "sliding": 8},
    "states": {"states": 8, "stride": 8},
    "all": {"window": 9, "latent": True, "sliding": 2, "ratio": 4, "states": 8, "stride": 8},
}


def ask(rig: TierRig, *requests: Submit) -> int:
    """Run requests to the end, with all checks. Return the cached tokens of the last."""
    for one in requests:
        rig.submit(one)
    rig.settle()
    rig.check_outputs()
    rig.check_idle()
    rig.audit()
    return rig.outputs[requests[-1].sequence].num_cached


@pytest.mark.parametrize("kinds", KINDS)
def test_a_restart_keeps_prefixes(kinds: str) -> None:
    """A second scheduler with the same store finds as much as the first scheduler in memory."""
    kv = kv_config(**KINDS[kinds])
    disk = FakeDisk()
    first = TierRig(kv, disk=disk)
    ask(first, submit(0, PROMPT))
    in_memory = ask(first, submit(1, PROMPT))
    second = TierRig(kv, disk=disk)
    assert ask(second, submit(0, PROMPT)) == in_memory > 0
    stats = second.scheduler.stats().tier
    assert stats is not None
    assert stats.loads == {"done": 1}
    assert stats.saved_tokens == in_memory
    assert not stats.waiting
    assert not stats.pinned


@pytest.mark.parametrize("seeds", SEEDS)
@mostly_slow("depth", [1, 2], [2])
def test_random_loads_with_a_store(depth: int, seeds: range) -> None:
    """Sequences get the tokens of a run alone, and all blocks are free at the end: with stores and loads at
    any time, restarts, losses of ranks, failed copies and a disk that does not answer."""
    saved = blocks = copied = 0
    for seed in seeds:
        rng = random.Random(seed)
        disk = FakeDisk(fault=faulty(rng, rng.choice([0.0, 0.0, 0.2])))
        base = random_rig(random.Random(seed), depth)
        bases = random_bases(rng)
        for _ in range(2):  # the second run begins with the store of the first
            rig = TierRig(base.kv, depth, disk=disk, mode=rng.choice(["all", "reused"]))
            _run(rng, rig, bases)
            stats = rig.scheduler.stats().tier
            assert stats is not None
            saved += stats.saved_tokens
            blocks += rig.loaded_blocks
            copied += rig.copied
    assert min(saved, blocks, copied) > 0


def _run(rng: random.Random, rig: TierRig, bases: list[list[int]]) -> None:
    request = 0
    for _ in range(120):
        request += random_arrivals(rng, rig, bases, request, most=30)
        if rng.random() < 0.02:
            rig.lose()
        if rng.random() < 0.02:
            rig.loads.on(Flushed(), rig.now)
        rig.now += rng.choice([0.0, 0.01, 0.6])
        rig.collect(rig.scheduler.expire(rig.now))
        rig.ask()
        if rig.under_way and rng.random() < 0.5:
            rig.serve(rng.randrange(len(rig.under_way)))
        if rng.random() < 0.5 and len(rig.in_flight) < rig.depth and rig.scheduler.has_work():
            rig.plan()
        elif rig.in_flight:
            rig.commit()
        rig.audit()
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


def test_a_disk_that_does_not_answer_delays_a_prompt_once() -> None:
    """The sequence goes on at the deadline; the blocks stay pinned; the tier gets no further commands."""
    kv, disk = kv_config(), FakeDisk()
    ask(TierRig(kv, disk=disk), submit(0, PROMPT))
    rig = TierRig(kv, disk=disk)
    rig.submit(submit(0, PROMPT))
    rig.ask()
    [(command, _)] = rig.under_way
    assert command.load
    assert rig.scheduler.blocked
    rig.now += 1.0
    rig.collect(rig.scheduler.expire(rig.now))
    assert not rig.scheduler.blocked
    while rig.scheduler.has_work():
        rig.step()
    rig.check_outputs()
    rig.now += 60.0
    rig.submit(submit(1, PROMPT[:9] + [1] * 20))
    rig.ask()
    assert len(rig.under_way) == 1  # nothing is stored or loaded meanwhile
    stats = rig.loads.stats(rig.now)
    assert (stats.off, stats.pinned) == (1, command.size)
    rig.settle()
    assert rig.loads.stats(rig.now).off == 0
    rig.check_idle()
    assert stats.loads == {"late": 1}


def test_a_failed_block_is_a_shorter_hit() -> None:
    """A corrupt record ends the prefix before the record; later requests do not ask for it again."""
    kv, disk = kv_config(), FakeDisk()
    ask(TierRig(kv, disk=disk), submit(0, PROMPT))
    third = list(disk.records)[2]
    disk.fault = lambda command, entry: (
        BlockOutcome.CORRUPT if command.load and entry == third else BlockOutcome.DONE
    )
    rig = TierRig(kv, disk=disk)
    rig.submit(msg := submit(0, PROMPT))
    rig.settle()
    assert rig.outputs[msg.sequence].num_cached == 8
    stats = rig.loads.stats()
    assert stats.loads == {"corrupt": 1}
    assert rig.loads.book.state(*third) in ("resident", "disk")  # computed, and stored again


def test_a_store_that_turns_off_is_not_asked() -> None:
    kv, disk = kv_config(), FakeDisk()
    ask(TierRig(kv, disk=disk), submit(0, PROMPT))
    rig = TierRig(kv, disk=disk)
    rig.loads.on(Stopped("No space left on device"), 0.0)
    assert ask(rig, submit(0, PROMPT)) == 0
    assert rig.copied == rig.loaded_blocks == 0
    assert rig.loads.stats().off == 1


@pytest.mark.parametrize(
    ("mode", "session", "stored"),
    [("sessions", "", 0), ("sessions", "s", 9), ("reused", "", 0), ("reused", "s", 9), ("all", "", 9)],
)
def test_modes_choose_what_is_stored(mode: str, session: str, stored: int) -> None:
    rig = TierRig(kv_config(), mode=mode)  # type: ignore[arg-type]
    ask(rig, submit(0, PROMPT, session=session))
    assert len(rig.disk.records) == stored


def test_a_second_use_is_stored() -> None:
    rig = TierRig(kv_config(), mode="reused")
    ask(rig, submit(0, PROMPT))
    ask(rig, submit(1, PROMPT[:16] + [9] * 16))
    assert len(rig.disk.records) == 4
    assert rig.loads.stats().stores == {"reused": 4}


def test_computing_is_chosen_when_quicker() -> None:
    """A slow disk is not asked, and the request says why."""
    kv, disk = kv_config(), FakeDisk()
    ask(TierRig(kv, disk=disk), submit(0, PROMPT))
    rig = TierRig(kv, disk=disk)
    rig.loads.speeds.levels[1].rate = 1e-3
    assert ask(rig, submit(0, PROMPT)) == 0
    assert rig.loads.stats().loads == {"slower": 1}


def test_the_first_load_measures_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """However quick computing is, a command measures the disk. Then the load is cut, and the next prompt
    is computed at once."""
    monkeypatch.setattr(tiers, "LOAD_BYTES", 1)
    _, rig = stored(PROMPT, OTHER)
    rig.submit(submit(0, PROMPT))
    rig.ask()
    assert [command.size for command, _ in rig.under_way] == [1, 1]
    rig.seconds = 60.0
    rig.settle()
    assert rig.outputs[0].num_cached == 8
    rig.submit(submit(1, OTHER))
    rig.settle()
    rig.check_outputs()
    assert rig.loads.stats().loads == {"cut": 1, "slower": 1}


@pytest.mark.parametrize("end", ["cut", "abort", "preempt", "late", "lost", "flush"])
def test_a_load_that_ends_early_leaves_no_block_on_hold(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands are under way when the wait of the sequence ends. The blocks are free after the reports, also
    when a sequence has computed the same blocks meanwhile."""
    monkeypatch.setattr(tiers, "LOAD_BYTES", 1)  # one block for each command
    _, rig = stored(PROMPT, OTHER)
    rig.submit(submit(0, PROMPT))
    rig.submit(submit(1, PROMPT))
    rig.ask()
    assert [command.load for command, _ in rig.under_way] == [True, True]
    assert rig.loads.stats().pinned == 2
    if end == "cut":
        rig.seconds = 60.0
        rig.serve()
        assert rig.loads.stats().loads == {"cut": 2}
        assert rig.under_way
    elif end == "abort":
        rig.finish(0)
        rig.finish(1)
    elif end == "lost":
        rig.lose()
    elif end == "flush":
        rig.loads.on(Flushed(), rig.now)
    else:
        rig.now += 1.0
        rig.collect(rig.scheduler.expire(rig.now))
        rig.step()
        if end == "preempt":
            (sequence, *_) = rig.scheduler._state.running
            rig.scheduler._state.preempt(sequence, sequence.state)  # type: ignore[arg-type]
        while rig.scheduler.has_work():
            rig.step()
    rig.audit()
    rig.settle()
    rig.check_outputs()
    rig.audit()
    rig.check_idle()
    found = rig.loads.stats()
    assert (found.pinned, found.waiting) == (0, 0)
    book = rig.loads.book
    assert not any((book._jobs, book._loading, book._storing, book._reasons))
    assert not any(kind.pool._pins for kind in rig.scheduler._state.caches.kinds)


def test_a_block_that_left_the_store_is_not_asked_for() -> None:
    kv, disk = kv_config(), FakeDisk()
    ask(TierRig(kv, disk=disk), submit(0, PROMPT))
    rig = TierRig(kv, disk=disk)
    rig.loads.on(Changed([], list(disk.records)), 0.0)
    assert ask(rig, submit(0, PROMPT)) == 0
    assert not rig.loaded_blocks


def test_the_write_rate_spreads_stores() -> None:
    """Stores wait for the rate, and a block larger than one second's bytes is still stored."""
    rig = TierRig(kv_config(), mode="all")
    book = rig.loads.book
    book._rate = 2.0 * book._bytes[0]  # two blocks per second
    rig.submit(submit(0, PROMPT))
    while rig.scheduler.has_work():
        rig.step()
    counts = []
    for second in range(8):
        rig.now = 100.0 + second
        rig.ask()
        while rig.under_way:
            rig.serve()
        counts.append(len(rig.disk.records))
    assert counts[0] == 0
    assert all(later - earlier <= 2 for earlier, later in itertools.pairwise(counts))
    assert counts[-1] == 9


def test_commands_that_were_not_sent_end_with_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a loss of ranks, blocks have other contents: a command from before must not store the blocks."""
    rig = TierRig(kv_config(), mode="all")
    monkeypatch.setattr(tiers, "JOB_BYTES", 1)  # one block per command
    rig.submit(submit(0, PROMPT))
    while rig.scheduler.has_work():
        rig.step()
    rig.ask()
    rig.serve()  # the report makes room for another command, which waits to be sent
    rig.lose()
    rig.settle()
    assert rig.disk.records
    assert all(rig.disk.records.values())
    rig.check_idle()


def test_a_full_list_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks beyond the limit of waiting blocks are skipped and counted."""
    monkeypatch.setattr(tiers, "MOST_WANTED", 3)
    rig = TierRig(kv_config(), mode="all")
    assert ask(rig, submit(0, PROMPT)) == 0
    assert len(rig.disk.records) == 3
    assert rig.loads.stats().skipped == {"full": 6}


def stored(*prompts: list[int]) -> tuple[FakeDisk, TierRig]:
    """Return a disk with the blocks of ``prompts``, and a rig that begins with the disk."""
    disk, kv = FakeDisk(), kv_config(blocks=128)
    ask(TierRig(kv, disk=disk), *(submit(number, prompt) for number, prompt in enumerate(prompts)))
    return disk, TierRig(kv, disk=disk)


OTHER = [5, 2] * 16


@pytest.mark.parametrize("stuck", [False, True])
def test_sequences_do_not_wait_for_a_store_that_is_off_or_stuck(stuck: bool) -> None:
    """Sequences without a command under way go on at once, and statistics say so."""
    _, rig = stored(PROMPT, OTHER)
    rig.submit(submit(0, PROMPT))
    rig.ask()
    rig.now += 60.0
    rig.collect(rig.scheduler.expire(rig.now))
    if not stuck:
        rig.loads.on(Stopped("No space left on device"), rig.now)
    rig.submit(submit(1, OTHER))
    rig.ask()
    found = rig.scheduler.stats().tier
    assert found is not None
    assert (found.waiting, found.off) == (0, 1)


def test_a_store_that_turns_off_lets_waiting_sequences_go_on() -> None:
    _, rig = stored(PROMPT, OTHER, PROMPT[::-1])
    for number, prompt in enumerate((PROMPT, OTHER, PROMPT[::-1])):
        rig.submit(submit(number, prompt))
    rig.ask()
    first, _ = rig.under_way.pop(0)
    rig.loads.on(Copied(first.job, bytes([BlockOutcome.OFF]) * first.size), rig.now)
    assert rig.loads.book.off
    rig.ask()
    assert rig.loads.stats().waiting == len(rig.under_way)  # of the commands still under way
    rig.settle()
    rig.check_outputs()
    rig.check_idle()


def test_failed_loads_do_not_make_the_disk_slow() -> None:
    """Records that are gone say nothing about the rate, and a refused load is not refused for ever."""
    _, rig = stored(PROMPT)
    rig.submit(submit(0, PROMPT))
    rig.ask()
    [(command, _)] = rig.under_way
    rig.under_way.clear()
    rig.loads.on(Copied(command.job, bytes([BlockOutcome.GONE]) * command.size, 0, 1e-3), rig.now)
    assert rig.loads.speeds.levels[1].seconds(1 << 40) == 0
    rig.settle()

    speed = LoadSpeed()
    speed.observe(LARGE, 1.0)
    for _ in range(9):
        speed.observe(LARGE, 100.0)
    slow = speed.seconds(LARGE)
    for _ in range(1000):
        speed.refused()
    assert 1.0 == speed.seconds(LARGE) < slow


@pytest.mark.parametrize("mode", ["reused", "sessions"])
def test_a_preempted_sequence_loads_its_blocks(mode: str) -> None:
    """Two sequences do not fit side by side. Blocks of the sequence that gives way are stored when the
    sequence leaves, and loaded when the sequence goes on."""
    rig = TierRig(kv_config(blocks=16), mode=mode)  # type: ignore[arg-type]
    session = "s" if mode == "sessions" else ""
    for number, first in enumerate(([7, 3] * 8, [5, 2] * 8)):
        rig.submit(submit(number, first, max_tokens=28, session=session))
    rig.settle()
    rig.check_outputs()
    rig.check_idle()
    stats = rig.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.tier is not None
    assert stats.tier.loads == {"done": 1}
    assert stats.tier.saved_tokens >= 16
    assert ("preempted" in stats.tier.stores) == (mode == "reused")


@pytest.mark.parametrize("at_arrival", ["in memory", "loaded"])
def test_blocks_that_were_evicted_while_a_sequence_waited_are_loaded(at_arrival: str) -> None:
    """At the arrival all blocks of the prompt are in the pool, or are loaded. Then the sequence waits for
    its slot, and a sequence with the slot evicts the blocks."""
    rig = TierRig(kv_config(blocks=12), mode="all", max_num_seqs=1)
    ask(rig, submit(0, PROMPT))
    if at_arrival == "loaded":
        ask(rig, submit(1, [9] * 40))
    rig.submit(submit(2, [1, 2] * 4, max_tokens=40))
    rig.step()
    rig.submit(submit(3, PROMPT))
    rig.settle()
    rig.check_outputs()
    rig.check_idle()
    assert rig.outputs[3].num_cached == 28
    assert set(rig.loads.stats().loads) == {"done"}


def test_loaded_blocks_stay_until_the_admission() -> None:
    """Sequences that run take blocks while the loaded sequence waits for a slot: they evict the retained
    blocks of a session, not the loaded blocks."""
    disk, _ = stored(PROMPT)
    rig = TierRig(kv_config(blocks=32), disk=disk, max_num_seqs=2)
    state = rig.scheduler._state
    state.retention = Retention(state.caches, rig.kv.block_size, 600.0)
    ask(rig, submit(0, [9] * 40, session="s"))
    assert state.retention.blocks >= 10
    for number in (1, 2):
        rig.submit(submit(number, [number] * 8, max_tokens=32))
    rig.step()
    rig.submit(submit(3, PROMPT))
    rig.settle()
    rig.check_outputs()
    rig.check_idle()
    assert rig.outputs[3].num_cached == 28
    assert rig.loads.stats().loads == {"done": 1}
    assert not rig.loads._kept


def test_a_load_at_the_admission_reserves_the_blocks_of_its_sequence() -> None:
    disk, _ = stored(PROMPT)
    rig = TierRig(kv_config(blocks=16), disk=disk)
    for number, prompt in enumerate(([1] * 8, PROMPT, [2] * 16)):
        rig.submit(submit(number, prompt))
    rig.step()
    rig.step()
    assert [one.id for one in rig.scheduler._state.running] == [0]  # 2 fits beside 0, and not beside 0 and 1
    rig.settle()
    rig.check_outputs()
    rig.check_idle()
    assert rig.outputs[1].num_cached == 28
    assert rig.loads.stats().loads == {"done": 1}


def idle_with_a_load(blocks: int, behind: list[int]) -> TierRig:
    """Return a rig without a step in flight: sequence 1 will load its blocks at the admission, and sequence 2
    with the prompt ``behind`` waits behind sequence 1."""
    disk, _ = stored(PROMPT)
    rig = TierRig(kv_config(blocks=blocks), disk=disk)
    for number, prompt in enumerate(([9] * 8, PROMPT, behind)):
        rig.submit(submit(number, prompt))
    rig.scheduler.finish(0)
    return rig


def test_a_load_at_the_admission_leaves_an_idle_engine_work() -> None:
    """The sequence behind is planned at once: no step in flight would bring the next plan."""
    rig = idle_with_a_load(40, [5] * 8)
    plan = rig.scheduler.plan(rig.now)
    assert rig.loads.any_blocked
    assert plan is not None
    assert [one.id for one in rig.scheduler._state.running] == [2]


def test_an_idle_engine_waits_for_a_load_that_reserves_blocks() -> None:
    """The sequence behind does not fit beside the reserved blocks, so there is nothing to plan."""
    rig = idle_with_a_load(12, [5] * 16)
    assert rig.scheduler.plan(rig.now) is None
    assert rig.loads.any_blocked
    assert not rig.scheduler.has_work()
    rig.settle()
    rig.check_idle()
    assert rig.outputs[1].num_cached == 28
    assert rig.loads.stats().loads == {"done": 1}


def test_sequences_load_after_a_loss_of_ranks() -> None:
    rig = TierRig(kv_config(), mode="all")
    ask(rig, submit(0, PROMPT))
    rig.submit(submit(1, [*PROMPT, 1]))
    while not rig.outputs[1].tokens:
        rig.ask()
        rig.step()
    rig.lose()
    rig.settle()
    rig.check_outputs()
    assert rig.loads.stats().saved_tokens == 32


def test_a_flush_also_ends_loads_under_way() -> None:
    _, rig = stored(PROMPT)
    rig.submit(submit(0, PROMPT))
    rig.ask()
    assert rig.under_way
    rig.loads.on(Flushed(), rig.now)
    rig.settle()
    assert rig.outputs[0].num_cached == 0
    rig.check_outputs()
    rig.check_idle()


def test_later_prompts_do_not_cut_the_load_in_front() -> None:
    """A load is compared with the bytes before its own bytes, not with those of the whole queue."""
    prompts = [[number, 3] * 20 for number in range(10)]
    _, rig = stored(*prompts)
    for number, prompt in enumerate(prompts):
        rig.submit(submit(number, prompt))
    loads = list(rig.loads._loads.values())
    assert len(loads) > 2
    assert all(sum(load.nbytes) == rig.loads.book.bytes_of(load.left) for load in loads)
    front = loads[0]
    needs = rig.loads._compute_seconds(front.before, front.reach)
    rig.loads.speeds.levels[1].rate = 1.5 * sum(front.nbytes) / needs  # enough for the front alone
    rig.loads._check(front, [0, 0, 0], rig.now)
    assert front.sequence.loading
    rig.loads._check(loads[1], front.nbytes, rig.now)
    assert not loads[1].sequence.loading


def test_the_cost_of_a_long_prompt_is_predicted_in_few_parts() -> None:
    rig = TierRig(kv_config())
    rig.loads._chunk, calls = 1, []
    model = rig.loads._cost()
    rig.loads._cost = lambda: type(
        "Counted", (), {"predict": lambda self, shape: calls.append(1) or model.predict(shape)}
    )()
    whole = rig.loads._compute_seconds(0, 100_000)
    assert whole > 0
    assert len(calls) <= 64


class Explaining(TierRig):
    """A rig that remembers prompts, as with ``--explain-cache``, and records the reported misses."""

    def __init__(self, mode: StoreMode = "all") -> None:
        super().__init__(kv_config(), mode=mode)
        self.scheduler._state.misses.memory = PrefixMemory(self.kv.block_size, 1 << 20)
        self.reasons: dict[int, str] = {}

    def collect(self, events: list[TokenEvent]) -> None:
        super().collect(events)
        self.reasons.update({e.sequence: e.cache_miss.reason for e in events if e.cache_miss is not None})

    def why(self, number: int, prompt: list[int]) -> str:
        """Run a prompt. Return the reason of the miss."""
        ask(self, msgspec.structs.replace(submit(number, prompt), explain=True))
        return self.reasons[number]


@pytest.mark.parametrize("mode", ["all", "reused", "sessions"])
def test_a_miss_reports_why_a_block_is_not_stored(mode: StoreMode) -> None:
    """Each reason, for a prompt that the pool has evicted."""
    reasons = {
        "all": {
            BlockOutcome.NO_ROOM: "no_room",
            BlockOutcome.SLOW: "slow_store",
            BlockOutcome.SKIPPED: "too_large",
            BlockOutcome.DONE: "removed",
        },
        "reused": {BlockOutcome.DONE: "first_use"},
        "sessions": {BlockOutcome.DONE: "not_chosen"},
    }
    for outcome, reason in reasons[mode].items():
        rig = Explaining(mode)
        rig.disk.fault = lambda command, entry, outcome=outcome: outcome
        ask(rig, submit(0, PROMPT))
        for group in rig.scheduler._state.caches.kinds:
            group.pool.forget_unused()
        if reason == "removed":
            rig.loads.on(Changed([], list(rig.disk.records)), rig.now)
        assert rig.why(1, PROMPT) == reason


def test_a_miss_reports_a_level_without_an_answer() -> None:
    """A store that is away has removed nothing."""
    rig = Explaining()
    ask(rig, submit(0, PROMPT))
    for group in rig.scheduler._state.caches.kinds:
        group.pool.forget_unused()
    rig.loads.on(Changed([], [], DISK, whole=True), rig.now)
    assert rig.loads.book.blocks == [0, 0, 0]
    assert rig.why(1, PROMPT) == "off"


def test_a_block_whose_ranks_have_no_level_in_common_is_not_stored() -> None:
    rig = TierRig(kv_config(), mode="all")
    rig.submit(submit(0, PROMPT))
    while not rig.under_way:
        rig.step()
        rig.ask()
    command, _ = rig.under_way.pop()
    done = bytes([BlockOutcome.DONE]) * command.size
    rig.loads.on(Copied(command.job, done, levels=bytes(command.size)), rig.now)
    assert rig.loads.book.num_stored == 0
    assert rig.loads.book.skipped == {"slow": command.size}


def test_a_miss_reports_a_block_of_another_model() -> None:
    first = TierRig(kv_config())
    ask(first, submit(0, PROMPT))
    rig = Explaining()
    rig.loads.on(StoredElsewhere(frozenset(key for _, key in first.disk.records)), rig.now)
    assert rig.why(1, PROMPT) == "version"


def test_a_load_takes_each_block_from_the_quickest_level_and_measures_each_level() -> None:
    """A command loads from one level. Levels that end leave the blocks of other levels."""
    _, rig = stored(PROMPT)
    entries = list(rig.disk.records)
    book = rig.loads.book
    rig.loads.on(Changed(entries[::2], [], REMOTE), rig.now)
    rig.loads.on(Changed(entries[::3], [], HOST), rig.now)
    assert book.blocks == [len(entries[::3]), len(entries), len(entries[::2])]
    rig.loads.on(Changed([], [], DISK, whole=True), rig.now)
    left = {*entries[::2], *entries[::3]}
    assert book.num_stored == len(left)
    assert {book.place_of(entry) for entry in entries[::3]} == {0}
    rig.loads.on(Changed(entries, [], DISK), rig.now)
    places = {entry: book.place_of(entry) for entry in entries}
    rig.submit(submit(7, PROMPT))
    rig.ask()
    seen = set()
    while rig.under_way:
        command = rig.under_way[0][0]
        if command.load:
            (place,) = {places[kind, key] for kind, _, key in command.items()}
            seen.add(place)
        rig.serve()
        rig.ask()
    assert seen == {0, 1}
    rig.settle()
    stats = rig.scheduler.stats().tier
    assert stats is not None
    assert stats.levels["host"].loaded > 0
    assert stats.levels["disk"].loaded > 0
