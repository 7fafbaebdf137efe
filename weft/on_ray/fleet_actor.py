"""The Ray actor of a fleet."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv

from weft.common.errors import Unavailable
from weft.common.log import get_logger
from weft.control.directory.record import EngineRecord
from weft.on_ray import placement
from weft.on_ray.actors import LOOK_S, NAMESPACE, REACH_S, START_S, fleet_name, group_name, insist
from weft.on_ray.fleet_state import GRACE_S, FleetState
from weft.on_ray.orders import carry_out
from weft.on_ray.plans import Kept, Offer, Order
from weft.on_ray.stored import read_stored

log = get_logger(__name__)


class FleetActor:
    """Keeps the wanted state of a server, starts the actors of groups, and restarts groups in turn.

    The wanted state is in Ray's store of keys, where a restarted fleet actor finds the state.
    """

    def __init__(self, server: str, secret: str) -> None:
        """Read the state of an earlier process. ``secret``: of the server, if there is no earlier state."""
        self._server, self._key = server, f"{fleet_name(server)}/state"
        try:
            data = insist(lambda: internal_kv._internal_kv_get(self._key, namespace=NAMESPACE), REACH_S)
            living = insist(self.living, REACH_S)
            kept = Kept(secret=secret) if data is None else self._read(data, secret)
        except Exception:
            os._exit(1)  # Ray restarts the actor
        self._state = FleetState(kept, time.monotonic())
        self._forgotten = False
        self._living = living
        """The result of ``living`` at the last look."""
        self._lock, self._looks, self._turn = threading.Lock(), threading.Lock(), threading.Lock()
        """For the state; for one look at a time; for one rolling restart at a time."""
        self._wake = threading.Event()
        """Set by orders: the next look is due at once."""
        threading.Thread(target=self._look_on, name="weft-fleet", daemon=True).start()
        if self._state.kept.restarting:
            self._begin_restart(GRACE_S)  # the records of all groups come first

    def _read(self, data: bytes, secret: str) -> Kept:
        """Return the state in ``data``. A state of another release is set aside in Ray's store."""
        kept, readable = read_stored(data, secret, self._server)
        if not readable:
            log.error("%s", kept.note)
            for key, value in ((f"{self._key}/unreadable", data), (self._key, msgspec.msgpack.encode(kept))):
                insist(functools.partial(self._put, key, value), REACH_S)
        return kept

    def _put(self, key: str, value: bytes) -> None:
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=NAMESPACE)

    # -- calls of `weft up` and of API servers

    def offer(self, data: bytes) -> str:
        """Use an ``Offer`` (msgpack). Return "", or the model of this fleet, which refuses the offer. Raise
        Unavailable after ``forget``: the caller tries again with the next fleet actor."""
        with self._changed():
            if self._forgotten:
                raise Unavailable("the fleet actor ends")
            refused = self._state.offer(msgspec.msgpack.decode(data, type=Offer))
        self._look()
        return refused

    def secret(self) -> str:
        """Return the secret of the server."""
        return self._state.kept.secret

    def order(self, data: bytes) -> bytes:
        """Plan and store an ``Order`` (msgpack). Return a msgpack of ``Ordered``. Two orders are planned one
        after the other. A rolling restart goes on after the return, also over a restart of this actor."""
        order = msgspec.msgpack.decode(data, type=Order)
        with self._changed():
            answer = carry_out(self._state, order)
        self._wake.set()
        if order.what == "restart" and answer.error is None:
            self._begin_restart(0.0)
        return msgspec.msgpack.encode(answer)

    def stop(self) -> list[str]:
        """Drain and end all groups. Return the groups that live, without a wait."""
        with self._changed():
            self._state.stop()
        self._look()
        return self.living()

    def living(self) -> list[str]:
        """Return the groups whose actors live, and GROUP/N for the actor of host N of a group."""
        prefix = group_name(self._server, "")
        found = ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in found if one["namespace"] == NAMESPACE]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def forget(self) -> bool:
        """Remove the stored state and the placement groups. Call when no group lives. Return False,
        and remove nothing, if groups are wanted: another `weft up` came after ``stop``."""
        with self._lock:
            if self._state.plans:
                return False
            self._forgotten = True
            for key in (self._key, f"{self._key}/unreadable"):
                internal_kv._internal_kv_del(key, namespace=NAMESPACE)
        if self._state.kept.several_hosts:
            placement.free(self._server)
        return True

    def snapshot(self) -> bytes:
        """Return a msgpack of Snapshot."""
        with self._lock:
            return msgspec.msgpack.encode(self._state.snapshot())

    # -- calls of group actors

    def admit(self, group: str, attempt: int, process: int) -> tuple[str, str] | None:
        """Return (text of the topology, secret) for a group that starts. None: the actor ends for good."""
        with self._changed():
            if not self._state.admit(group, attempt, process, time.monotonic()):
                return None
            return self._state.text(group), self._state.kept.secret

    def publish(self, group: str, attempt: int, process: int, data: bytes, call: int, ended: bool) -> bool:
        """Store the records of a group (msgpack of EngineRecord). Return False if the group must drain.
        ``call``, ``ended``: see ``FleetState.publish``."""
        records = msgspec.msgpack.decode(data, type=list[EngineRecord])
        with self._lock:
            now = time.monotonic()
            return self._state.publish(group, attempt, process, records, now, call=call, ended=ended)

    def meet(self, group: str, attempt: int, address: str) -> None:
        """Store the address, HOST:PORT, at which the other hosts of a group join."""
        with self._changed():
            self._state.meet(group, attempt, address)

    def join(self, group: str, attempt: int, host: str = "", process: int = 0) -> tuple[str, str, str] | None:
        """Return (text of the topology, secret, address of the head) for a further host of a group. The
        address is "" before the head starts. None: the host ends. ``host``, ``process``: GROUP/N, and the
        number of the process of an actor that starts."""
        with self._changed() if host else self._lock:
            if host:
                self._state.claim(host, attempt, process, time.monotonic())
            kept = self._state.kept
            if self._state.joins(group, attempt, self._living):
                return self._state.text(group), kept.secret, kept.meetings.get(group, "")
        return None

    def left(self, group: str, attempt: int) -> None:
        """Note the end of a group actor for good."""
        with self._changed():
            self._state.left(group, attempt)

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Change the state within the block, and store the changed state."""
        with self._lock:
            before = msgspec.msgpack.encode(self._state.kept)
            yield
            after = msgspec.msgpack.encode(self._state.kept)
            if after != before and not self._forgotten:
                self._put(self._key, after)

    def _look_on(self) -> None:
        """Look again and again. The body of a thread."""
        while True:
            self._wake.wait(2 * LOOK_S)
            self._wake.clear()
            try:
                self._look()
            except Exception as error:
                log.error("the fleet of %s cannot be seen (%s)", self._server, type(error).__name__)

    def _look(self) -> None:
        """Start the actors of wanted groups, and kill unwanted actors that wait for a place."""
        with self._looks:
            living = self._living = self.living()
            with self._changed():
                due = self._state.due(living, time.monotonic())
                abandoned = self._state.abandoned(living, time.monotonic())
                due += self._state.incomplete(living)
            for plan in due:
                try:
                    placement.start_group(self._server, plan)
                except Exception as error:  # of Ray; the other groups start
                    log.error("group %s does not start (%s)", plan.group, type(error).__name__)
                    with self._lock:
                        self._state.unplaced(plan)
            if self._state.kept.several_hosts:
                with self._lock:
                    keep, ending = list(self._state.plans.values()), self._state.ending(living)
                placement.free(self._server, keep, ending)
            for group in abandoned:
                if (actor := self._actor(group)) is not None:
                    ray.kill(actor)
                with self._lock:
                    self._state.killed(group)

    def _begin_restart(self, wait: float) -> None:
        """Start the thread of the rolling restart, which begins after ``wait`` seconds."""
        threading.Thread(target=self._restart, args=(wait,), name="weft-restart", daemon=True).start()

    def _restart(self, wait: float) -> None:
        """Restart one group after the other: each must answer again before the next one drains."""
        time.sleep(wait)
        with self._turn:
            while self._state.kept.restarting:
                group = self._state.kept.restarting[0]
                try:
                    good = self._restart_one(group)
                except Exception as error:  # of Ray, or of its store
                    log.error("the rolling restart of %s is tried again (%s)", group, type(error).__name__)
                    time.sleep(2 * LOOK_S)
                    continue
                with self._changed():
                    self._state.restarted(group)
                    if not good:
                        self._state.kept.restarting.clear()

    def _restart_one(self, group: str) -> bool:
        """Restart a group. Return False if the group does not answer in time."""
        with self._changed():
            before, waits = self._state.incarnations(group), self._state.waits(group, time.monotonic())
            seconds = START_S + self._state.kept.drain_timeout
            plan = self._state.plans.get(group)
            moves = self._state.moves(group)
        if plan is None or waits:
            return True  # a group that waits for a place starts with the present topology
        # Engines of further hosts restart with those of the head. Ranks without an engine outlive the head.
        hosts = [group, *(f"{group}/{index}" for index in range(1, plan.hosts) if len(plan.engines) > 1)]
        for actor in [] if moves else map(self._actor, hosts):
            if actor is not None:
                actor.restart.remote()
        until = time.monotonic() + seconds
        while group in self._state.plans and not self._is_new(group, before):
            if time.monotonic() > until:
                log.error("the rolling restart stops: group %s does not answer", group)
                return False
            time.sleep(LOOK_S)
        return True

    def _is_new(self, group: str, before: dict[str, int]) -> bool:
        with self._lock:
            return self._state.is_new(group, before)

    def _actor(self, group: str) -> Any:
        """Return the living actor of ``group``, or None."""
        try:
            return ray.get_actor(group_name(self._server, group), namespace=NAMESPACE)
        except ValueError:
            return None
