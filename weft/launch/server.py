"""A server: fronts and heads of all its groups, joined by sockets in a private folder.

One front runs in this process and owns the heads. Several are children beside the heads, and this process is
their supervisor: see ``weft.cluster``.
"""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.common import log, signals
from weft.common.folder import private_folder
from weft.common.log import get_logger
from weft.common.title import set_title
from weft.config.open_files import ask_for_files
from weft.config.resolved import EngineConfig
from weft.config.sections import FrontSection
from weft.config.topology import face, serves
from weft.launch import child
from weft.ops import cpu
from weft.ops.cpu.beside import OperationsBuild, built

if TYPE_CHECKING:
    from weft.engine.heads import HeadGroups
    from weft.engine.processes import Command, Start

_SECONDS_TO_CLOSE = 5.0

_log = get_logger(__name__)


def configure_log(front: FrontSection, host: int) -> None:
    """Log lines name this process: what it is on host ``host``."""
    process = "front" if front.fronts == 1 else "supervisor"
    log.configure(front.log_settings, f"host {host}" if host else process)


def run(groups: tuple[EngineConfig, ...], front: FrontSection) -> int:
    """Serves until told to stop, or until nothing can be served any more; returns the exit status.

    A host other than the first of several runs its share of heads and ranks for the front on the first one.
    """
    resolved = face(groups)
    ask_for_files(groups, front)
    signal.signal(signals.RESTART, signal.SIG_IGN)  # a host's groups are replaced by the first host
    if resolved.parallel.node_rank:
        from weft.launch.other_host import serve_groups

        child.forbid_core_dumps()
        return serve_groups(groups, front.log_settings)
    from weft.engine.heads import HeadGroups
    from weft.engine.processes import Spares

    name = "server" if front.fronts == 1 else "supervisor"
    set_title(name, resolved.served_names[0])

    child.forbid_core_dumps()
    # Until the front takes signals over, each ends this process in order: no folder is left behind.
    for number in signals.heeded():
        signal.signal(number, signals.end)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
    folder = private_folder()
    heads: HeadGroups | None = None
    operations: Operations | None = None
    torchless = all(group.scripted for group in groups)
    spares = Spares(front.spare_processes if front.engine_restarts and not torchless else 0)
    patience, status = 0.0, 1
    ends: list[int] = []
    try:
        operations = Operations(groups, front.build_ops, spares.start)
        heads = HeadGroups(groups, folder, front.log_settings, operations.start)
        if front.fronts > 1:
            status = run_fronts(resolved, front, heads, folder, operations)
        else:
            status = run_front(resolved, front, heads, operations)
        # After a signal that cuts short there is nothing to wait for: heads still load, or are not to finish.
        patience = 0.0 if status > 128 else _SECONDS_TO_CLOSE
    finally:
        signals.ignore()
        signal.signal(signals.RESTART, signal.SIG_IGN)
        if operations is not None:
            operations.close()
        if heads is not None:
            ends = heads.close(patience, 0 if status > 128 else status)
        spares.close()
        shutil.rmtree(folder, ignore_errors=True)
    return 2 if status != 0 and 2 in ends else status


class Operations:
    """The operations with which a server's engine processes compute on a CPU: the same in all of them.

    A server that begins without the C++ operations stays on torch's, or compiles the C++ operations and
    changes all its engines at once.
    """

    def __init__(self, groups: tuple[EngineConfig, ...], compiles: bool, start: Start) -> None:
        """``compiles``: ``--build-ops``. ``start`` starts a process of an engine."""
        self._start = start
        concerned = any(group.device == "cpu" and not group.scripted for group in groups)
        self._missing = concerned and not built()
        self._compiles = compiles and self._missing
        self._build: OperationsBuild | None = None

    def start(self, command: Command) -> subprocess.Popen[bytes]:
        """Starts a process of an engine. A process may be started again at any time, so what was built
        meanwhile does not change its operations.
        """
        if self._missing:
            how = cpu.COMPILING if self._compiles else cpu.UNBUILT
            environment = {**command.environment, "WEFT_DISABLE_CPU_OPS": how}
            command = command._replace(environment=environment)
        return self._start(command)

    def compile(self, switch: Callable[[], None]) -> None:
        """Compiles beside the server, if it is to. ``switch`` asks for the change of all engines."""
        if self._compiles:
            _log.info("compiling the C++ operations; until then torch's serve, about half as fast")
            try:
                self._build = OperationsBuild(switch)
            except OSError as error:
                _log.warning("the C++ operations cannot be compiled (%s)", error.strerror)

    def switched(self) -> None:
        """All engines have ended, or will take no work: those that start from now on find what was built."""
        _log.info("engines change to the C++ operations")
        self._missing = False

    def close(self) -> None:
        """Ends a compilation that still runs."""
        if self._build is not None:
            self._build.close()


def run_front(resolved: EngineConfig, front: FrontSection, heads: HeadGroups, operations: Operations) -> int:
    """Serves with one front, in this process, which owns the heads; returns the exit status."""
    from weft.cluster.owner import HeadOwner
    from weft.front.server import serve

    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)
    owner = HeadOwner(
        heads.members,
        heads,
        front.engine_restarts,
        serves=functools.partial(serves, fallback=resolved.transfer.prefill_fallback),
        drain_timeout=front.drain_timeout,
        on_switch=operations.switched,
    )
    signal.signal(signals.RESTART, lambda *_: owner.restart())
    owner.start()
    operations.compile(owner.switch)
    return serve(resolved, front, owner)


def run_fronts(
    resolved: EngineConfig, front: FrontSection, heads: HeadGroups, folder: Path, operations: Operations
) -> int:
    """Serves with several fronts on one port, as their supervisor; returns the exit status.

    ``folder``: for the registry; only this user may enter it. Raises ConfigError when the port can't be used.
    """
    from weft.cluster.server import ClusterServer
    from weft.cluster.supervisor import Supervisor
    from weft.front.first_request import has_template
    from weft.front.server import bind, ready_text
    from weft.launch.front_main import FrontSetup, start_front

    # It never listens: it finds the port, and keeps it for fronts that are started again. Others of this user
    # could share a port that is shared from the beginning, and this server would not notice.
    with bind(front.host, front.port, listens=False) as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        section = msgspec.structs.replace(front, port=reserved.getsockname()[1])

        def start(name: str, incarnation: int, link: socket.socket) -> subprocess.Popen[bytes]:
            setup = FrontSetup(
                config=resolved,
                section=section,
                name=name,
                folder=str(folder),
                serving=incarnation > 1,
            )
            return start_front(setup, link)

        def announce() -> None:
            chats = has_template(resolved, front)
            sys.stdout.write(ready_text(reserved, resolved, section, chats=chats))
            sys.stdout.flush()

        supervisor = Supervisor(
            heads.members,
            [str(number) for number in range(front.fronts)],
            restarts=front.engine_restarts,
            drain_timeout=front.drain_timeout,
            serves=functools.partial(serves, fallback=resolved.transfer.prefill_fallback),
        )
        secret = resolved.parallel.group_secret
        server = ClusterServer(
            supervisor, heads, start, folder, announce, secret=secret, on_switch=operations.switched
        )
        operations.compile(server.switch)
        return server.run()
