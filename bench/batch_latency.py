"""Measure the p99 time to first token beside batches, on virtual time.

python -m bench.batch_latency --lines 1 2 4 16 --seeds 8

Each seed has Poisson arrivals of online requests, once alone and once beside ``--lines`` lines of a batch. A
line that ends is replaced at once. p99 is over the requests of all seeds together. The last column is the
mean time from an arrival to the end of the running step; 0 for an idle device.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from weft.config.sections.all import SchedulerSection, SpeculationSection
from weft.sim.engine import Simulation, kv_config
from weft.sim.presets import load
from weft.sim.workload import Arrival, Lengths, poisson
from weft.types.messages import Submit
from weft.types.plan import StepPlan
from weft.types.priority import BATCH_PRIORITY

PROMPT = Lengths(100, 600)
OUTPUT = 40


class BesideLines(Simulation):
    """A simulation whose background sequences are lines of a batch."""

    def __init__(self, *args: Any, seed: int, **more: Any) -> None:
        super().__init__(*args, seed=seed, **more)
        self.lines = 0
        """Number of lines done."""
        self.steps: list[tuple[float, float]] = []
        """(start, end) of each step, in seconds."""
        self._lengths = random.Random(seed + 1000)
        self._launch = self.device.launch
        self.device.launch = self._note  # type: ignore[method-assign]

    def _note(self, plan: StepPlan, now: float) -> float:
        end = self._launch(plan, now)
        self.steps.append((now, end))
        return end

    def _submit_of(self, number: int, arrival: Arrival) -> Submit:
        submit = super()._submit_of(number, arrival)
        if not arrival.background:
            return submit
        return msgspec.structs.replace(submit, priority=BATCH_PRIORITY, owner=1)

    def _end(self, arrival: Arrival) -> None:
        if arrival.background:
            self.lines += 1
            arrival = replace(arrival, prompt=PROMPT.draw(self._lengths))
        super()._end(arrival)


@dataclass(frozen=True)
class Run:
    """Results of one seed."""

    ttft: np.ndarray
    """Milliseconds, float64 [requests]."""
    residual: np.ndarray
    """Milliseconds from the arrival to the end of the running step, float64 [requests]."""
    lines: float
    """Lines per second."""


def run(seed: int, lines: int, requests: int, rate: float, drafts: int = 0) -> Run:
    """Return the results of one seed beside ``lines`` lines. ``drafts``: drafts of a sequence per step."""
    rng = random.Random(seed)
    section = SchedulerSection(max_num_seqs=64, max_num_batched_tokens=512)
    arrivals = poisson(requests, rate, PROMPT, Lengths(OUTPUT, OUTPUT), rng)
    arrivals += [Arrival(0.0, PROMPT.draw(rng), OUTPUT, OUTPUT) for _ in range(lines)]
    kv = kv_config(section, 1024, drafts=drafts)
    speculation = SpeculationSection() if drafts else None
    cost = load("spool-text-cpu")
    simulation = BesideLines(kv, section, cost, arrivals, seed=seed, speculation=speculation, acceptance=0.7)
    seconds = simulation.run().seconds
    online = [stream for stream in simulation.streams if not stream.arrival.background]
    at = np.array([stream.arrival.at for stream in online])
    starts, ends = np.array(simulation.steps).T
    # A step that starts at the arrival includes the request, so only earlier steps count.
    step = np.maximum(np.searchsorted(starts, at) - 1, 0)
    return Run(
        ttft=1e3 * (np.array([stream.times[0] for stream in online]) - at),
        residual=1e3 * np.where(starts[step] < at, np.maximum(ends[step] - at, 0.0), 0.0),
        lines=simulation.lines / seconds,
    )


def main() -> None:
    """Print one row for each number of lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--lines", type=int, nargs="+", default=[1, 2, 4], help="lines at once")
    parser.add_argument("--seeds", type=int, default=8, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=1000, help="online requests of a seed")
    parser.add_argument("--rate", type=float, default=6.0, help="online requests per second")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each sequence in a step")
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    alone = 0.0
    print("lines | p50, ms | p99, ms | factor | lines per second | step at arrival, ms")
    for lines in [0, *given.lines]:
        runs = [run(seed, lines, given.requests, given.rate, given.drafts) for seed in seeds]
        p50, p99 = np.percentile(np.concatenate([one.ttft for one in runs]), [50, 99])
        alone = alone or p99
        speed = np.mean([one.lines for one in runs])
        residual = np.mean(np.concatenate([one.residual for one in runs]))
        print(
            f"{lines} | {p50:.1f} | {p99:.1f} | {p99 / alone:.3f} | {speed:.2f} | {residual:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
