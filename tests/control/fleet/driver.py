"""A fleet driven by hand: no clock, no socket, no process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from weft.common.errors import EngineDead, ErrorInfo, Overloaded, WeftError
from weft.control.fleet import fleet_events as e
from weft.control.fleet.fleet import Fleet
from weft.control.fleet.instance_table import Patience
from weft.control.fleet.policy import Policies
from weft.types import messages as m
from weft.types.sampling import TokenParams

PATIENCE = Patience(engine=10.0, recovery=20.0, listen=3.0, load=30.0, role=5.0, transfer=60.0)
DIED = EngineDead("it died")
A = TypeVar("A")


class Driver:
    """A fleet, its clock, and its actions. Links are numbered in the order of expectation."""

    def __init__(
        self,
        *names: str,
        expert_group: str = "",
        joining: bool = False,
        roles: Mapping[str, m.Role] | None = None,
        fingerprints: Mapping[str, str] | None = None,
        policies: Policies | None = None,
        local_prefill: bool = True,
        retired: Iterable[str] = (),
        elastic: bool = False,
    ) -> None:
        """Start a fleet. ``roles``: of instances that are not unified."""
        expert_groups = dict.fromkeys(names, expert_group)
        self.fleet = Fleet(
            expert_groups, PATIENCE, policies, "front", joining, local_prefill, retired, elastic
        )
        self.roles = dict(roles or {})
        self.fingerprints = dict(fingerprints or {})
        self.now = 100.0
        self.links = 0
        self.link: dict[str, int] = {}
        self.actions: list[e.Action] = []
        """Actions of the latest event."""

    def on(self, event: e.Event) -> list[e.Action]:
        self.actions = self.fleet.on(event, self.now)
        return self.actions

    def up(self, *names: str) -> Driver:
        for name in names or self.fleet.table.instances:
            self.expect(name)
            self.on(e.Linked(name, self.link[name]))
            assert self.sent() == [m.Hello(versions=(m.OLDEST, m.VERSION), front="front")]
            self.say(name, self.welcome(name))
        return self

    def expect(self, name: str) -> None:
        self.links += 1
        self.link[name] = self.links
        self.on(e.Expected(name, self.links))

    def welcome(self, name: str) -> m.Welcome:
        return m.Welcome(
            versions=(m.OLDEST, m.VERSION),
            vocab_size=100,
            max_model_len=100,
            max_num_seqs=8,
            num_blocks=(9,),
            incarnation=self.link[name],
            role=self.roles.get(name, "unified"),
            fingerprint=self.fingerprints.get(name, "model") if name in self.roles else "",
            transfer_address=f"ipc://{name}" if name in self.roles else "",
        )

    def say(self, name: str, message: m.ToFront, link: int | None = None) -> None:
        self.on(e.Received(name, self.link[name] if link is None else link, message))

    def open(
        self, *sequences: int, request: int = 1, pinned: str | None = None, **fields: object
    ) -> str | None:
        """Open sequences of one request. Return the instance that got the sequences, or None."""
        submits = tuple(
            m.Submit(
                sequence=sequence,
                request=request,
                choice=choice,
                seed=7,
                prompt_ids=m.ids_to_bytes([1, 2, 3]),
                params=TokenParams(max_tokens=9),
                **fields,  # type: ignore[arg-type]
            )
            for choice, sequence in enumerate(sequences)
        )
        self.on(e.Opened(submits, pinned=pinned))
        places = {action.instance for action in self.of(e.Send)}
        assert len(places) <= 1
        return places.pop() if places else None

    def tokens(self, name: str, sequence: int, *ids: int, link: int | None = None, **fields: object) -> None:
        attempt = self.fleet.entries[sequence].attempt if sequence in self.fleet.entries else 0
        fields.setdefault("attempt", attempt)
        event = m.TokenEvent(sequence=sequence, token_ids=ids, **fields)  # type: ignore[arg-type]
        self.say(name, m.Tokens(step=1, events=(event,)), link)

    def refuse(self, name: str, sequence: int, **fields: object) -> None:
        self.tokens(name, sequence, finish="error", error=Overloaded("full").info(), **fields)

    def lose(self, name: str, error: WeftError = DIED) -> None:
        self.on(e.Lost(name, self.link[name], error))

    def wait(self, seconds: float) -> None:
        """Let time pass, with due ticks and with heartbeats of all live instances.

        ``actions`` collects the actions of the whole time.
        """
        until = self.now + seconds
        actions: list[e.Action] = []
        while self.now < until:
            self.now = min(until, self.now + 1.0)
            for name, instance in self.fleet.table.instances.items():
                if instance.alive:
                    self.say(name, m.Heartbeat(idle=True, stats=m.EngineStats()))
                    actions += self.actions
            while self.fleet.next_deadline() <= self.now:
                actions += self.on(e.Tick())
        self.actions = actions

    def give_back(self, name: str, sequence: int) -> None:
        """Let ``name`` return the sequence, and wait until the sequence is sent again or ends."""
        self.tokens(name, sequence, finish="evicted")
        while not self.delivered() and not any(isinstance(each, m.Submit) for each in self.sent()):
            until = self.fleet._parked.deadline()
            assert self.fleet.next_deadline() <= until < self.now + PATIENCE.engine
            for each, instance in self.fleet.table.instances.items():
                if instance.alive:
                    self.say(each, m.Heartbeat(idle=True, stats=m.EngineStats()))
            self.now = until
            self.on(e.Tick())

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]

    def sent(self) -> list[m.ToEngine]:
        return [action.message for action in self.of(e.Send)]

    def delivered(self) -> list[m.TokenEvent]:
        return [event for deliver in self.of(e.Deliver) for event in deliver.events]

    def loads(self) -> list[float]:
        return [instance.load for instance in self.fleet.table.instances.values()]


def ids(submit: m.ToEngine) -> list[int]:
    assert isinstance(submit, m.Submit)
    return m.ids_from_bytes(submit.emitted_ids).tolist()


def error_of(event: m.TokenEvent) -> ErrorInfo:
    assert event.finish == "error"
    assert event.error is not None
    return event.error
