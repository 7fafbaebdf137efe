"""The Ray actor of a group, and names and time limits of all actors."""

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
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray

from weft.common.errors import ConfigError
from weft.common.folder import open_private, private_folder
from weft.common.log import get_logger
from weft.control.directory.folder import FolderDirectory
from weft.control.directory.record import EngineRecord

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


def group_name(server: str, group: str, index: int = 0) -> str:
    """Return the name of the actor of a group. ``index``: number of the host in the group."""
    return f"weft/{server}/{group}/{index}" if index else f"weft/{server}/{group}"


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
                               │ failed after an engine was ready: back to the fleet's admission
                               ╰─any other end, any error─► os._exit(1): Ray restarts the actor

    One thread starts and watches the command: the kernel kills the command with the thread that has started
    the command.
    """

    def __init__(self, server: str, group: str, attempt: int, index: int = 0) -> None:
        """Start the thread. The constructor calls no other actor: Ray does not restart an actor whose
        constructor has failed. ``attempt``: see ``GroupPlan``. ``index``: number of the host in the group."""
        self._index = index
        self._server, self._group, self._attempt = server, group, attempt
        self._number = secrets.randbits(63)
        """Random number of this process, or of its present command: the fleet recognizes a restart."""
        self._begun, self._ready = 0.0, False
        """Time at which the present command began, and True once an engine of the command is ready."""
        self._calls = 0
        """Number of the last call of ``publish``."""
        self._records: list[EngineRecord] = []
        """The last records that were read."""
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
                self._begun, self._ready = time.monotonic(), False
                status = self._follow(*self._start(*settings))
                with self._lock:
                    if self._over or (status == 0 and not self._again):
                        break
                    if not self._again:
                        log.error("group %s ended with status %d", self._group, status)
                        if not self._healthy():
                            return
                        self._number = secrets.randbits(63)  # counts as a restart
            self._end()
        except BaseException:
            log.exception("the actor of group %s failed", self._group)
        finally:
            self._clean()
            os._exit(1)  # Ray restarts the actor

    def _healthy(self) -> bool:
        """Return True if the node of the command is not at fault: the engines have been ready."""
        return self._ready

    def _admit(self) -> tuple[str, str] | None:
        """Return (text of the topology, secret), or None if the group must end for good."""
        with self._lock:
            # A later order to restart applies to the command started below, which may have old settings.
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
            wanted = True
            # The fleet actor restarts, or its node is away. The next look tries again.
            with contextlib.suppress(Exception):
                wanted = self._publish(self._group, directory, status is not None)
            if not wanted:
                with self._lock:
                    self._over = True
                    self._drain()
            if status is not None:
                return status
            time.sleep(LOOK_S)

    def _publish(self, name: str, directory: FolderDirectory, ended: bool) -> bool:
        """Send the records of the engines. ``name``: see ``FleetState.publish``. ``ended``: the command has
        ended. Return True if the group is wanted. A folder that cannot be read keeps the last records, which
        nobody renews."""
        try:
            self._records = [] if ended else [*directory.read().values()]
            self._ready = self._ready or any(record.ready for record in self._records)
        except OSError as error:
            log.error("the records of group %s cannot be read (%s)", name, error)
            with contextlib.suppress(ConfigError):
                directory.mend()
        self._calls += 1
        data = msgspec.msgpack.encode(self._records)
        wanted: bool = self._call("publish", name, self._attempt, self._number, data, self._calls, ended)
        return wanted

    def _clean(self) -> None:
        """Remove the folder, which has the secret."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end(self) -> None:
        """End this actor for good: Ray must not restart the actor."""
        self._clean()
        with contextlib.suppress(Exception):
            self._say_left()
        name = group_name(self._server, self._group, self._index)
        insist(lambda: ray.kill(ray.get_actor(name, namespace=NAMESPACE)), END_S)
        time.sleep(END_S)

    def _say_left(self) -> None:
        """Report the end to the fleet actor. A restarted actor without this call is not admitted, unless
        nobody has ordered the end."""
        insist(lambda: self._call("left", self._group, self._attempt), END_S)

    def _call(self, method: str, *arguments: Any) -> Any:
        """Return the answer of the fleet actor. Raise any exception of Ray."""
        try:
            if self._fleet is None:
                self._fleet = ray.get_actor(fleet_name(self._server), namespace=NAMESPACE)
            return ray.get(getattr(self._fleet, method).remote(*arguments), timeout=CALL_S)
        except Exception:
            self._fleet = None  # perhaps another actor has the name now
            raise
