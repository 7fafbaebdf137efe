"""The instances of a fleet by name: states, deadlines, and the present takers of sequences."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weft.common.errors import EngineDead, WeftError
from weft.common.log import get_logger
from weft.control.fleet.answer import why_unusable
from weft.control.fleet.encoders import divided, sees, without_compute
from weft.control.fleet.instances import GONE, SERVING, Instance, InstanceState
from weft.control.fleet.lacks import Lacks, Since, missing_roles
from weft.control.fleet.pairs import serve, why_lonely, without_partner
from weft.types import messages as m
from weft.types.handshake import EngineIdentity
from weft.types.weights import prefix_name

log = get_logger(__name__)

HEALTHY_S = 5.0
"""Seconds of uptime after which a death no longer counts as one of several deaths in a row."""
ROW = 2
"""Deaths in a row after which an instance comes back half-open."""
LISTEN_S = 60.0
ABSENT_S = 10.0
"""Seconds that the first start waits for absent hosts, once the present instances can serve requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a fleet waits for instances, in seconds."""

    engine: float = 120.0
    """Seconds without a message, or without progress, after which an instance counts as dead."""
    recovery: float = 120.0
    """Seconds that sequences wait while no instance takes any and a process is being restarted."""
    listen: float = LISTEN_S
    """Seconds from a known address until the process listens, which is the first act of a process."""
    load: float = 3600.0
    """Seconds from the start of an instance until its answer. The model is loaded in between."""
    role: float = 10.0
    """Seconds that new sequences wait for a missing role while other instances take sequences."""
    transfer: float = 300.0
    """Maximum seconds for one transfer: of KV from prefill to decode, or of one image's embedding."""


class InstanceTable:
    """All instances. No other class changes an instance's state. Times are seconds of a monotonic clock."""

    def __init__(
        self,
        instances: Mapping[str, str],
        patience: Patience,
        joining: bool = False,
        local_prefill: bool = True,
        retired: Iterable[str] = (),
        elastic: bool = False,
    ) -> None:
        """Build the table. ``instances`` maps a name to an expert-parallel group; "" means no group.

        Instances of one group work together or not at all. For the other parameters see ``Fleet``.
        """
        self.instances = {
            name: Instance(name, expert_group, order)
            for order, (name, expert_group) in enumerate(instances.items())
        }
        self.leaving: set[str] = set()
        """Names of the leaving instances."""
        self._orders = itertools.count(len(self.instances))
        for name in retired:
            self.retire(self.instances[name])
        self.complete = False
        """True once all instances have been up. A joining API server needs only enough to serve; the first
        start may also go on without absent hosts (``starts_without``)."""
        self.restarts = 0
        """Processes started in place of a lost one."""
        self.lacking = Since()
        """Times since when new sequences find no place. Nothing is lacking before ``complete``."""
        self.gone = Since()
        """The same, but draining instances count as present: the processes live."""
        self._path_since = math.inf
        """Time at the first start since when the present instances can serve and all others are absent; else
        inf."""
        self._patience = patience
        self._joining = joining
        self._local_prefill = local_prefill
        self._elastic, self._divided = elastic, False
        self.roles: dict[str | None, bool] = {}
        """Elastic only: role of all that ever answered, in order -> True if the last one left alive."""

    @property
    def alive(self) -> bool:
        """True if the live instances can serve requests."""
        return self.complete and self.serve(one for one in self.instances.values() if one.alive)

    @property
    def whole(self) -> bool:
        """True if all wanted instances are alive and can serve requests."""
        return self.alive and all(one.alive for one in self.wanted if not one.fresh)

    @property
    def wanted(self) -> list[Instance]:
        """The members of the server, in order: all instances except leaving ones."""
        return [one for one in self.instances.values() if not one.leaving]

    @property
    def over(self) -> bool:
        """True if the remaining (not retired) instances can never serve a request. Never true if unknown
        instances may join."""
        if self._elastic:
            return False
        left = [one for one in self.instances.values() if one.state is not InstanceState.RETIRED]
        # `None` is the role before the first answer: any role is still possible.
        roles = {one.role for one in left}
        if not roles or roles & {None, "unified"}:
            return not roles
        return "decode" not in roles or not ("prefill" in roles or self._local_prefill)

    @property
    def local(self) -> bool:
        """True if some decode instance may compute prompts and takes sequences now."""
        return self._local_prefill and any(one.role == "decode" for one in self._serving())

    @property
    def awaited(self) -> bool:
        """True if an instance may come back: not retired, and not serving now or shunned. Always true if
        unknown instances may join."""
        if self._elastic:
            return True
        left = (one for one in self.wanted if one.state is not InstanceState.RETIRED)
        return any(one.state not in SERVING or one.shunned for one in left)

    def missing(self, images: bool) -> list[str]:
        """Return the roles without a serving instance. ``images``: the role "encode" counts, too."""
        known = [*(one.role for one in self.wanted), *self.roles]
        return missing_roles(known, (one.role for one in self._serving()), images)

    @property
    def blind(self) -> bool:
        """True if no sequence with images can go anywhere now."""
        return self.lacking.images < math.inf

    @property
    def unpaired(self) -> int:
        """Number of live instances with a role and without a live partner."""
        alive = [one for one in self.instances.values() if one.alive]
        return len(without_partner(alive)) + len(without_compute(alive))

    def serve(self, instances: Iterable[Instance]) -> bool:
        """Return True if ``instances`` can serve requests."""
        return serve(instances, self._local_prefill)

    def takers(self, leaving: int | None = None) -> list[Instance]:
        """Return the instances that take prompts or decode now, in order of the table.

        ``leaving`` is a sequence about to leave: half-open instances count as free of the sequence.
        """
        return [one for one in self._taking(leaving) if one.role != "encode"]

    def encoders(self) -> list[Instance] | None:
        """Return the instances that take images now, in order; None if no instance ever encoded for
        others."""
        if not self._divided:
            return None
        return [one for one in self._taking() if one.role == "encode"]

    def deadline(self) -> float:
        """Return the time at which ``overdue`` or ``starts_without`` may change; inf for never."""
        deadlines = [math.inf if self.complete else self._path_since + ABSENT_S]
        for instance in self.instances.values():
            if instance.state is InstanceState.STARTING:
                deadlines.append(instance.deadline)
            elif instance.alive:
                # Dead means silent, or busy without a step.
                deadlines.append(min(instance.heard, instance.moved) + self._patience.engine)
            if instance.state is InstanceState.HALF_OPEN:
                deadlines.append(instance.since + HEALTHY_S)
        return min(deadlines)

    def overdue(self, now: float) -> list[tuple[Instance, WeftError]]:
        """Return (instance, error) for each instance now considered dead; the states stay.

        Move healthy half-open instances to up.
        """
        result: list[tuple[Instance, WeftError]] = []
        for instance in self.instances.values():
            # A live instance is overdue when silent or without progress, a starting instance after its
            # deadline.
            why = instance.overdue(self._patience.engine, now) if instance.alive else None
            if why is not None:
                result.append((instance, EngineDead(why)))
            elif instance.state is InstanceState.STARTING and now >= instance.deadline:
                lacks = "did not start in time" if instance.listens else "does not listen"
                result.append((instance, EngineDead(f"the engine's process {lacks}")))
            elif instance.state is InstanceState.HALF_OPEN and now >= instance.since + HEALTHY_S:
                self.prove(instance)
        return result

    def stall(self, seconds: float, now: float) -> None:
        """Extend all deadlines by ``seconds``, because this process stood still and has not read all
        messages."""
        for instance in self.instances.values():
            instance.heard = min(now, instance.heard + seconds)
            instance.moved = min(now, instance.moved + seconds)
            instance.deadline += seconds
        self.lacking.stall(seconds, now)
        self.gone.stall(seconds, now)

    # -- members

    def join(self, name: str, expert_group: str, now: float) -> None:
        """Add a member without a process. A member of the name stays; if it leaves, it takes work again."""
        present = self.instances.get(name)
        if present is None:
            # A member of a complete server need not be up for the server to be whole.
            self.instances[name] = Instance(name, expert_group, next(self._orders), fresh=self.complete)
        elif present.leaving:
            present.leaving = False
            self.leaving.discard(name)
            self.undrain(present, now)
        self._changed(now)

    def leave(self, instance: Instance, now: float) -> None:
        """Mark the instance as leaving: no new sequences from now on."""
        if instance.role in self.roles and not instance.leaving:
            self.roles[instance.role] = instance.alive
        instance.leaving = True
        self.leaving.add(instance.name)
        self.drain(instance, now)

    def departed(self, now: float) -> list[Instance]:
        """Remove the leaving instances without open sequences, and return them."""
        gone = [self.instances[name] for name in sorted(self.leaving) if not self.instances[name].open]
        for one in gone:
            del self.instances[one.name]
            self.leaving.discard(one.name)
        if gone:
            self._look_for_path(now)
            self._changed(now)
        return gone

    # -- states

    def expect(
        self,
        instance: Instance,
        link: int,
        now: float,
        expert_group: str = "",
        identity: EngineIdentity | None = None,
    ) -> None:
        """Note a new process of the instance, which is starting from now on. A retired instance comes back in
        the same way, once revived."""
        self.restarts += instance.state in GONE
        instance.expert_group = expert_group or instance.expert_group
        instance.start(link, now + self._patience.load)
        instance.identity = identity

    def locate(self, instance: Instance, now: float) -> None:
        """Note that the address of the instance's process is known. For a starting process without a
        connection, the time-out of the connection begins."""
        instance.located = True
        if instance.state is InstanceState.STARTING and not instance.listens:
            instance.deadline = now + self._patience.listen
        self._look_for_path(now)

    def listen(self, instance: Instance, now: float) -> None:
        """Note a connection to the process: the first connection, or a reconnection.

        The instance is no longer shunned. The first connection of a starting process begins the time-out of
        the load.
        """
        if instance.state is InstanceState.STARTING and not instance.listens:
            instance.deadline = now + self._patience.load
        instance.listens = instance.located = True
        instance.shunned = False
        self._look_for_path(now)
        self._changed(now)

    def welcome(self, instance: Instance, welcome: m.Welcome, now: float) -> None:
        """Note the answer of a process, which is now up, or half-open after deaths in a row.

        Raise EngineDead for an unusable process: see ``why_unusable``.

        A second welcome of an instance that is up changes nothing. May set ``complete``.
        """
        if why := why_unusable(instance, welcome):
            raise EngineDead(why)
        if instance.state is not InstanceState.STARTING:
            return
        instance.welcome = welcome
        instance.weights = max(0, welcome.weights)
        instance.weights_name = prefix_name(instance.weights, welcome.weights_name)
        instance.role = welcome.role
        if self._elastic:
            self.roles[welcome.role] = False
        instance.since = instance.heard = instance.moved = now
        instance.state = self._state_when_up(instance)
        if self.complete:
            log.info("engine %s %s", instance.name, "has joined" if instance.fresh else "is back")
        instance.fresh = False
        # A joining API server starts as soon as the present instances can serve.
        all_up = all(other.alive for other in self.wanted)
        serve = self.serve(self._serving())
        # In an elastic fleet all present instances may be encode groups.
        self.complete = (
            self.complete or (all_up and (serve or not self._elastic)) or (self._joining and serve)
        )
        self._look_for_path(now)
        self._changed(now)
        self._log_engines_without_partner()

    def _look_for_path(self, now: float) -> None:
        missing = [one for one in self.wanted if not one.alive]
        absent = all(one.state is InstanceState.STARTING and not one.located for one in missing)
        path = not self.complete and absent and self.serve(self._serving())
        self._path_since = min(self._path_since, now) if path else math.inf

    def starts_without(self, now: float) -> bool:
        """Return True once, when the first start has waited ``ABSENT_S`` seconds for absent hosts. Then set
        ``complete`` and log the absent instances."""
        if self.complete or now < self._path_since + ABSENT_S:
            return False
        self.complete = True
        self._changed(now)
        missing = [one.name for one in self.instances.values() if not one.alive]
        log.warning("the server starts without %s: the hosts have not connected", ", ".join(missing))
        return True

    def prove(self, instance: Instance) -> None:
        """Mark the instance as healthy: a sequence ended well there, or the uptime reached ``HEALTHY_S``."""
        if instance.state is InstanceState.HALF_OPEN:
            instance.state = InstanceState.UP
            instance.deaths = 0

    def drain(self, instance: Instance, now: float) -> None:
        """Send the instance no new sequences from now on."""
        if instance.alive:
            instance.state = InstanceState.DRAINING
            self._changed(now)

    def undrain(self, instance: Instance, now: float) -> None:
        """Send the instance new sequences again: the planned restart is cancelled."""
        if instance.state is InstanceState.DRAINING:
            instance.state = self._state_when_up(instance)
            self._changed(now)

    def shun(self, instance: Instance, now: float, why: str = "") -> None:
        """Send the instance no sequences until another process is up or another connection is made.

        For an instance whose process has ended according to another instance, or that cannot be reached. Only
        the instance's own link reports the loss, because the link may still deliver earlier messages.
        """
        if instance.alive and not instance.shunned:
            instance.shunned = True
            if why:
                log.warning("engine %s gets no requests: %s", instance.name, why)
            self._changed(now)

    def lose(self, instance: Instance, now: float, error: WeftError, closing: bool) -> bool:
        """Note that the process of an instance is gone or unusable: the state becomes down.

        Return False if already known or retired.

        Logs the loss and counts deaths in a row. With ``closing`` this API server ends together with its
        instances, so the loss is no error in the log.
        """
        if instance.state in (InstanceState.DOWN, InstanceState.RETIRED):
            return False
        planned = closing or instance.leaving or instance.state is InstanceState.DRAINING
        # During the first start the caller reports the reason as the last log line.
        level = logging.INFO if planned or not (self.complete or self._joining) else logging.ERROR
        log.log(level, "engine %s is lost: %s", instance.name, error.message)
        # A death soon after the start extends the row of deaths.
        healthy = instance.alive and now - instance.since >= HEALTHY_S
        instance.deaths = 1 if healthy else instance.deaths + 1
        instance.fresh = False
        instance.state = InstanceState.DOWN
        self._look_for_path(now)
        self._changed(now)
        return True

    def retire(self, instance: Instance) -> None:
        """Mark the instance as retired: no other process will be started."""
        instance.state = InstanceState.RETIRED

    def farewells(self, shutdown: bool) -> list[tuple[Instance, m.Shutdown | m.Goodbye]]:
        """Return the last message to each connected instance. With ``shutdown`` the instances end, too."""
        gone = (InstanceState.DOWN, InstanceState.RETIRED)
        listening = [one for one in self.instances.values() if one.listens and one.state not in gone]
        if shutdown:
            return [(one, m.Shutdown()) for one in listening]
        return [(one, m.Goodbye()) for one in listening]

    def _serving(self, draining: bool = False) -> list[Instance]:
        """Return the instances that take sequences; with ``draining`` also the instances that finish their
        work.

        An expert-parallel group with one dead instance takes no sequences.
        """
        # One dead instance stops the collectives of the whole expert-parallel group.
        broken = {one.expert_group for one in self.instances.values() if one.expert_group and not one.alive}
        return [
            one
            for one in self.instances.values()
            if (one.alive if draining else one.state in SERVING)
            and not one.shunned
            and one.expert_group not in broken
        ]

    @staticmethod
    def _state_when_up(instance: Instance) -> InstanceState:
        if instance.leaving:
            return InstanceState.DRAINING
        return InstanceState.HALF_OPEN if instance.deaths >= ROW else InstanceState.UP

    def _changed(self, now: float) -> None:
        if self.complete:
            self.lacking.note(self._lacks(self._serving()), now)
            self.gone.note(self._lacks(self._serving(draining=True)), now)

    def _lacks(self, present: list[Instance]) -> Lacks:
        """Return the lacks of new sequences if only the ``present`` instances took sequences."""
        computing = [one for one in present if one.role != "encode"]
        if not computing:
            return Lacks(any=True)
        return Lacks(pair=not serve(computing, local=False), images=not self._sees(present))

    def _sees(self, serving: list[Instance]) -> bool:
        """Return True if the ``serving`` instances take sequences with images."""
        # Stays true when the encode groups have left: other groups may have no vision tower.
        self._divided = self._divided or divided(self.instances.values())
        if not self._divided:
            return True
        encoders = [one for one in serving if one.role == "encode"]
        able = [one for one in serving if sees(one, encoders)]
        if self._local_prefill and any(one.role == "decode" for one in able):
            return True
        # A decode instance needs no vision tower: the prefill instance has computed the images.
        return serve(
            [*(one for one in able if one.role != "decode"), *_of_role(serving, "decode")], local=False
        )

    def _taking(self, leaving: int | None = None) -> list[Instance]:
        return [
            one for one in self._serving() if one.state is InstanceState.UP or not one.open.keys() - {leaving}
        ]

    def _log_engines_without_partner(self) -> None:
        """Log each live instance without a possible partner, once per process."""
        alive = [one for one in self.instances.values() if one.alive]
        for one in alive:
            why = None if one.lonely else why_lonely(one, alive)
            if why is not None:
                one.lonely = True
                log.warning("engine %s has no partner: %s", one.name, why)


def _of_role(instances: Iterable[Instance], role: m.Role) -> list[Instance]:
    return [one for one in instances if one.role == role]
