"""Measure the scheduling cost of a step without a model: plan, commit and message encoding.

python -m bench.scheduler --json scheduler.json

A stub runner answers every plan with random tokens, so the timing covers the scheduler alone, used as the
engine does: two plans in flight, prefix caching on, blocks of 64. Times are milliseconds of CPU time. On an
idle machine CPU time equals wall time. A busy machine disturbs CPU time less.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sections.all import SchedulerSection
from weft.config.spec import CacheSpec
from weft.scheduler import Scheduler
from weft.types.messages import Submit, TokenEvent, Tokens, decode_to_front, encode, ids_to_bytes
from weft.types.plan import StepPlan, StepResult, column
from weft.types.sampling import TokenParams

VOCAB = 150_000
BLOCK = 64
SEQUENCES = 1024
STOP_IDS = (0, 1)
T = TypeVar("T")
Times = dict[str, list[float]]


def clocked(work: Callable[[], T]) -> tuple[T, float]:
    """Return (result of ``work``, milliseconds of this thread's CPU time)."""
    began = time.thread_time()
    made = work()
    return made, 1e3 * (time.thread_time() - began)


def make_scheduler(budget: int, blocks: int = 60_000, window: int = 0) -> Scheduler:
    """Return a scheduler for 1,024 running sequences. With ``window``, half of the layers have a window."""
    kinds = [CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=1)]
    if window:
        kinds.append(CacheSpec(kind="window", layers=(1,), window=window, kv_heads=1, head_dim=1))
    kv = KVConfig(
        pools=tuple(PoolSpec(cache=cache, block_size=BLOCK, num_blocks=blocks) for cache in kinds),
        block_size=BLOCK,
        enable_prefix_caching=True,
        max_model_len=16_384,
        num_slots=2 * SEQUENCES,
    )
    section = SchedulerSection(
        max_num_seqs=SEQUENCES, max_num_batched_tokens=budget, max_queued_requests=2 * SEQUENCES
    )
    return Scheduler(kv, section, VOCAB)


def answer(plan: StepPlan, rng: np.random.Generator, stop_rate: float) -> StepResult:
    """Return random tokens for every sampling row; the share ``stop_rate`` of tokens are stop ids."""
    parts = (plan.prefill, plan.decode)
    logits, sample = (np.concatenate([getattr(s, name) for s in parts]) for name in ("logits", "sample"))
    rows = np.flatnonzero(logits)
    offsets = np.concatenate([[0], np.cumsum(sample[rows])])
    tokens = rng.integers(len(STOP_IDS), VOCAB, offsets[-1])
    tokens[rng.random(len(tokens)) < stop_rate] = STOP_IDS[0]
    return StepResult(
        step=plan.step,
        rows=column(rows),
        offsets=column(offsets),
        tokens=column(tokens),
        accepted=column(np.zeros(len(rows))),
    )


@dataclass
class Load:
    """Drive a scheduler under load, as the engine does: two plans in flight."""

    scheduler: Scheduler
    stop_rate: float = 0.0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    in_flight: deque[tuple[StepPlan, StepResult]] = field(default_factory=deque)
    plan: StepPlan | None = None
    """The latest plan."""

    def turn(self) -> tuple[list[TokenEvent], float, float]:
        """Run one turn. Return (events, milliseconds of plan, milliseconds of commit)."""
        self.plan, planning = clocked(lambda: self.scheduler.plan(0.0))
        if self.plan is not None:
            self.in_flight.append((self.plan, answer(self.plan, self.rng, self.stop_rate)))
            if len(self.in_flight) < 2:
                return [], planning, 0.0
        plan, result = self.in_flight.popleft()
        events, committing = clocked(lambda: self.scheduler.commit(plan, result, 0.0))
        return events, planning, committing


def submits(rng: random.Random, prompts: tuple[int, int], outputs: tuple[int, int]) -> Iterator[Submit]:
    """Yield Submits without end, of random ids and lengths within the bounds."""
    number = 0
    while True:
        ids = np.frombuffer(rng.randbytes(4 * rng.randint(*prompts)), np.uint32) % VOCAB
        params = TokenParams(max_tokens=rng.randint(*outputs), stop_ids=STOP_IDS)
        yield Submit(
            sequence=rng.getrandbits(64), request=number, seed=1, prompt_ids=ids_to_bytes(ids), params=params
        )
        number += 1


def steady(turns: int, window: int = 0, blocks: int = 60_000) -> Times:
    """Return times with 1,024 decoding and 1,024 waiting sequences. Some end in every step, and others
    replace them.
    """
    load = Load(make_scheduler(3 * SEQUENCES, blocks, window), stop_rate=0.001)
    arriving = submits(random.Random(1), (32, 512), (64, 400))
    times: Times = {"plan": [], "commit": [], "sum": []}
    turn = 0
    while len(times["sum"]) < turns:
        while load.scheduler.stats().waiting < SEQUENCES:
            load.scheduler.add(next(arriving), 0.0)
        _, planning, committing = load.turn()
        turn += 1
        if turn > 500:  # all slots are taken, and ends are spread evenly
            for name, ms in zip(times, (planning, committing, planning + committing), strict=True):
                times[name].append(ms)
    assert load.plan is not None
    assert load.plan.rows > SEQUENCES // 2
    return times


def boundary(crossings: int) -> Times:
    """Return times of turns in which all 1,024 sequences of equal length need a block and insert one into the
    cache.
    """
    load = Load(make_scheduler(SEQUENCES * BLOCK))
    arriving = submits(random.Random(2), (BLOCK - 4, BLOCK - 4), (15_000, 15_000))
    for _ in range(SEQUENCES):
        load.scheduler.add(next(arriving), 0.0)
    times: Times = {"plan": [], "commit": [], "sum": []}
    while len(times["sum"]) < crossings:
        _, planning, committing = load.turn()
        assert load.plan is not None
        starts = load.plan.decode.start
        if len(starts) == SEQUENCES and starts[0] % BLOCK == 0:
            for name, ms in zip(times, (planning, committing, planning + committing), strict=True):
                times[name].append(ms)
    return times


def admission(prompts: int, length: int) -> dict[str, float]:
    """Return milliseconds for ``prompts`` prompts: adding, prefill, and prefill of the same prompts from
    cache."""
    load = Load(make_scheduler(16 * SEQUENCES))
    arriving = submits(random.Random(3), (length, length), (1, 1))
    made: dict[str, float] = {}
    batch = [next(arriving) for _ in range(prompts)]
    for name in ("cold", "cached"):
        adding = [clocked(lambda s=submit: load.scheduler.add(s, 0.0))[1] for submit in batch]  # type: ignore[misc]
        turns = []
        while load.scheduler.has_work():
            turns.append(sum(load.turn()[1:]))
        made |= {f"{name}, add": sum(adding), f"{name}, steps": sum(turns), f"{name}, worst step": max(turns)}
    return made


def messages(rounds: int) -> Times:
    """Return times of a frame with 1,024 events: encoding in the engine, decoding in the API server."""
    load = Load(make_scheduler(SEQUENCES * BLOCK))
    arriving = submits(random.Random(4), (BLOCK - 4, BLOCK - 4), (1000, 1000))
    for _ in range(SEQUENCES):
        load.scheduler.add(next(arriving), 0.0)
    times: Times = {"encode": [], "decode": [], "kilobytes": []}
    while len(times["encode"]) < rounds:
        events = load.turn()[0]
        if len(events) == SEQUENCES:
            frame, encoding = clocked(lambda: encode(Tokens(step=1, events=tuple(events))))  # noqa: B023
            decoding = clocked(lambda: decode_to_front(frame))[1]  # noqa: B023
            for name, value in zip(times, (encoding, decoding, len(frame) / 1024), strict=True):
                times[name].append(value)
    return times


def report(name: str, times: Times) -> dict[str, dict[str, float]]:
    """Print and return the median, the p99 and the maximum of each column."""
    made = {}
    for column_name, values in times.items():
        median, p99 = np.percentile(values, [50, 99])
        made[column_name] = {"median": float(median), "p99": float(p99), "max": max(values)}
        print(f"{name:34} {column_name:10} {median:9.3f} {p99:9.3f} {max(values):9.3f}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=500, help="timed turns of the steady loads")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    args = parser.parse_args()
    print(f"{'milliseconds':45} {'median':>9} {'p99':>9} {'max':>9}")
    made: dict[str, object] = {
        "steady": report("steady, 1,024 + 1,024", steady(args.turns)),
        "window": report("steady, full and window layers", steady(args.turns, window=512)),
        "pressure": report("steady, blocks are short", steady(args.turns, blocks=5_500)),
        "boundary": report("all cross a block boundary", boundary(40)),
        "messages": report("frame of 1,024 events", messages(100)),
        "admission": admission(64, 8192),
    }
    for name, ms in made["admission"].items():  # type: ignore[attr-defined]
        print(f"{'64 prompts of 8,192 tokens':34} {name:20} {ms:9.3f}")
    if args.json:
        args.json.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
