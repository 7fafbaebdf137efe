"""The two Ray actors: one for the fleet, and one for each group."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.experimental import internal_kv

from weft.common.folder import open_private, private_folder
from weft.common.log import get_logger
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import EngineRecord
from weft.on_ray.fleet_state import GRACE_S, FleetState, GroupPlan, Kept, Offer

log = get_logger(__name__)

Answer = TypeVar("Answer")

NAMESPACE = "weft"
LOOK_S = 0.5
"""Seconds between two looks of a group actor at its engines."""
CALL_S = 5.0
"""Maximum seconds for a call of another actor."""
REACH_S = 300.0
"""Maximum seconds of an actor until the fleet, or Ray's store, answers. Then Ray restarts the actor."""
END_S = 15.0
"""Maximum seconds for the last calls of a group actor, and until Ray has ended the actor."""
START_S = 600.0
"""Maximum seconds of a rolling restart until a group answers again, besides its drain."""


def fleet_name(server: str) -> str:
    """Return the name of the fleet actor of a server. Neither servers nor groups have a / in their names."""
    return f"weft/{server}"


def group_name(server: str, group: str) -> str:
    """Return the name of the actor of a group."""
    return f"weft/{server}/{group}"


def insist(call: Callable[[], Answer], seconds: float) -> Answer:
    """Return the answer of ``call``. Try again after failures, for ``seconds``; then raise the last one."""
    until = time.monotonic() + seconds
    while True:
        try:
            return call()
        except Exception:
            if time.monotonic() > until:
                raise
        time.sleep(LOOK_S)


class GroupActor:
    """Runs ``weft engine`` for one group, and carries its records to the fleet actor.

        start ─► admitted by the fleet? ─no──────────────► end for good
                   │yes        ▲                            ▲
                   ▼           │restart ordered             │stop ordered, or status 0
                 command ─► ended ──────────────────────────╯
                               ╰─any other end, any error─► os._exit(1): Ray restarts the actor

    One thread starts and watches the command: the kernel kills the command with the thread that has started
    the command.
    """

    def __init__(self, server: str, group: str, attempt: int) -> None:
        """Start the thread. The constructor calls no other actor: Ray does not restart an actor whose
        constructor has failed. ``attempt``: see ``GroupPlan``."""
        self._server, self._group, self._attempt = server, group, attempt
        self._number = secrets.randbits(63)
        """Random number of this process, so that the fleet recognizes a restart."""
        self._fleet: Any = None
        self._folder: Path | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._again = self._over = self._signalled = False
        """Under the lock. Orders: start the group again after its drain; end the actor after the drain. And
        True once the present command has the signal to drain: a second signal would cut its requests."""
        threading.Thread(target=self._run, name="weft-watch", daemon=True).start()

    def restart(self) -> None:
        """Drain the group, then start the group again with the present topology."""
        with self._lock:
            self._again = True
            self._drain()

    def _drain(self) -> None:
        """Send the signal to drain, once per command. Call with the lock held."""
        if self._process is not None and not self._signalled:
            self._signalled = True
            self._process.send_signal(signal.SIGTERM)

    def _run(self) -> None:
        """Run the group until its end. The body of the thread, which never returns."""
        try:
            while (settings := insist(self._admit, REACH_S)) is not None:
                status = self._follow(*self._start(*settings))
                with self._lock:
                    if self._over or (status == 0 and not self._again):
                        break
                    if not self._again:
                        log.error("group %s ended with status %d", self._group, status)
                        return
            self._end()
        except BaseException:
            log.exception("the actor of group %s failed", self._group)
        finally:
            self._clean()
            os._exit(1)  # Ray restarts the actor

    def _admit(self) -> tuple[str, str] | None:
        """Return (text of the topology, secret), or None if the group must end for good."""
        with self._lock:
            # An order to restart that comes from here on holds for the next command: its settings may be old.
            self._again = self._signalled = False
            self._process = None
        found: tuple[str, str] | None = self._call("admit", self._group, self._attempt, self._number)
        return found

    def _start(self, topology: str, secret: str) -> tuple[subprocess.Popen[bytes], FolderDirectory]:
        """Start the command. Return the command, and the directory in which its engines publish."""
        folder = self._folder = self._folder or private_folder()
        for name, text in (("topology.yaml", topology), ("secret", secret)):
            with open_private(folder / name, "w") as file:
                file.write(text)
        directory = FolderDirectory(folder / "directory")
        with self._lock:
            process = self._process = subprocess.Popen(self._command(folder), cwd=str(folder))
            if self._over or self._again:
                self._drain()
        return process, directory

    def _command(self, folder: Path) -> list[str]:
        """Return the command of the group, which ends when this process ends."""
        command = [sys.executable, "-m", "weft", "engine", str(folder / "topology.yaml")]
        command += ["--group", self._group, "--directory", str(folder / "directory")]
        command += ["--group-secret", str(folder / "secret")]
        return [*command, "--advertise", ray.util.get_node_ip_address(), "--parent", str(os.getpid())]

    def _follow(self, process: subprocess.Popen[bytes], directory: FolderDirectory) -> int:
        """Publish the records of the group until the end of the command. Return its status."""
        while True:
            status = process.poll()
            # The engines end with the command. A killed command leaves its records.
            records = msgspec.msgpack.encode([*directory.read().values()] if status is None else [])
            wanted = True
            # The fleet actor restarts, or its node is away. The next look tries again.
            with contextlib.suppress(Exception):
                wanted = self._call("publish", self._group, self._attempt, self._number, records)
            if not wanted:
                with self._lock:
                    self._over = True
                    self._drain()
            if status is not None:
                return status
            time.sleep(LOOK_S)

    def _clean(self) -> None:
        """Remove the folder, which has the secret."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """End this actor for good: Ray must not restart the actor."""
        self._clean()
        # A restarted actor without this call is not admitted, unless nobody has ordered the end.
        with contextlib.suppress(Exception):
            insist(lambda: self._call("left", self._group, self._attempt), END_S)
        name = group_name(self._server, self._group)
        insist(lambda: ray.kill(ray.get_actor(name, namespace=NAMESPACE)), END_S)
        time.sleep(END_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return the answer of the fleet actor. Raise any exception of Ray."""
        try:
            if self._fleet is None:
                self._fleet = ray.get_actor(fleet_name(self._server), namespace=NAMESPACE)
            return ray.get(getattr(self._fleet, method).remote(*arguments), timeout=CALL_S)
        except Exception:
            self._fleet = None  # perhaps another actor has the name now
            raise


class FleetActor:
    """Keeps the wanted state of a server, starts the actors of groups, and restarts groups in turn.

    The wanted state is in Ray's store of keys, where a restarted fleet actor finds the state.
    """

    def __init__(self, server: str, secret: str) -> None:
        """Read the state of an earlier process. ``secret``: of the server, if there is no earlier state."""
        self._server, self._key = server, f"{fleet_name(server)}/state"
        try:
            data = insist(lambda: internal_kv._internal_kv_get(self._key, namespace=NAMESPACE), REACH_S)
        except Exception:
            os._exit(1)  # Ray restarts the actor
        kept = Kept(secret=secret) if data is None else msgspec.msgpack.decode(data, type=Kept)
        self._state = FleetState(kept, time.monotonic())
        self._forgotten = False
        self._lock, self._looks, self._turn = threading.Lock(), threading.Lock(), threading.Lock()
        """For the state; for one look at a time; for one rolling restart at a time."""
        threading.Thread(target=self._look_on, name="weft-fleet", daemon=True).start()
        if self._state.kept.restarting:
            self._begin_restart(GRACE_S)  # the records of all groups come first

    # -- calls of `weft up` and of API servers

    def offer(self, data: bytes) -> str:
        """Use an ``Offer`` (msgpack). Return "", or the model of this fleet, which refuses the offer."""
        with self._changed():
            refused = self._state.offer(msgspec.msgpack.decode(data, type=Offer))
        self._look()
        return refused

    def secret(self) -> str:
        """Return the secret of the server."""
        return self._state.kept.secret

    def want(self, plans: bytes) -> None:
        """Start the groups of ``plans`` (msgpack of GroupPlan), unless they run."""
        with self._changed():
            self._state.want(msgspec.msgpack.decode(plans, type=list[GroupPlan]))
        self._look()

    def remove(self, group: str) -> None:
        """Drain and end a group."""
        with self._changed():
            self._state.unwant(group)
        self._look()

    def stop(self) -> list[str]:
        """Drain and end all groups. Return the groups that live, without a wait."""
        with self._changed():
            for group in list(self._state.plans):
                self._state.unwant(group)
        self._look()
        return self.living()

    def living(self) -> list[str]:
        """Return the groups whose actors live."""
        prefix = group_name(self._server, "")
        found = ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in found if one["namespace"] == NAMESPACE]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def forget(self) -> None:
        """Remove the stored state. Call before the end of this actor."""
        with self._lock:
            self._forgotten = True
            internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)

    def revive(self, group: str) -> None:
        """Start a retired group again."""
        with self._changed():
            self._state.revive(group)
        self._look()

    def restart(self, groups: list[str]) -> None:
        """Restart ``groups`` in turn. Returns at once. A restarted fleet actor goes on with the rest."""
        with self._changed():
            self._state.restart(groups)
        self._begin_restart(0.0)

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
            return self._state.kept.topology, self._state.kept.secret

    def publish(self, group: str, attempt: int, process: int, data: bytes) -> bool:
        """Store the records of a group (msgpack of EngineRecord). Return False if the group must drain."""
        records = msgspec.msgpack.decode(data, type=list[EngineRecord])
        with self._lock:
            return self._state.publish(group, attempt, process, records, time.monotonic())

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
                internal_kv._internal_kv_put(self._key, after, overwrite=True, namespace=NAMESPACE)

    def _look_on(self) -> None:
        """Look again and again. The body of a thread."""
        while True:
            time.sleep(2 * LOOK_S)
            try:
                self._look()
            except Exception as error:
                log.error("the fleet of %s cannot be seen (%s)", self._server, type(error).__name__)

    def _look(self) -> None:
        """Start the actors of wanted groups, and kill unwanted actors that wait for a place."""
        with self._looks:
            living = self.living()
            with self._changed():
                due = self._state.due(living, time.monotonic())
                abandoned = self._state.abandoned(living, time.monotonic())
            for plan in due:
                self._place(plan)
            for group in abandoned:
                if (actor := self._actor(group)) is not None:
                    ray.kill(actor)

    def _begin_restart(self, wait: float) -> None:
        """Start the thread of the rolling restart, which begins after ``wait`` seconds."""
        threading.Thread(target=self._restart, args=(wait,), name="weft-restart", daemon=True).start()

    def _restart(self, wait: float) -> None:
        """Restart one group after the other: each must answer again before the next one drains."""
        time.sleep(wait)
        with self._turn:
            while self._state.kept.restarting:
                group = self._state.kept.restarting[0]
                good = self._restart_one(group)
                with self._changed():
                    self._state.restarted(group)
                    if not good:
                        self._state.kept.restarting.clear()

    def _restart_one(self, group: str) -> bool:
        """Restart a group. Return False if the group does not answer in time."""
        actor = self._actor(group)
        with self._lock:
            before = self._state.incarnations(group)
            seconds = START_S + self._state.kept.drain_timeout
        if actor is None:
            return True
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

    def _place(self, plan: GroupPlan) -> None:
        """Start the actor of a group. Ray restarts the actor without a limit; ``admit`` has the limit."""
        ray.remote(GroupActor).options(
            name=group_name(self._server, plan.group),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_concurrency=4,
            num_gpus=plan.gpus,
            num_cpus=plan.cpus,
            label_selector=plan.labels or None,
            # The loss of one node should leave groups of each role.
            scheduling_strategy="SPREAD",
        ).remote(self._server, plan.group, plan.attempt)
