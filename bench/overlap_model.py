"""Compute the gain of micro-batches in virtual time, with given times for compute and links.

python -m bench.overlap_model --markdown bench/results/overlap-model.md

The real scheduler, split, ``interleave`` and policy run on the simulator's clock. A step has ``--layers``
layers. Attention and feed-forward take ``--fixed`` microseconds each (reading weights, launching) plus
``--token`` microseconds per token. A collective follows, which ends ``--delays`` milliseconds (plus ``--row``
microseconds per token) later. Micro-batches pay ``--fixed`` twice. Compute does not slow links down: true for
a GPU, false for two processes on two cores. ``bench.overlap`` measures real compute. The figures are equal on
every machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sections.all import SchedulerSection
from weft.config.spec import CacheSpec
from weft.overlap.drive import drive
from weft.overlap.interleave import interleave
from weft.overlap.policy import OverlapPolicy
from weft.overlap.split import split
from weft.overlap.times import StepTimes
from weft.parallel.comm import Pending
from weft.parallel.launcher import Flight
from weft.scheduler.policy.step_cost import PRIOR
from weft.sim.device import FakeDevice
from weft.sim.engine import Simulation
from weft.sim.workload import Arrival
from weft.types.plan import StepPlan

MODES = ("off", "prefill", "all", "auto")


@dataclass
class Link(Pending):
    """A collective in virtual time."""

    device: Overlapped
    flight: Flight

    def result(self) -> Any:
        late = max(self.flight.ended - self.device.now, 0.0)
        self.flight.waited += late
        self.device.now += late


class Overlapped(FakeDevice):
    """Simulate a device whose steps are generators in virtual time, in micro-batches where ``policy`` chooses
    them.
    """

    def __init__(self, args: argparse.Namespace, delay: float, policy: OverlapPolicy) -> None:
        super().__init__(PRIOR, vocabulary=1024)
        self._args, self._delay, self._policy = args, delay, policy
        self.now = self.waited = self.under_way = 0.0
        self.overlapped = self.steps = 0
        self._flights: list[Flight] = []

    def launch(self, plan: StepPlan, now: float) -> float:
        self.now = now
        micro_batches = split(plan) if self._policy.wants(plan) else None
        if micro_batches is None:
            drive(self._model(plan.tokens))
        else:
            interleave(self._model(micro_batches.first.tokens), self._model(micro_batches.second.tokens))
        number = 1 if micro_batches is None else 2
        times = StepTimes(micro_batches=number, seconds=self.now - now, flights=self._flights)
        self._flights = []
        self._policy.observe(plan, times)
        self.steps += 1
        self.overlapped += number > 1
        self.waited += times.waited
        self.under_way += times.communication
        return self.now

    def _model(self, tokens: int) -> Generator[Pending, None, None]:
        args = self._args
        for _ in range(2 * args.layers):
            self.now += (args.fixed + args.token * tokens) / 1e6
            flight = Flight(0, self.now, self.now, self.now + self._delay + args.row * tokens / 1e6)
            self._flights.append(flight)
            pending = Link(self, flight)
            yield pending
            pending.result()


def run(args: argparse.Namespace, delay: float, size: int, mode: str) -> tuple[float, Overlapped]:
    """(seconds, device) of ``size`` requests at once, ``--waves`` times, one after the other."""
    policy, seconds = OverlapPolicy(mode), 0.0
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=1, head_dim=8, form="gqa")
    kv = KVConfig(
        pools=(PoolSpec(cache=cache, block_size=64, num_blocks=4096),),
        block_size=64,
        enable_prefix_caching=False,
        max_model_len=4096,
        num_slots=size,
        copies=1,
    )
    section = SchedulerSection(max_num_seqs=size, max_num_batched_tokens=args.budget, steps_in_flight=1)
    device = Overlapped(args, delay, policy)
    for _ in range(args.waves):
        arrivals = [Arrival(0.0, args.prompt_tokens, args.tokens) for _ in range(size)]
        seconds += Simulation(kv, section, PRIOR, arrivals, device=device).run().seconds
    return seconds, device


HEADER = [
    "| delay ms | requests | overlap | output tokens/s | times off | steps in micro-batches | waited s "
    "| communication hidden |",
    "|---:|---:|---|---:|---:|---:|---:|---:|",
]


def lines(args: argparse.Namespace, delay: float) -> list[str]:
    """Rows of the table."""
    made = []
    for size in args.concurrency:
        off = 0.0
        for mode in MODES:
            seconds, device = run(args, delay / 1e3, size, mode)
            off = off or seconds
            hidden = 1.0 - device.waited / device.under_way if device.under_way else 0.0
            made.append(
                f"| {delay:g} | {size} | {mode} | {size * args.waves * args.tokens / seconds:.1f} "
                f"| {off / seconds:.3f} | {device.overlapped} of {device.steps} | {device.waited:.2f} "
                f"| {hidden:.0%} |"
            )
    return made


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fixed", type=float, default=2000.0, help="microseconds of a layer's micro-batch")
    parser.add_argument("--token", type=float, default=40.0, help="microseconds of a token in it")
    parser.add_argument("--row", type=float, default=2.0, help="microseconds of a token on the link")
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 1.0, 5.0], help="milliseconds")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=24, help="of each answer")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a step at most")
    parser.add_argument("--waves", type=int, default=8, help="how often all requests come")
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


def main() -> None:
    args = parse()
    table = list(HEADER)
    for delay in args.delays:
        table += lines(args, delay)
    print("\n".join(table))
    if args.markdown:
        args.markdown.write_text(
            "# Overlap in virtual time\n\n"
            f"`python -m bench.overlap_model`: no measurement, but the real scheduler, split, `interleave` "
            f"and policy on a virtual clock. {args.layers} layers; attention and feed-forward of each take "
            f"{args.fixed / 1e3:g} ms and {args.token:g} us a token, the collective behind it the delay and "
            f"{args.row:g} us a token; {args.prompt_tokens} + {args.tokens} tokens a request, {args.waves} "
            f"waves of all requests at once, {args.budget} tokens a step. `auto` begins knowing nothing.\n\n"
            + "\n".join(table)
            + "\n"
        )


if __name__ == "__main__":
    main()
