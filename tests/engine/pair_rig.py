"""A prefill engine and a decode engine in this process, connected like two engine processes.

The rig plays the API server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.runner.transfers_rig import config_of
from tests.support.slowness import deadline
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.types import messages as m
from weft.types.sampling import TokenParams
from weft.types.transfer import Peer, TransferKey, TransferParameters

SECONDS = deadline(60.0)
TRANSFER_S = 60.0


@dataclass
class Answer:
    """The output of one sequence, from both engines."""

    tokens: dict[int, int] = field(default_factory=dict)
    """Position -> token."""
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    finish: list[str] = field(default_factory=list)
    """Finish reasons: of the prefill engine, then of the decode engine."""
    cached: dict[str, int] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        assert sorted(self.tokens) == list(range(len(self.tokens)))
        return [self.tokens[position] for position in range(len(self.tokens))]


def turn(cores: Iterable[EngineCore], take: Callable[[EngineCore, list[m.TokenEvent]], None]) -> bool:
    """Run one iteration of each engine's loop and pass the events to ``take``. Return True if any engine
    computed."""
    worked = False
    for core in cores:
        core.check()
        take(core, core.poll())
        if core.has_work():
            worked = True
            take(core, core.step())
    return worked


def submit(sequence: int, prompt: list[int], params: TokenParams, **more: Any) -> m.Submit:
    settings: dict[str, Any] = {"request": sequence, "seed": 1000 + more.get("request", sequence), **more}
    return m.Submit(sequence=sequence, prompt_ids=m.ids_to_bytes(prompt), params=params, **settings)


class EnginePair:
    """The two engines of one test. Call ``close`` at the end."""

    def __init__(self, prefill: EngineConfig, decode: EngineConfig) -> None:
        self.prefill = EngineCore(prefill, progress=False)
        self.decode = EngineCore(decode, progress=False)
        self.answers: dict[int, Answer] = {}
        self.free = {core: core.stats().free_blocks for core in self.cores}

    @property
    def cores(self) -> tuple[EngineCore, EngineCore]:
        return self.prefill, self.decode

    def peer(self, core: EngineCore) -> Peer:
        welcome = core.welcome(core.incarnation)
        return Peer(welcome.transfer_address, welcome.incarnation)

    def parameters(self, sequence: int, attempt: int, sends: bool) -> TransferParameters:
        key = TransferKey(sequence, attempt, self.prefill.incarnation)
        other = self.decode if sends else self.prefill
        return TransferParameters(key, sends, self.peer(other), TRANSFER_S)

    def submit(self, one: m.Submit) -> None:
        """Submit a sequence to both engines."""
        self.answers[one.sequence] = Answer()
        for core, sends in ((self.decode, False), (self.prefill, True)):
            transfer = self.parameters(one.sequence, one.attempt, sends)
            self.take(core, core.submit(msgspec.structs.replace(one, transfer=transfer)))

    def take(self, core: EngineCore, events: list[m.TokenEvent]) -> None:
        for event in events:
            answer = self.answers[event.sequence]
            assert event.error is None or event.finish == "evicted", event.error
            for number, token in enumerate(event.token_ids):
                position = event.position + number
                assert event.position >= 0
                assert answer.tokens.setdefault(position, token) == token, "the ends disagree"
            if event.logprobs is not None:
                _, values, _ = event.logprobs.arrays()
                for number, row in enumerate(values):
                    answer.logprobs.setdefault(event.position + number, np.asarray(row).tolist())
            if event.finish is not None:
                answer.finish.append(event.finish)
                answer.cached["prefill" if core is self.prefill else "decode"] = event.num_cached
                if event.finish not in ("moved", "evicted") and core is self.prefill:
                    self.take(self.decode, self.decode.finish(event.sequence))  # like an API server

    def turn(self) -> bool:
        """Run one iteration of each loop. Return True if any engine computed."""
        return turn(self.cores, self.take)

    def run(self) -> None:
        """Run until all sequences and all transfers have ended."""
        until = time.monotonic() + SECONDS
        while not self.idle:
            assert time.monotonic() < until, (self.answers, [core.stats() for core in self.cores])
            if not self.turn():
                self.decode.sleep(0.002)

    @property
    def idle(self) -> bool:
        if any(core.has_work() or core.blocked for core in self.cores):
            return False
        stats = [core.stats().transfers for core in self.cores]
        return all(one is not None and one.open == 0 and one.pinned_blocks == 0 for one in stats)

    def check_given_back(self) -> None:
        """Check that every block is free or cached, and that no transfer state is left."""
        for core in self.cores:
            stats = core.stats()
            assert stats.free_blocks == self.free[core]
            assert stats.running == stats.waiting == 0
            assert core.transfers is not None
            assert not core.transfers.moving

    def close(self) -> None:
        for core in self.cores:
            core.close()


def pair_of(root: Path, family: str, blocks: tuple[int, int] = (8, 8), **more: Any) -> EnginePair:
    prefill, decode = (
        config_of(root, family, block, role, **more)  # type: ignore[arg-type]
        for block, role in zip(blocks, ("prefill", "decode"), strict=True)
    )
    return EnginePair(prefill, decode)


def unified(config: EngineConfig, submits: list[m.Submit]) -> dict[int, list[int]]:
    """Return the tokens of one engine that computes prompts and outputs. Sequence number -> tokens."""
    core = EngineCore(config, progress=False)
    made: dict[int, list[int]] = {one.sequence: [] for one in submits}
    try:
        events = [event for one in submits for event in core.submit(one)]
        while True:
            for event in events:
                assert event.error is None
                made[event.sequence] += event.token_ids
            if not core.has_work():
                return made
            events = core.step()
    finally:
        core.close()
