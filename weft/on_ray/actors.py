"""The two Ray actors: one for the fleet, and one for each group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import ray

from weft.common.log import get_logger
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import EngineRecord
from weft.on_ray.fleet_state import FleetState, GroupPlan

log = get_logger(__name__)

NAMESPACE = "weft"
LOOK_S = 0.5
"""Seconds between two looks of a group actor at its engines."""
CALL_S = 5.0
"""Maximum seconds for a call of another actor."""
START_S = 600.0
"""Maximum seconds of a rolling restart until a group answers again, besides its drain."""


def fleet_name(server: str) -> str:
    """Return the name of the fleet actor of a server."""
    return f"weft-{server}"


def group_name(server: str, group: str) -> str:
    """Return the name of the actor of a group."""
    return f"weft-{server}-{group}"


class GroupActor:
    """Runs ``weft engine`` for one group, and carries its records to the fleet actor.

    When the command fails, the actor dies, and Ray restarts the actor, here or on another node. When the
    group has drained, the actor ends for good.
    """

    def __init__(self, server: str, group: str) -> None:
        """Start the group. Topology, secret and settings come from the fleet actor, so a restarted actor
        uses the present ones."""
        self._server, self._group = server, group
        self._fleet = ray.get_actor(fleet_name(server), namespace=NAMESPACE)
        self._folder = Path(tempfile.mkdtemp(prefix="weft-ray-"))
        self._directory = FolderDirectory(self._folder / "directory")
        self._again = self._over = False
        """Set by an order: start the group again after its drain; end the actor after the drain."""
        self._process = self._start()
        threading.Thread(target=self._watch, name="weft-watch", daemon=True).start()

    def stop(self) -> None:
        """Drain the group, then end the actor for good."""
        self._over = True
        self._process.send_signal(signal.SIGTERM)

    def restart(self) -> None:
        """Drain the group, then start the group again with the present topology."""
        self._again = True
        self._process.send_signal(signal.SIGTERM)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the command. The command ends when this process ends."""
        settings: Any = ray.get(self._fleet.settings.remote(), timeout=CALL_S)
        topology, secret = settings
        file, key = self._folder / "topology.yaml", self._folder / "secret"
        for path, text in ((file, topology), (key, secret)):
            path.touch(mode=0o600)
            path.write_text(text)
        command = [sys.executable, "-m", "weft", "engine", str(file), "--group", self._group]
        command += ["--directory", str(self._folder / "directory"), "--group-secret", str(key)]
        command += ["--advertise", ray.util.get_node_ip_address(), "--parent", str(os.getpid())]
        return subprocess.Popen(command, cwd=str(self._folder))

    def _watch(self) -> None:
        """Carry records and orders, and end with the command. The body of a thread."""
        while True:
            status = self._process.poll()
            self._carry()
            if status is None:
                time.sleep(LOOK_S)
            elif self._again:
                self._again = False
                self._process = self._start()
            elif status == 0:
                # An intended end: Ray must not restart the actor.
                self._tell(self._fleet.left.remote(self._group))
                ray.kill(ray.get_actor(group_name(self._server, self._group), namespace=NAMESPACE))
            else:
                os._exit(1)

    def _carry(self) -> None:
        """Publish the records of the group, and leave the fleet's orders in the group's own directory."""
        records = [*self._directory.read().values()]
        draining = self._tell(self._fleet.publish.remote(self._group, msgspec.msgpack.encode(records)))
        for record in records:
            if record.name in (draining or ()):
                self._directory.ask_drain(record)

    def _tell(self, call: Any) -> Any:
        """Return the answer of the fleet actor, or None. The next look tries again."""
        try:
            return ray.get(call, timeout=CALL_S)
        except Exception:  # the fleet actor restarts, or its node is away
            return None


class FleetActor:
    """Keeps the wanted state of a server, starts the actors of groups, and restarts groups in turn."""

    def __init__(self, server: str, topology: str, secret: str, restarts: int) -> None:
        """``topology``: text of the topology file. ``restarts``: maximum restarts of a group by Ray."""
        self._server, self._topology, self._secret, self._restarts = server, topology, secret, restarts
        self._state = FleetState()
        self._published: dict[str, dict[str, int]] = {}
        """Group -> engine -> incarnation, as last published."""
        self._lock = threading.Lock()

    def settings(self) -> tuple[str, str]:
        """Return (text of the topology, secret) for a group that starts."""
        return self._topology, self._secret

    def change(self, topology: str) -> None:
        """Use another topology for all later starts."""
        self._topology = topology

    def want(self, plans: bytes) -> None:
        """Start the groups of ``plans`` (msgpack of GroupPlan), unless they run."""
        found = msgspec.msgpack.decode(plans, type=list[GroupPlan])
        # A wanted group without an actor counts as given up, so the actor comes first.
        for plan in found:
            self._place(plan)
        with self._lock:
            self._state.want(found)

    def publish(self, group: str, data: bytes) -> list[str]:
        """Store the records of ``group``; engines that are gone are withdrawn. Return the engines with the
        order to drain."""
        records = msgspec.msgpack.decode(data, type=list[EngineRecord])
        now = {record.name: record.incarnation for record in records}
        with self._lock:
            for name, incarnation in self._published.get(group, {}).items():
                if now.get(name) != incarnation:
                    self._state.withdraw(name, incarnation)
            self._published[group] = now
            return sorted(self._state.publish(records))

    def left(self, group: str) -> None:
        """Note that ``group`` has drained and ended."""
        with self._lock:
            self._state.unwant(group)

    def remove(self, group: str) -> None:
        """Drain and end a group."""
        with self._lock:
            self._state.unwant(group)
        if (actor := self._actor(group)) is not None:
            actor.stop.remote()

    def stop(self) -> list[str]:
        """Drain and end all groups. Return their names, without a wait."""
        groups = list(self._state.plans)
        for group in groups:
            self.remove(group)
        return groups

    def living(self, groups: list[str]) -> list[str]:
        """Return the groups of ``groups`` whose actors live."""
        return [group for group in groups if self._actor(group) is not None]

    def revive(self, group: str) -> None:
        """Start a group again that Ray gave up."""
        with self._lock:
            plan = self._state.plans.get(group)
        if plan is not None:
            self._place(plan)

    def restart(self, groups: list[str]) -> None:
        """Restart ``groups`` in turn. Returns at once."""
        threading.Thread(target=self._restart, args=(groups,), name="weft-restart", daemon=True).start()

    def snapshot(self) -> bytes:
        """Return a msgpack of Snapshot."""
        with self._lock:
            retired = [group for group in self._state.plans if self._actor(group) is None]
            return msgspec.msgpack.encode(self._state.snapshot(retired))

    def _restart(self, groups: list[str]) -> None:
        """Restart one group after the other: each must answer again before the next one drains."""
        for group in groups:
            actor, before = self._actor(group), dict(self._published.get(group, {}))
            if actor is None:
                continue
            actor.restart.remote()
            until = time.monotonic() + START_S
            while not self._is_new(group, before) and time.monotonic() < until:
                time.sleep(LOOK_S)
            if not self._is_new(group, before):
                log.error("the rolling restart stops: group %s does not answer", group)
                return

    def _is_new(self, group: str, before: dict[str, int]) -> bool:
        """Return True if all engines of ``group`` are new processes that answer."""
        with self._lock:
            records = [one for one in self._state.snapshot().records if one.group == group]
        return bool(records) and all(
            one.ready and not one.draining and before.get(one.name) != one.incarnation for one in records
        )

    def _actor(self, group: str) -> Any:
        """Return the living actor of ``group``, or None."""
        try:
            return ray.get_actor(group_name(self._server, group), namespace=NAMESPACE)
        except ValueError:
            return None

    def _place(self, plan: GroupPlan) -> None:
        """Start the actor of a group, or find the running actor."""
        ray.remote(GroupActor).options(
            name=group_name(self._server, plan.group),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=self._restarts,
            max_concurrency=4,
            num_gpus=plan.gpus,
            num_cpus=plan.cpus,
        ).remote(self._server, plan.group)
