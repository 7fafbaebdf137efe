"""Traffic of coding agents on virtual time: long sessions, with pauses for tools, beside unrelated prompts.

The prompt of a turn is the last prompt, the last output, and the tool's result, so that turns of a session
share a long prefix. A pause separates the end of a turn from the next turn.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.config.resolved import KVConfig
from weft.config.sections.all import SchedulerSection
from weft.scheduler.policy.step_cost import CostModel
from weft.sim.engine import VOCABULARY, Simulation
from weft.sim.latency_report import Latency
from weft.sim.simulated_store import StoreCosts
from weft.sim.workload import Arrival, in_order
from weft.types.messages import Submit, TokenEvent, ids_to_bytes
from weft.types.sampling import TokenParams


@dataclass(frozen=True, slots=True)
class Turn(Arrival):
    """One request of a session, or an unrelated request (session -1)."""

    session: int = -1
    number: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Parameters of the traffic. The defaults follow reports on agents: 43 turns with 140,000 prompt tokens
    and 400 output tokens per turn."""

    sessions: int = 6
    turns: int = 43
    first: int = 30_000
    """Tokens of a session's first prompt."""
    grows: int = 4_800
    """Mean tokens of a tool result, per turn."""
    output: int = 400
    shared: int = 15_000
    """Leading tokens common to all sessions: instructions and tools."""
    pause: float = 60.0
    """Mean seconds of a normal pause between turns. One pause in five is 2.5 times as long."""
    others: int = 1700
    """Number of unrelated prompts over the whole run."""
    other_tokens: int = 20_000
    every: float = 2.0
    """Mean seconds between two unrelated prompts."""

    @property
    def longest(self) -> int:
        """Tokens of the longest possible sequence."""
        return self.first + self.turns * (2 * self.grows + self.output) + self.output


@dataclass(frozen=True, slots=True)
class AgentReport:
    """Results of sessions, without first turns."""

    turns: int
    prompt_tokens: float
    """Mean prompt tokens of a turn."""
    hit_rate: float
    """Share of the prompt tokens found in the prefix cache, loaded blocks included."""
    loads: dict[str, int]
    """Loads from the tier by outcome, over all prompts; {} without a tier."""
    loaded: dict[str, float]
    """Level of the tier -> loaded tokens as a share of the prompt tokens of turns. Also counts blocks that
    are loaded for unrelated prompts, and blocks that are not used."""
    ttft: Latency
    other_ttft: Latency
    """TTFT of unrelated prompts."""
    seconds: float
    """Virtual seconds until the end of the last turn."""


@dataclass(slots=True)
class _Session:
    tokens: np.ndarray
    rng: np.random.Generator
    pauses: random.Random
    outputs: list[int] = field(default_factory=list)


class AgentSimulation(Simulation):
    """One run. ``retention`` is the session retention in seconds; 0 disables sessions.

    Other arguments: see ``Simulation``. Raises ConfigError if a first or an unrelated prompt, with its
    output, exceeds the maximum model length. Later turns are not checked: give at least ``Agents.longest``.
    """

    def __init__(
        self,
        kv: KVConfig,
        section: SchedulerSection,
        cost: CostModel,
        agents: Agents,
        *,
        retention: float,
        seed: int = 0,
        levels: Sequence[StoreCosts] = (),
    ) -> None:
        arrivals = _first_arrivals(agents, seed)
        super().__init__(kv, section, cost, arrivals, seed=seed, retention=retention, levels=levels)
        self._agents, self._block_size = agents, kv.block_size
        self._requests = agents.sessions * agents.turns + agents.others
        common = np.random.default_rng(seed).integers(0, VOCABULARY, agents.shared, dtype=np.int32)
        self._sessions = [
            _Session(common, np.random.default_rng((seed, number)), random.Random(f"{seed}/{number}"))
            for number in range(agents.sessions)
        ]
        self._cached: dict[int, int] = {}

    def agent_report(self) -> AgentReport:
        """Return the results so far."""
        turns = [
            (number, stream.arrival, stream)
            for number, stream in enumerate(self.streams)
            if isinstance(stream.arrival, Turn) and stream.times
        ]
        # The first turn of a session has no cached history, so the report leaves it out.
        later = [(number, turn, stream) for number, turn, stream in turns if turn.session >= 0 < turn.number]
        others = [stream for _, turn, stream in turns if turn.session < 0]
        tokens = sum(turn.prompt for _, turn, _ in later)
        stats = None if self.store is None else self.store.loads.stats()
        block = self._block_size
        return AgentReport(
            turns=len(later),
            prompt_tokens=tokens / max(len(later), 1),
            hit_rate=sum(self._cached.get(number, 0) for number, _, _ in later) / max(tokens, 1),
            loads={} if stats is None else stats.loads,
            loaded={}
            if stats is None
            else {name: one.loaded * block / max(tokens, 1) for name, one in stats.levels.items()},
            ttft=Latency.of([stream.times[0] - turn.at for _, turn, stream in later]),
            other_ttft=Latency.of([stream.times[0] - stream.arrival.at for stream in others]),
            seconds=self.clock.now(),
        )

    def _submit_of(self, number: int, arrival: Arrival) -> Submit:
        """Return the Submit of sequence ``number``.

        Call once per sequence: the prompt of a session grows with each call.
        """
        assert isinstance(arrival, Turn)
        if arrival.session < 0:
            return super()._submit_of(number, arrival)
        session = self._sessions[arrival.session]
        more = session.rng.integers(0, VOCABULARY, arrival.prompt, dtype=np.int32)
        # The prompt grows by the last output and by new tokens of the tool.
        session.tokens = np.concatenate([session.tokens, np.array(session.outputs, np.int32), more])
        session.tokens = session.tokens[: arrival.prompt]
        session.outputs = []
        return Submit(
            sequence=number,
            request=number,
            seed=number,
            prompt_ids=ids_to_bytes(session.tokens),
            params=TokenParams(max_tokens=arrival.output),
            session=str(arrival.session),
        )

    def _record(self, events: list[TokenEvent]) -> None:
        """Record cache hits and outputs of sessions, then the times of tokens."""
        for event in events:
            turn = self.streams[event.sequence].arrival
            self._cached.setdefault(event.sequence, event.num_cached)
            if isinstance(turn, Turn) and turn.session >= 0:
                self._sessions[turn.session].outputs += event.token_ids
        super()._record(events)

    def _end(self, arrival: Arrival) -> None:
        """Count the end of a request and, for a session, schedule the next turn after a random pause."""
        super()._end(arrival)
        assert isinstance(arrival, Turn)
        agents = self._agents
        if arrival.session < 0 or arrival.number + 1 == agents.turns:
            return
        rng = self._sessions[arrival.session].pauses
        pause = rng.random() * 2 * agents.pause * (2.5 if rng.random() < 0.2 else 1.0)
        grown = rng.randint(1, 2 * agents.grows) + arrival.output
        at, number = self.clock.now() + pause, arrival.number + 1
        turn = Turn(at, arrival.prompt + grown, agents.output, session=arrival.session, number=number)
        self._arrivals = deque(in_order([*self._arrivals, turn]))


def _first_arrivals(agents: Agents, seed: int) -> list[Arrival]:
    """Return the first turns of all sessions and all unrelated requests, in order of time."""
    rng = random.Random(seed)
    made: list[Arrival] = [
        Turn(rng.random() * 4 * agents.pause, agents.first, agents.output, session=session)
        for session in range(agents.sessions)
    ]
    at = 0.0
    for _ in range(agents.others):
        at += rng.expovariate(1 / agents.every)
        made.append(Turn(at, agents.other_tokens, agents.output))
    return in_order(made)
