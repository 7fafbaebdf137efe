"""Workloads W1 to W3: load every engine, then run interleaved rounds. Engines are stopped between their
turns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.driver import Driver, PeerError, pinned
from bench.rows import Row, Setting
from weft.bench.workloads import Workload, prompts

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Hold the maximum seconds of each stage."""

    load: float
    run: float


def say(text: str) -> None:
    """Print progress on stderr with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def value_of(workload: Workload, seconds: float) -> float:
    """Return the measure of the workload: tokens per second, or milliseconds per token."""
    if workload.measure == "token_seconds":
        return 1000 * seconds / (workload.requests * workload.output_tokens)
    tokens = workload.prompt_tokens if workload.measure == "prompt_rate" else workload.output_tokens
    return workload.requests * tokens / seconds


def turns(names: Sequence[str], number: int) -> list[str]:
    """Return the order of a round. Each round begins with another engine."""
    shift = number % max(len(names), 1)
    return [*names[shift:], *names[:shift]]


def differing(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> int:
    """Return the number of requests with different tokens."""
    return sum(list(left) != list(right) for left, right in zip(one, other, strict=True))


class Session:
    """Run engines that are loaded together. A failure is recorded for its engine; the other engines
    continue.
    """

    def __init__(
        self, rows: Sequence[Row], setting: Setting, deadlines: Deadlines, vocabulary: int, logs: Path
    ) -> None:
        self.rows = {row.name: row for row in rows}
        self.records: dict[str, Record] = {row.name: {"samples": {}} for row in rows}
        self._setting = setting
        self._deadlines = deadlines
        self._vocabulary = vocabulary
        self._logs = logs
        self._drivers: dict[str, Driver] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        for row in self.rows.values():
            self._attempt(row.name, f"{row.name}: loading", lambda row=row: self._load(row))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After an interruption a driver may still owe an answer, so send no further message.
        for name in list(self._drivers) if kind is None else ():
            self._attempt(name, f"{name}: closing", lambda name=name: self._memory(name))
        self._stack.close()

    def rounds(self, workloads: Sequence[Workload], count: int) -> None:
        """Run a warm-up of every engine and workload, then ``count`` rounds."""
        for number in range(count + 1):
            for workload in workloads:
                for name in turns(list(self._drivers), number):
                    label = f"round {number}/{count}" if number else "warm-up"
                    self._attempt(
                        name,
                        f"{label}: {workload.name} {name}",
                        lambda name=name, workload=workload, number=number: self._sample(
                            name, workload, number
                        ),
                    )

    def determinism(self, workload: Workload, output_tokens: int) -> None:
        """Compare greedy tokens of two identical runs, and of 16 requests together and one at a time."""
        asked = prompts(workload, 0, self._vocabulary)
        for name in list(self._drivers):
            self._attempt(
                name,
                f"{name}: are tokens the same",
                lambda name=name: self._same_tokens(name, workload.output_tokens, output_tokens, asked),
            )

    def _attempt(self, name: str, label: str, action: Callable[[], str | None]) -> None:
        began = time.monotonic()
        try:
            told = action()
        except PeerError as error:
            self.records[name]["error"] = f"{label}: {error}"
            say(f"{label}: FAILED: {error}")
            if name in self._drivers:
                self._drivers.pop(name).close()
            return
        say(f"{label}: {told or 'done'} ({time.monotonic() - began:.1f} s)")

    def _load(self, row: Row) -> str:
        driver = Driver(
            pinned(row.driver, self._setting.threads), row.environment, self._logs / f"{row.name}.log"
        )
        self._stack.callback(driver.close)
        with driver.turn():
            answer = driver.ask(row.load_message(self._setting), self._deadlines.load)
        self._drivers[row.name] = driver
        self.records[row.name] |= {"version": answer["version"], "load_s": answer["ready_s"]}
        return f"{answer['version']}, ready after {answer['ready_s']:.1f} s"

    def _sample(self, name: str, workload: Workload, number: int) -> str:
        asked = prompts(workload, number, self._vocabulary)
        answer = self._run(name, workload.name, asked, workload.output_tokens)
        if number:
            self.records[name]["samples"].setdefault(workload.name, []).append(answer["seconds"])
        return f"{value_of(workload, answer['seconds']):.1f}"

    def _same_tokens(self, name: str, whole: int, some: int, asked: list[list[int]]) -> str:
        first, second = (self._run(name, "same", asked, whole)["tokens"] for _ in range(2))
        few = asked[:16]
        together = self._run(name, "together", few, some)["tokens"]
        alone = [self._run(name, "alone", [prompt], some)["tokens"][0] for prompt in few]
        found = {
            "two_runs": [differing(first, second), len(asked)],
            "batch_against_single": [differing(together, alone), len(few)],
        }
        self.records[name]["differing_requests"] = found
        return ", ".join(f"{what} {a} of {b} differ" for what, (a, b) in found.items())

    def _memory(self, name: str) -> str:
        with self._drivers[name].turn():
            answer = self._drivers[name].ask({"memory": True}, 30)
        self.records[name]["peak_rss"] = answer["peak_rss"]
        return f"peak memory {answer['peak_rss'] / 1e9:.2f} GB"

    def _run(self, name: str, label: str, asked: list[list[int]], output_tokens: int) -> dict[str, Any]:
        message = {"run": label, "prompts": asked, "output_tokens": output_tokens}
        with self._drivers[name].turn():
            return self._drivers[name].ask(message, self._deadlines.run)
