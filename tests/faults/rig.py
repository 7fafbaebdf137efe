"""Run an engine over real rank processes with planted faults."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tests.support.slowness import deadline
from weft.api.settings import read_settings
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.types.faults import Deed, Fault, Phase
from weft.types.messages import Submit, ids_to_bytes
from weft.types.sampling import TokenParams

ROUND = deadline(240.0)
"""Maximum seconds for all requests of a round, whatever happens."""
Plan = tuple[int, Phase, Deed]
"""(rank, phase of the fault, deed)."""


@dataclass
class Told:
    """Hold the result of one sequence."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None


def config_of(**settings: Any) -> EngineConfig:
    """Return a configuration of the bundled model over ranks, in float64, so that tokens do not depend on the
    batch.
    """
    settings = {
        "dtype": "float64",
        "max_num_seqs": 4,
        "rank_timeout": deadline(10.0),
        "max_model_len": 256,
        **settings,
    }
    return resolve(read_settings("spool-text", settings))


def chain(folder: Path, plans: Sequence[Plan], after: int) -> tuple[Fault, ...]:
    """Return faults that strike in order: each is armed by the one before, and the first by the file
    ``go``.
    """
    made: list[Fault] = []
    for number, (rank, phase, deed) in enumerate(plans):
        needs = str(folder / f"mark{number - 1}") if number else str(folder / "go")
        # Loading and forming are rare; a step has many collectives. A token must be produced between two
        # faults, otherwise the request is given up in the end.
        times = {"load": 0, "form": 0, "collective": 12 * after}.get(phase, after)
        mark = str(folder / f"mark{number}")
        made.append(Fault(rank=rank, phase=phase, deed=deed, after=times, mark=mark, needs=needs))
    return tuple(made)


def pitfalls(folder: Path, plans: Sequence[Plan]) -> tuple[Fault, ...]:
    """Return faults at places that no process may reach after ``go``. See ``fallen``."""
    return tuple(
        Fault(rank=rank, phase=phase, deed=deed, mark=str(folder / f"never{n}"), needs=str(folder / "go"))
        for n, (rank, phase, deed) in enumerate(plans)
    )


def fallen(folder: Path) -> list[str]:
    """Return the pitfalls that a process reached."""
    return sorted(path.name for path in folder.glob("never*"))


def requests(first: int, tokens: int = 24) -> list[Submit]:
    """Return three sequences: a greedy prompt, and a sampled prompt with two choices."""
    greedy = TokenParams(temperature=0.0, max_tokens=tokens)
    sampled = TokenParams(temperature=1.0, max_tokens=tokens, logprobs=1)
    prompts = [(0, 0, [5, 9, 77, 3] * 6, greedy), (1, 0, [8, 2] * 9, sampled), (1, 1, [8, 2] * 9, sampled)]
    return [
        Submit(
            sequence=first + number,
            request=first + request,
            choice=choice,
            seed=11,
            prompt_ids=ids_to_bytes(ids),
            params=params,
        )
        for number, (request, choice, ids, params) in enumerate(prompts)
    ]


class Engine:
    """Wrap an EngineCore of a group, and collect the results of its clients."""

    def __init__(self, config: EngineConfig, folder: Path, plans: Sequence[Plan], after: int = 3) -> None:
        self.folder = folder
        self.faults = chain(folder, plans, after)
        self.core = EngineCore(msgspec.structs.replace(config, faults=self.faults), progress=False)
        self.core.runner.membership.tries.budget.most = 100  # type: ignore[attr-defined]
        self.received: dict[int, Told] = {}
        self._next = 1

    def go(self) -> None:
        """Arm the planted faults."""
        (self.folder / "go").touch()

    def round(self, tokens: int = 24) -> list[list[int]]:
        """The tokens of a round of requests, each of which ends with "length" and in time."""
        asked = requests(self._next, tokens)
        self._next += 10
        for submit in asked:
            self.received[submit.sequence] = Told()
            self.core.submit(submit)
        self.run()
        told = [self.received[submit.sequence] for submit in asked]
        assert [one.finish for one in told] == ["length"] * len(asked)
        return [one.tokens for one in told]

    def run(self) -> None:
        """Steps until there is nothing to do."""
        until = time.monotonic() + ROUND
        while self.core.has_work():
            assert time.monotonic() < until, "the engine hangs"
            for event in self.core.step():
                told = self.received[event.sequence]
                assert told.finish is None
                told.tokens += event.token_ids
                told.finish = event.finish

    def befallen(self) -> int:
        """Return the number of faults that have struck."""
        return sum(Path(fault.mark).exists() for fault in self.faults)

    def check_idle(self) -> None:
        """Nothing is held by anyone."""
        stats, kv = self.core.stats(), self.core.runner.kv
        assert stats.free_blocks == tuple(pool.num_blocks for pool in kv.pools)
        assert stats.free_slots == kv.num_slots
        assert (stats.running, stats.waiting) == (0, 0)


def survive(config: EngineConfig, folder: Path, plans: Sequence[Plan], after: int = 3) -> EngineCore:
    """Let ``plans`` strike a group in order during requests. Assert that all answers stay the same."""
    engine = Engine(config, folder, plans, after)
    try:
        wanted = engine.round()
        engine.go()
        rounds = 0
        while engine.befallen() < len(plans):
            assert engine.round() == wanted
            rounds += 1
            assert rounds <= 2 * len(plans), f"only {engine.befallen()} faults befell"
        assert engine.round() == wanted
        engine.check_idle()
        assert engine.core.stats().recoveries >= 1
    finally:
        engine.core.close()
    return engine.core
