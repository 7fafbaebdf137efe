"""Measure a burst of requests on ranks that share experts, with one and with several sequence slots.

python -m bench.burst --model spool-mla --json burst.json

The script builds two engines on the same ranks: one with ``--max-num-seqs 1``, one with ``--slots``. Rounds
of both engines are interleaved. All requests of a burst arrive at once. Times run from the arrival to the
first token and to the last token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.load import engine, model_flags, request
from bench.machine import describe
from weft.engine.core import EngineCore


@dataclass
class Burst:
    """Hold the seconds of each request of one burst, and the counters of the engine."""

    first: list[float]
    last: list[float]
    tokens: int
    steps: int

    @property
    def seconds(self) -> float:
        return max(self.last)


def run(core: EngineCore, args: argparse.Namespace, size: int, rng: random.Random, base: int) -> Burst:
    """Submits ``size`` requests, numbered from ``base``, and steps until all have ended."""
    vocabulary, steps = core.config.spec.vocab_size, core.stats().steps
    made = [request(base + n, args.prompt_tokens, args.tokens, vocabulary, rng) for n in range(size)]
    began = time.perf_counter()
    for one in made:
        core.submit(one)
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    tokens = 0
    while core.has_work():
        for event in core.step():
            now = time.perf_counter() - began
            tokens += len(event.token_ids)
            first.setdefault(event.sequence, now)
            last[event.sequence] = now
            if event.error is not None:
                raise RuntimeError(event.error.message)
    return Burst(list(first.values()), list(last.values()), tokens, core.stats().steps - steps)


def summary(bursts: list[Burst]) -> dict[str, float]:
    """Medians over rounds."""

    def median(values: list[float]) -> float:
        return round(statistics.median(values), 4)

    return {
        "ttft_p50": median([statistics.median(b.first) for b in bursts]),
        "ttft_worst": median([max(b.first) for b in bursts]),
        "latency_p50": median([statistics.median(b.last) for b in bursts]),
        "latency_worst": median([max(b.last) for b in bursts]),
        "tokens_per_second": median([b.tokens / b.seconds for b in bursts]),
        "steps": median([b.steps for b in bursts]),
        "step_ms": median([1e3 * b.seconds / b.steps for b in bursts]),
    }


COLUMNS = ("ttft_p50", "ttft_worst", "latency_p50", "latency_worst", "tokens_per_second", "steps", "step_ms")


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return one line per burst size and number of slots, and a line of ratios per burst size."""
    lines = [f"{'burst':>6}{'slots':>7}" + "".join(f"{name:>19}" for name in COLUMNS)]
    for size, by_slots in found.items():
        for slots, values in by_slots.items():
            cells = "".join(f"{values[name]:19.3f}" for name in COLUMNS)
            lines.append(f"{size:>6}{slots:>7}{cells}")
        one, many = by_slots.values()
        lines.append(
            f"{'':6} worst first token {one['ttft_worst'] / many['ttft_worst']:.1f}x better, worst latency "
            f"{one['latency_worst'] / many['latency_worst']:.2f}x, tokens a second "
            f"{many['tokens_per_second'] / one['tokens_per_second']:.2f}x"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_flags(parser)
    parser.add_argument("--ranks", type=int, default=2, help="ranks that share the experts")
    parser.add_argument("--slots", type=int, default=4, help="--max-num-seqs of the second engine")
    parser.add_argument("--bursts", type=int, nargs="+", default=[4, 8], help="requests that arrive at once")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=80, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    slots = (1, args.slots)
    cores = {
        number: engine(
            args.model,
            args.threads,
            max_num_seqs=number,
            tensor_parallel_size=args.ranks,
            enable_expert_parallel=True,
        )
        for number in slots
    }
    rng, base = random.Random(args.seed), 0
    runs: dict[tuple[int, int], list[Burst]] = {(size, s): [] for size in args.bursts for s in slots}
    try:
        for turn in range(args.rounds + 1):
            for size, number in runs:
                burst = run(cores[number], args, size, rng, base)
                base += size
                if turn:  # the first warms up
                    runs[size, number].append(burst)
    finally:
        for core in cores.values():
            core.close()
    found = {str(size): {str(s): summary(runs[size, s]) for s in slots} for size in args.bursts}
    print(f"{args.model}, {args.ranks} ranks, {args.tokens} tokens each; medians of {args.rounds} rounds")
    print(table(found))
    if args.json:
        facts = {"machine": describe(), "arguments": {k: str(v) for k, v in vars(args).items()}}
        args.json.write_text(json.dumps({**facts, "bursts": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
