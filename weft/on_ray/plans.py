"""Data of a fleet: plans of groups, offers of ``weft up``, the stored state, and the state for readers."""

from __future__ import annotations

from typing import Literal

import msgspec

from weft.common.errors import ErrorInfo
from weft.control.directory.record import EngineRecord


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group that Ray should run."""

    group: str
    base: str
    role: str
    engines: tuple[str, ...]
    """Names of the engines of the group."""
    expert_group: str = ""
    gpus: int = 0
    cpus: float = 1.0
    """Resources on each host."""
    hosts: int = 1
    """Number of nodes with ranks of the group."""
    labels: dict[str, str] = {}
    """Labels of the nodes that may run the group; see Ray's ``label_selector``."""
    attempt: int = 0
    """Random number of the order to run the group. A later order for the same group has another number."""

    def named(self, group: str) -> GroupPlan:
        """Return the plan of another group with the same base name."""
        engines = tuple(group + name.removeprefix(self.group) for name in self.engines)
        expert_group = group if self.expert_group else ""
        return msgspec.structs.replace(self, group=group, engines=engines, expert_group=expert_group)

    @property
    def needs(self) -> tuple[object, ...]:
        """Everything that Ray must know to place the group."""
        return self.gpus, self.cpus, self.hosts, self.labels


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The order of ``weft up`` to the fleet actor."""

    topology: str
    """Text of the topology; see ``text_for_groups``."""
    model: str
    """Served model."""
    named: bool
    """True if the operator gave the name of the server."""
    restarts: int
    """Maximum restarts of a group in 10 minutes."""
    drain_timeout: float
    plans: tuple[GroupPlan, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """An order of an operator, by way of an API server."""

    what: Literal["scale", "drain", "restart", "revive"]
    name: str
    """Base name of groups to scale, else a group or an engine; "" to restart all groups."""
    groups: int = 0
    """Number of groups to scale to."""
    fallback: str = "none"
    """``--prefill-fallback`` of the API server: what happens without a prefill group."""


class Ordered(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to an ``Order``."""

    starting: tuple[str, ...] = ()
    """Engines that start, or start again."""
    leaving: tuple[str, ...] = ()
    """Engines that drain and end."""
    error: ErrorInfo | None = None
    """Why the order is refused; then nothing has changed."""


class Kept(msgspec.Struct, kw_only=True):
    """The part of the state that outlives the process of the fleet actor."""

    secret: str
    topology: str = ""
    sources: dict[str, str] = {}
    """Base name -> text of the last topology that has the name."""
    texts: dict[str, str] = {}
    """Group -> text of the topology with which the group starts until its next restart by an operator."""
    model: str = ""
    """"" until the first offer."""
    restarts: int = 0
    drain_timeout: float = 0.0
    plans: dict[str, GroupPlan] = {}
    """Group -> plan, in the order of the start."""
    retired: set[str] = set()
    """Groups without a further restart."""
    restarting: list[str] = []
    """Groups of a rolling restart that have yet to restart, in order."""
    stopped: bool = False
    """True from an order to end all groups until the next offer."""
    several_hosts: bool = False
    """True if a group has ever had several hosts, so there may be placement groups."""
    changed: dict[str, GroupPlan] = {}
    """Group -> plan with other resources, nodes or hosts, which holds from the next restart of the group."""
    meetings: dict[str, str] = {}
    """Group on several hosts -> address at which the hosts join the head."""
    shapes: dict[str, GroupPlan] = {}
    """Base name -> plan of the first group that was wanted last. A name outlives its groups."""
    note: str = ""
    """Text for operators about a state of another release that was set aside; "" from the next offer on."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the fleet for a reader."""

    plans: tuple[GroupPlan, ...]
    records: tuple[EngineRecord, ...]
    retired: tuple[str, ...] = ()
    """Groups without a further restart."""
    shapes: tuple[GroupPlan, ...] = ()
    """One plan per base name, also of a name without groups."""
    ended: dict[str, int] = {}
    """Engine -> incarnation of the last process that is known to have ended."""
    secret: str = ""
    """The secret of the server. After ``--stop`` the next fleet actor has another secret."""
    note: str = ""
    """See ``Kept.note``."""
