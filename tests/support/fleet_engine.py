"""Several groups in this process and thread, behind a real fleet, as one engine: what ``LLM`` may run on.

    LLM ─► FleetEngine ─► Fleet ─Send─► EngineProtocol ─► EngineCore (prefill0)
            ▲               │       ╰──► EngineProtocol ─► EngineCore (decode0)
            ╰───Deliver─────┴── Received ◄── events ◄──────╯

Only sockets and processes are missing. Caches move by the real rooms and transports.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.slowness import deadline
from weft import LLM
from weft.common.errors import EngineDead
from weft.config.resolved import EngineConfig
from weft.config.topology import face
from weft.control.fleet import fleet_events as e
from weft.control.fleet.engine_protocol import EngineProtocol, Outgoing
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.engine.core import EngineCore
from weft.engine.server.replicas import summed
from weft.scheduler.sequence import Running
from weft.types import messages as m
from weft.types.transfer import Peer

FRONT = b"front"
SECONDS = deadline(120.0)


class _Engine:
    """Hold one group and the link to the group."""

    def __init__(self, config: EngineConfig, link: int) -> None:
        self.link = link
        self.core = EngineCore(config, progress=False)
        self.protocol = EngineProtocol(self.core, self.core.incarnation)
        self.free = self.core.stats().free_blocks


class FleetEngine:
    """Implement the interface of ``EngineCore``, as ``weft.engine.server.replicas.Replicas`` does."""

    def __init__(self, groups: Sequence[EngineConfig]) -> None:
        self.config = face(tuple(groups))
        self._groups: dict[str, EngineConfig] = {}
        for one in groups:
            role = one.transfer.role
            self._groups[f"{role}{sum(other.startswith(role) for other in self._groups)}"] = one
        self.fleet = Fleet(dict.fromkeys(self._groups, ""), Patience(), front="front")
        self.engines: dict[str, _Engine] = {}
        self.lost: list[m.EngineStats] = []
        """Final statistics of lost groups."""
        self._links = 0
        self._events: list[m.TokenEvent] = []
        self._pending: deque[e.Event] = deque()
        for name in self._groups:
            self._begin(name)
        assert self.fleet.table.complete

    # -- the interface of EngineCore

    blocked = False

    @property
    def deterministic(self) -> bool:
        return all(engine.core.deterministic for engine in self.engines.values())

    def submit(self, submit: m.Submit) -> list[m.TokenEvent]:
        self._on(e.Opened((submit,)))
        return []

    def finish(self, sequence: int) -> list[m.TokenEvent]:
        self._on(e.Closed((sequence,)))
        return []

    def has_work(self) -> bool:
        return bool(self.fleet.entries or self._events)

    def poll(self) -> list[m.TokenEvent]:
        return []

    def sleep(self, seconds: float) -> None: ...

    def step(self) -> list[m.TokenEvent]:
        """Run one turn of each engine's loop. Return the events."""
        if not self.turn() or all(core.wait_ms() for core in self._at_work):
            time.sleep(0.0005)
        made, self._events = self._events, []
        return made

    def stats(self) -> m.EngineStats:
        return summed([*self.lost, *(engine.core.stats() for engine in self.engines.values())])

    def welcome(self, incarnation: int) -> m.Welcome:
        serve = [engine.core for name, engine in self.engines.items() if not name.startswith("encode")]
        welcomes = [core.welcome(incarnation) for core in serve]
        return min(welcomes, key=lambda one: one.max_model_len)

    def close(self) -> None:
        for engine in self.engines.values():
            engine.core.close()

    # -- for tests

    def cores(self, role: str) -> list[EngineCore]:
        return [engine.core for name, engine in self.engines.items() if name.startswith(role)]

    def turn(self) -> bool:
        """Run one turn of all engines. Return True if any engine had work."""
        worked = False
        for name, engine in list(self.engines.items()):
            core = engine.core
            core.check()
            self._say(name, engine.protocol.events(core.poll()))
            if self.engines[name] is engine and core.has_work():
                worked = True
                self._say(name, engine.protocol.events(core.step(), core.scheduler.steps))
        return worked

    def settle(self) -> None:
        """Until nothing is left to do, not even a transfer; then all blocks were given back."""
        until = time.monotonic() + SECONDS
        while not self._idle:
            assert time.monotonic() < until, [engine.core.stats() for engine in self.engines.values()]
            if not self.turn():
                time.sleep(0.001)
        for name, engine in self.engines.items():
            stats = engine.core.stats()
            if name.startswith("encode"):  # embeddings stay, as in a cache, and none is promised to anybody
                assert stats.kv_usage == 0.0
            else:
                assert stats.free_blocks == engine.free

    def return_to_router(self) -> bool:
        """Make the decode group return a running sequence. Return False if no sequence runs."""
        (core,) = self.cores("decode")
        state = core.scheduler._state
        for one in [one for one in state.running if not one.protected]:
            assert isinstance(one.state, Running)
            state.preempt(one, one.state)
            return True
        return False

    def lose_decode(self) -> bool:
        """Lose the process of the first decode group. Return True."""
        self.lose("decode0")
        return True

    def lose(self, name: str) -> None:
        """Kill a group and start its replacement. Other groups see the end of a process."""
        engine = self.engines[name]
        self.lost.append(engine.core.stats())
        ended = Peer(engine.core.welcome(0).transfer_address, engine.core.incarnation)
        engine.core.close()
        for other in self.engines.values():
            if other is not engine and other.core.transfers is not None:
                other.core.transfers._peers._ended.append(ended)
        self._on(e.Lost(name, engine.link, EngineDead("planted")))
        assert self.engines[name] is not engine

    @property
    def _at_work(self) -> list[EngineCore]:
        return [engine.core for engine in self.engines.values() if engine.core.has_work()]

    @property
    def _idle(self) -> bool:
        if self.fleet.entries:
            return False
        for engine in self.engines.values():
            stats = engine.core.stats()
            if engine.core.has_work() or stats.running or stats.waiting:
                return False
            for moved in (stats.transfers, stats.embedding_transfers):
                if moved is not None and (moved.open or moved.pinned_blocks or moved.blocked):
                    return False
        return True

    # -- the part of links and their owner

    def _begin(self, name: str) -> None:
        self._links += 1
        self.engines[name] = _Engine(self._groups[name], self._links)
        self._on(e.Expected(name, self._links))
        self._on(e.Linked(name, self._links))

    def _say(self, name: str, outgoing: Outgoing) -> None:
        for _, message in outgoing:
            self._on(e.Received(name, self.engines[name].link, message))

    def _on(self, event: e.Event) -> None:
        self._pending.append(event)
        if len(self._pending) > 1:
            return  # the caller processes the event afterwards
        while self._pending:
            for action in self.fleet.on(self._pending[0], time.monotonic()):
                self._carry_out(action)
            self._pending.popleft()

    def _carry_out(self, action: e.Action) -> None:
        match action:
            case e.Deliver(events):
                self._events += events
            case e.Send(name, link, message):
                if (engine := self.engines[name]).link == link:
                    self._say(name, engine.protocol.on(FRONT, message))
            case e.Replace(name, _):
                self._begin(name)
            case _:
                pass


def start_llm(patch: pytest.MonkeyPatch, groups: Sequence[EngineConfig], model: str, **settings: Any) -> LLM:
    """Return an ``LLM`` on a ``FleetEngine`` of ``groups``. ``settings`` configure the text side of the
    ``LLM``.
    """
    with patch.context() as here:
        here.setattr("weft.api.llm.start_engine", lambda config: FleetEngine(groups))
        return LLM(model, **settings)
