"""Measure how long prompts delay decoding sequences, on a real engine.

python -m bench.starvation --model spool-text --decodes 32 --prompts 100

Decodes run alone for a while, then all prompts arrive at once. Three engines take turns in every round: mixed
steps with the default budget, mixed steps with an inter-token target, and exclusive steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from bench import record
from bench.load import engine, model_flags, request
from weft.engine.core import EngineCore
from weft.sim.metrics import Latency, Stream, gaps, prompt_window, rate
from weft.sim.workload import Arrival, background


@dataclass
class Row:
    """Hold one run: inter-token times of decodes alone and beside prompts, and prompt tokens per second."""

    alone: Latency
    beside: Latency
    prompt_rate: float


class Run:
    """Put one engine under load."""

    def __init__(self, core: EngineCore, args: argparse.Namespace, seed: int) -> None:
        self.core, self.args = core, args
        self.rng = random.Random(seed)
        self.streams: list[Stream] = []
        self.origin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.origin

    def submit(self, arrival: Arrival) -> None:
        number = len(self.streams)
        self.streams.append(Stream(arrival))
        vocabulary = self.core.config.spec.vocab_size
        made = request(number, arrival.prompt, arrival.output, vocabulary, self.rng)
        # Priority -1: the replacement of an ended decode must not queue behind the prompts.
        priority = -1 if arrival.background else 0
        self.core.submit(msgspec.structs.replace(made, priority=priority))

    def turn(self) -> None:
        events, now = self.core.step(), self.now()
        for event in events:
            stream = self.streams[event.sequence]
            stream.times += [now] * len(event.token_ids)
            if event.finish is not None:
                stream.finish = event.finish
                if stream.arrival.background:
                    self.submit(replace(stream.arrival, at=now, output=stream.arrival.again))

    def measure(self) -> Row:
        args = self.args
        for arrival in background(args.decodes, args.decode_context, args.decode_tokens, self.rng):
            self.submit(arrival)
        while self.now() < args.warm_up + args.alone:
            self.turn()
        come = self.now()
        for _ in range(args.prompts):
            self.submit(Arrival(come, args.prompt_tokens, args.output_tokens))
        requests = [stream for stream in self.streams if not stream.arrival.background]
        with tqdm(total=args.prompts, unit="prompt", leave=False) as bar:
            while not all(stream.times for stream in requests):
                self.turn()
                bar.n = sum(stream.finish is not None for stream in requests)
                bar.update(0)
        for _ in range(8):  # by now every sequence that waited for the prompts has its next token
            self.turn()
        decodes = [stream for stream in self.streams if stream.arrival.background]
        begin, end = prompt_window(requests)
        return Row(
            alone=Latency.of(gaps(decodes, come - args.alone, come)),
            beside=Latency.of(gaps(decodes, begin, end)),
            prompt_rate=rate(args.prompts * args.prompt_tokens, end - begin),
        )


def run(args: argparse.Namespace, seed: int, **settings: Any) -> Row:
    """Return one row of the table. The engine has slots for all decodes and the same number of prompts."""
    core = engine(
        args.model,
        args.threads,
        max_num_seqs=2 * args.decodes,
        steps_in_flight=args.steps_in_flight,
        max_model_len=max(args.prompt_tokens + args.output_tokens, args.decode_context + args.decode_tokens),
        **settings,
    )
    try:
        return Run(core, args, seed).measure()
    finally:
        core.close()


def line(name: str, rows: list[Row], exclusive: list[Row]) -> dict[str, Any]:
    """Return one row of the table: medians over rounds, in milliseconds. Rates are relative to
    ``exclusive``.
    """
    alone, beside = [row.alone for row in rows], [row.beside for row in rows]
    # Ratios pair rounds, because a slow round is slow for both.
    ratios = [(b.p50 / a.p50, b.p99 / a.p99) for a, b in zip(alone, beside, strict=True)]
    shares = [row.prompt_rate / other.prompt_rate for row, other in zip(rows, exclusive, strict=True)]

    def ms(values: list[float]) -> float:
        return round(statistics.median(values) * 1e3, 1)

    return {
        "steps": name,
        "alone p50": ms([a.p50 for a in alone]),
        "p99": ms([a.p99 for a in alone]),
        "beside p50": ms([b.p50 for b in beside]),
        "beside p99": ms([b.p99 for b in beside]),
        "p50 ratio": round(statistics.median(r for r, _ in ratios), 2),
        "p99 ratio": round(statistics.median(r for _, r in ratios), 2),
        "each round": " ".join(f"{ratio:.2f}" for _, ratio in ratios),
        "prompt tok/s": round(statistics.median(row.prompt_rate for row in rows)),
        "of exclusive": round(statistics.median(shares), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model_flags(parser)
    parser.add_argument("--decodes", type=int, default=32, help="sequences that decode all along")
    parser.add_argument("--decode-context", type=int, default=64, help="prompt tokens of those")
    parser.add_argument("--decode-tokens", type=int, default=256, help="tokens until one is replaced")
    parser.add_argument("--prompts", type=int, default=100, help="prompts that come at once")
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="tokens of each")
    parser.add_argument("--output-tokens", type=int, default=16, help="tokens made after each")
    parser.add_argument("--warm-up", type=float, default=2.0, help="seconds of decoding before measuring")
    parser.add_argument("--alone", type=float, default=5.0, help="seconds of decoding alone")
    parser.add_argument(
        "--itl-target-ms", type=float, default=0.0, help="0: 1.6 times the decodes' median time alone"
    )
    parser.add_argument("--steps-in-flight", type=int, default=2, help="1 or 2")
    parser.add_argument("--rounds", type=int, default=3, help="times that each variant runs")
    parser.add_argument("--json", type=Path, help="a file for the numbers; a .md beside it gets the table")
    args = parser.parse_args()
    rows: dict[str, list[Row]] = {"mixed, default budget": [], "mixed, target": [], "exclusive": []}
    target = args.itl_target_ms
    for turn in range(args.rounds):
        rows["mixed, default budget"].append(run(args, args.seed + turn))
        target = target or 1.6e3 * rows["mixed, default budget"][0].alone.p50
        rows["mixed, target"].append(run(args, args.seed + turn, itl_target_ms=target))
        rows["exclusive"].append(run(args, args.seed + turn, step_policy="exclusive"))
    title = (
        f"{args.prompts} prompts of {args.prompt_tokens} tokens against {args.decodes} decodes; "
        f"target {target:.1f} ms; medians of {args.rounds} rounds; inter-token times in ms"
    )
    made = [line(name, found, rows["exclusive"]) for name, found in rows.items()]
    table = f"{title}\n\n{record.markdown(made)}"
    print(table)
    if args.json is not None:
        numbers = {"model": args.model, "target_ms": target, "rows": made}
        record.write(args.json, "bench.starvation", f"Starvation: {args.model}", table, numbers)


if __name__ == "__main__":
    main()
