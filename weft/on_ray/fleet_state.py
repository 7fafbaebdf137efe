"""The state of the fleet actor: wanted groups, records of engines, and budgets of restarts. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable

import msgspec

from weft.common.restarts import RestartBudget
from weft.control.directory.record import EngineRecord
from weft.control.processes.table import WINDOW
from weft.on_ray.plans import GroupPlan, Kept, Offer, Snapshot

GRACE_S = 10.0
"""Seconds after the start of the fleet actor in which a silent group actor does not count as pending."""
SILENT_S = 20.0
"""Seconds without a call of an unwanted group actor until the fleet actor kills the group actor."""


class FleetState:
    """The wanted groups and the published engines of one server."""

    def __init__(self, kept: Kept, now: float) -> None:
        self.kept = kept
        for plan in kept.plans.values():
            kept.shapes.setdefault(plan.base, plan)
        self._begun = now
        self._records: dict[str, EngineRecord] = {}
        self._ended: dict[str, int] = {}
        """Engine -> incarnation of the last process that has ended."""
        self._published: dict[tuple[str, int], dict[str, int]] = {}
        """(group, attempt) -> engine -> incarnation, as last published."""
        self._processes: dict[tuple[str, int], int] = {}
        """(group, attempt) -> number of the group actor's process."""
        self._calls: dict[tuple[str, int], tuple[int, int]] = {}
        """(group, attempt) -> number of the process, and of its last call of ``publish``."""
        self._placed: dict[str, int] = {}
        """Group -> attempt of the group actor that the fleet actor started."""
        self._heard: dict[str, float] = {}
        """Group -> time of the last call of a group actor."""
        self._budgets: dict[str, RestartBudget] = {}

    @property
    def plans(self) -> dict[str, GroupPlan]:
        """Group -> plan of the wanted groups, in the order of the start."""
        return self.kept.plans

    @property
    def records(self) -> tuple[EngineRecord, ...]:
        """The published engines."""
        return tuple(self._records.values())

    # -- orders

    def offer(self, offer: Offer) -> str:
        """Use the topology of an offer, and add the groups of a new topology. Groups that the operator has
        added or removed since the last offer with this topology stay so. Return "", or the model of the
        fleet, which refuses an offer of another model without a name."""
        kept = self.kept
        if kept.model and kept.model != offer.model and not offer.named:
            return kept.model
        if kept.restarts != offer.restarts:
            self._budgets.clear()
        changed = not kept.model or kept.stopped or kept.topology != offer.topology
        kept.topology, kept.model, kept.stopped = offer.topology, offer.model, False
        kept.note = ""
        if changed:
            kept.sources |= {plan.base: offer.topology for plan in offer.plans}
            self.want(offer.plans)
        kept.restarts, kept.drain_timeout = offer.restarts, offer.drain_timeout
        return ""

    def want(self, plans: Iterable[GroupPlan]) -> None:
        """Add groups. A known group keeps the place and the attempt, until its next restart."""
        given = list(plans)
        self.kept.several_hosts = self.kept.several_hosts or any(plan.hosts > 1 for plan in given)
        self.kept.shapes |= {plan.base: plan for plan in reversed(given)}
        for plan in given:
            known = self.plans.get(plan.group)
            self.kept.changed.pop(plan.group, None)
            if known is not None and known.needs != plan.needs:
                self.kept.changed[plan.group] = plan
                continue
            attempt = secrets.randbits(63) if known is None else known.attempt
            self.plans[plan.group] = msgspec.structs.replace(plan, attempt=attempt)
            if known is None:
                self._renew(plan.group)

    def unwant(self, group: str) -> None:
        """Drop a group. Its records stay until the engines withdraw them, or the leases end."""
        self.plans.pop(group, None)
        self.kept.changed.pop(group, None)
        self.kept.meetings.pop(group, None)
        self.kept.texts.pop(group, None)
        self.kept.retired.discard(group)
        self._budgets.pop(group, None)

    def stop(self) -> None:
        """Drop all groups. The next offer adds its groups, also with the same topology."""
        self.kept.stopped = True
        for group in list(self.plans):
            self.unwant(group)

    def revive(self, group: str) -> None:
        """Want a retired group again, with the present topology and a new budget of restarts."""
        if group in self.kept.retired:
            self.kept.retired.discard(group)
            self._budgets.pop(group, None)
            plan = self.kept.changed.pop(group, self.plans[group])
            self.plans[group] = msgspec.structs.replace(plan, attempt=secrets.randbits(63))
            self._renew(group)

    def restart(self, groups: Iterable[str]) -> None:
        """Add groups to the rolling restart."""
        self.kept.restarting += [one for one in groups if one not in self.kept.restarting]

    def moves(self, group: str) -> bool:
        """Let ``group`` start with the present topology. Return True if the restart needs other actors: the
        present ones drain and end, and then the fleet actor starts others by the changed plan."""
        plan = self.kept.changed.pop(group, None)
        if group in self.plans:
            self._renew(group)
        if plan is None or group not in self.plans:
            return False
        self.plans[group] = msgspec.structs.replace(plan, attempt=secrets.randbits(63))
        self.kept.meetings.pop(group, None)
        return True

    def waits(self, group: str, now: float) -> bool:
        """Return True if the actor of ``group`` waits for a place: no process has called."""
        plan = self.plans.get(group)
        called = plan is None or (group, plan.attempt) in self._processes
        return not called and now - self._begun > GRACE_S

    def restarted(self, group: str) -> None:
        """Note the end of the restart of a group."""
        self.kept.restarting = [one for one in self.kept.restarting if one != group]

    # -- calls of group actors

    def text(self, group: str) -> str:
        """Return the text of the topology with which a group starts."""
        return self.kept.texts.get(group, self.kept.topology)

    def admit(self, group: str, attempt: int, process: int, now: float) -> bool:
        """Return True if the group actor may start engines. A second process of one attempt is a restart;
        without a restart in the budget the group is retired."""
        self._heard[group] = now
        if not self._wanted(group, attempt):
            return False
        before = self._processes.get((group, attempt), process)
        if before != process and not self._grant(group, now):
            return False
        if before != process:  # the engines end with the process of their actor
            self._replace(group, attempt, {}, ended=True)
        self._processes[group, attempt] = process
        self._placed.setdefault(group, attempt)
        return True

    def publish(
        self,
        group: str,
        attempt: int,
        process: int,
        records: Iterable[EngineRecord],
        now: float,
        *,
        call: int = 0,
        ended: bool = False,
    ) -> bool:
        """Store the records of a group actor; engines that are gone are withdrawn. Return True if the group
        is wanted; else the group must drain. ``group``: the group, or GROUP/N for a further host.
        ``call``: number of the call, since Ray keeps no order. ``ended``: True if all engines have ended."""
        owner, wanted = group.partition("/")[0], self._wanted(group.partition("/")[0], attempt)
        if self._processes.setdefault((group, attempt), process) != process:
            return True  # a process on a node that Ray has given up: another process has the group
        self._heard[group] = now
        if wanted:  # a restarted fleet actor does not know the placed attempts
            self._placed.setdefault(owner, attempt)
        maker, last = self._calls.get((group, attempt), (process, call))
        if maker == process and call < last:
            return wanted
        self._calls[group, attempt] = process, call
        found = {record.name: record for record in records}
        self._replace(group, attempt, {name: one.incarnation for name, one in found.items()}, ended)
        self._records.update(found)
        return wanted

    def meet(self, group: str, attempt: int, address: str) -> None:
        """Note the address at which the other hosts of a group join."""
        if self._wanted(group, attempt):
            self.kept.meetings[group] = address

    def claim(self, host: str, attempt: int, process: int, now: float) -> None:
        """Note the process of the actor of a further host, GROUP/N. Engines of an earlier process ended.
        Another process is a restart; without a restart in the budget the group is retired."""
        self._heard[host] = now
        group = host.partition("/")[0]
        if self._wanted(group, attempt):
            self._placed.setdefault(group, attempt)
            if self._processes.get((host, attempt), process) != process and not self._grant(group, now):
                return
        self._replace(host, attempt, {}, ended=True)
        self._processes[host, attempt] = process

    def joins(self, group: str, attempt: int, living: Collection[str]) -> bool:
        """Return True if a further host of the group has work: the group is wanted, or its head drains.
        ``living``: see ``due``."""
        drains = group in living and self._placed.get(group, attempt) == attempt
        return self._wanted(group, attempt) or drains

    def left(self, group: str, attempt: int) -> None:
        """Note the end of a group actor for good. The group stays wanted if a later order wants the group."""
        self._replace(group, attempt, {}, ended=True)
        del self._published[group, attempt]
        self._processes.pop((group, attempt), None)
        self._calls.pop((group, attempt), None)
        if self._wanted(group, attempt):
            self.unwant(group)

    # -- what the fleet actor must do

    def due(self, living: Collection[str], now: float) -> list[GroupPlan]:
        """Return the groups whose actors the fleet actor must start. ``living``: groups with an actor, and
        GROUP/N for further hosts. An actor that is lost for good counts as a restart; without a restart in
        the budget the group is retired."""
        found = []
        for group, plan in self.plans.items():
            if group in living or group in self.kept.retired:
                continue
            if self._placed.get(group) == plan.attempt:
                if not self._grant(group, now):
                    continue
            elif any(one.startswith(f"{group}/") for one in living):
                continue  # hosts of an earlier attempt
            self._placed[group] = plan.attempt
            found.append(plan)
        return found

    def incomplete(self, living: Collection[str]) -> list[GroupPlan]:
        """Return the placed groups with an actor for the head, and without one for some other host."""
        return [
            plan
            for group, plan in self.plans.items()
            if group in living
            and self._placed.get(group) == plan.attempt
            and any(f"{group}/{index}" not in living for index in range(1, plan.hosts))
        ]

    def ending(self, living: Collection[str]) -> set[str]:
        """Return the groups whose living actors are not those of the present plan."""
        groups = {name.partition("/")[0] for name in living}
        return {
            one for one in groups if one not in self.plans or self._placed.get(one) != self.plans[one].attempt
        }

    def abandoned(self, living: Collection[str], now: float) -> list[str]:
        """Return the actors of ``living`` that the fleet actor must kill: actors of unwanted attempts that
        wait for a place, or are silent. Other actors of unwanted attempts drain. Actors of further hosts
        outlive their head."""
        self._heard = {name: at for name, at in self._heard.items() if name in living}
        found = []
        for name in living:
            group, _, host = name.partition("/")
            at, plan = self._heard.get(name), self.plans.get(group)
            silent = now - self._begun > GRACE_S if at is None else now - at > SILENT_S
            # A restarted fleet actor has no note of the placed attempt: a wanted group may just be cut off.
            unwanted = plan is None or self._placed.get(group, plan.attempt) != plan.attempt
            if silent and unwanted and not (host and group in living):
                found.append(name)
        return found

    def unplaced(self, plan: GroupPlan) -> None:
        """Note that the actors of ``plan`` could not be started: the next start is no restart."""
        if self._placed.get(plan.group) == plan.attempt:
            del self._placed[plan.group]

    def killed(self, name: str) -> None:
        """Note that the fleet actor has killed an unwanted actor: its engines have ended."""
        for group, attempt in [key for key in self._published if key[0] == name]:
            self._replace(group, attempt, {}, ended=True)
            del self._published[group, attempt]

    def incarnations(self, group: str) -> dict[str, int]:
        """Return engine -> incarnation of all records of ``group``."""
        return {one.name: one.incarnation for one in self._records.values() if one.group == group}

    def is_new(self, group: str, before: dict[str, int]) -> bool:
        """Return True if all engines of ``group`` are processes that answer and are not in ``before``."""
        records = [one for one in self._records.values() if one.group == group]
        return bool(records) and all(
            one.ready and not one.draining and before.get(one.name) != one.incarnation for one in records
        )

    def snapshot(self) -> Snapshot:
        """Return everything that a reader needs."""
        return Snapshot(
            plans=tuple(self.plans.values()),
            records=self.records,
            retired=tuple(sorted(self.kept.retired)),
            shapes=tuple(self.kept.shapes.values()),
            ended=dict(self._ended),
            secret=self.kept.secret,
            note=self.kept.note,
        )

    def _wanted(self, group: str, attempt: int) -> bool:
        plan = self.plans.get(group)
        return plan is not None and plan.attempt == attempt and group not in self.kept.retired

    def _renew(self, group: str) -> None:
        """Use the last topology that has the name of a group for the next start of the group."""
        self.kept.texts[group] = self.kept.sources.get(self.plans[group].base, self.kept.topology)

    def _replace(self, group: str, attempt: int, found: dict[str, int], ended: bool) -> None:
        """Note the engines of a group actor, engine -> incarnation, and withdraw all earlier engines. A
        missing record proves no end: a file may be unreadable for a moment. ``ended``: all earlier engines
        have ended."""
        known = self._published.get((group, attempt), {})
        for name, incarnation in known.items():
            if found.get(name) != incarnation:
                self._withdraw(name, incarnation, ended or name in found)
        self._published[group, attempt] = found if ended else {**known, **found}

    def _withdraw(self, name: str, incarnation: int, ended: bool) -> None:
        """Remove the record of an engine, unless the record is of another incarnation, and note the end of an
        engine that has ``ended``."""
        if ended:
            self._ended[name] = incarnation
        record = self._records.get(name)
        if record is not None and record.incarnation == incarnation:
            del self._records[name]

    def _grant(self, group: str, now: float) -> bool:
        """Return True for a permitted restart of ``group``; else retire the group."""
        budget = self._budgets.setdefault(group, RestartBudget(self.kept.restarts, WINDOW))
        if budget.grant(now):
            return True
        self.kept.retired.add(group)
        return False
