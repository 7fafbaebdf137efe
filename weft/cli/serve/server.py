"""A server: API servers and engine processes of all groups, connected by sockets in a private folder.

A single API server runs in this process and owns the engines. Several API servers are child processes, like
the engines, and this process is the supervisor: see ``weft.control.processes``.
"""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.cli.processes import child
from weft.common import log, signals
from weft.common.folder import private_folder
from weft.common.log import get_logger
from weft.common.title import set_title
from weft.config.file_limits import ask_for_files
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.config.sections.tls import server_context
from weft.config.topology import face, serves
from weft.ops import cpu
from weft.ops.cpu.beside import OperationsBuild, built

if TYPE_CHECKING:
    from weft.engine.ranks.processes import ProcessCommand, Spares, Start
    from weft.engine.server.engine_processes import EngineGroups

_SECONDS_TO_CLOSE = 5.0

_log = get_logger(__name__)


def configure_log(front: FrontSection) -> None:
    """Configure the log. Lines name the role of the process."""
    log.configure(front.log_settings, "front" if front.fronts == 1 else "supervisor")


def run(groups: tuple[EngineConfig, ...], front: FrontSection, spares: Spares) -> int:
    """Serve until a stop signal, or until no request can be served any more.

    Return the exit status; 2 if the server failed and an engine had a configuration error. ``spares`` starts
    the processes, which have ended at the return. Installs signal handlers; call from the main thread.
    """
    resolved = face(groups)
    ask_for_files(groups, front)
    signal.signal(signals.RESTART, signal.SIG_IGN)
    server_context(front)  # a wrong TLS file ends the start here, before any process loads a model
    from weft.engine.server.engine_processes import EngineGroups
    from weft.front.front_server import bind

    # A port in use ends the start here, too. The socket of several API servers only reserves the port.
    listener = bind(front.host, front.port, listens=front.fronts == 1)

    name = "server" if front.fronts == 1 else "supervisor"
    set_title(name, resolved.served_names[0])

    child.forbid_core_dumps()
    # Until the API server installs signal handlers, a signal ends the process in order and removes the
    # folder.
    for number in signals.handled_stops():
        signal.signal(number, signals.end)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
    folder = private_folder()
    engines: EngineGroups | None = None
    operations: Operations | None = None
    patience, status = 0.0, 1
    ends: list[int] = []
    try:
        operations = Operations(groups, front.build_ops, spares.start)
        engines = EngineGroups(groups, folder, front.log_settings, operations.start)
        if front.fronts > 1:
            status = run_fronts(resolved, front, engines, folder, operations, listener)
        else:
            status = run_front(resolved, front, engines, operations, listener)
        # After a signal that cuts off requests, do not wait: engines still load, or must not finish.
        patience = 0.0 if status > 128 else _SECONDS_TO_CLOSE
    finally:
        signals.ignore()
        signal.signal(signals.RESTART, signal.SIG_IGN)
        listener.close()
        if operations is not None:
            operations.close()
        if engines is not None:
            ends = engines.close(patience)
        shutil.rmtree(folder, ignore_errors=True)
    # An engine with a configuration error makes the status 2, but only if the server failed.
    return 2 if status != 0 and 2 in ends else status


class Operations:
    """CPU operations of a server's engine processes: the same in all processes.

    A server that starts without the C++ operations keeps torch's operations, or compiles the C++ operations
    and switches all engines at once.
    """

    def __init__(self, groups: tuple[EngineConfig, ...], compiles: bool, start: Start) -> None:
        """``compiles``: ``--build-ops``. ``start`` starts an engine's process."""
        self._start = start
        concerned = any(group.device == "cpu" and not group.scripted for group in groups)
        self._missing = concerned and not built()
        self._compiles = compiles and self._missing
        self._build: OperationsBuild | None = None

    def start(self, command: ProcessCommand) -> subprocess.Popen[bytes]:
        """Start an engine's process with the server's present operations and return the process.

        A process may restart at any time. So operations built in the meantime have no effect before the
        switch.
        """
        if self._missing:
            how = cpu.COMPILING if self._compiles else cpu.UNBUILT
            environment = {**command.environment, "WEFT_DISABLE_CPU_OPS": how}
            command = command._replace(environment=environment)
        return self._start(command)

    def compile(self, switch: Callable[[], None]) -> None:
        """Start the compilation beside the server, if requested; does not block.

        ``switch`` requests the switch of all engines after success. A failed start is logged.
        """
        if self._compiles:
            _log.info(
                "compiling the C++ operations; until then the server uses torch's operations, at about "
                "half the speed"
            )
            try:
                self._build = OperationsBuild(switch)
            except OSError as error:
                _log.warning("the C++ operations cannot be compiled (%s)", error.strerror)

    def switched(self) -> None:
        """Use the compiled operations in all later processes.

        Call when all engines have ended or get no more work.
        """
        _log.info("engines switch to the C++ operations")
        self._missing = False

    def close(self) -> None:
        """End a running compilation."""
        if self._build is not None:
            self._build.close()


def run_front(
    resolved: EngineConfig,
    front: FrontSection,
    engines: EngineGroups,
    operations: Operations,
    listener: socket.socket,
) -> int:
    """Serve with one API server in this process, which owns the engines.

    ``listener``: socket of the API. Blocks; returns the exit status. Unblocks stop signals, and the restart
    signal restarts the engines. Starts the compilation of the operations, if requested, once ready: the
    compilers would delay the first answer.
    """
    from weft.control.processes.engine_owner import EngineOwner
    from weft.front.front_server import serve

    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)
    owner = EngineOwner(
        engines.members,
        engines,
        front.engine_restarts,
        serves=functools.partial(serves, fallback=resolved.transfer.prefill_fallback),
        drain_timeout=front.drain_timeout,
        on_switch=operations.switched,
    )
    signal.signal(signals.RESTART, lambda *_: owner.ask_restart())
    owner.start()
    ready = functools.partial(operations.compile, owner.switch)
    return serve(resolved, front, owner, listener=listener, on_ready=ready)


def run_fronts(
    resolved: EngineConfig,
    front: FrontSection,
    engines: EngineGroups,
    folder: Path,
    operations: Operations,
    reserved: socket.socket,
) -> int:
    """Serve with several API servers on one port, as their supervisor.

    Blocks; returns the exit status. ``folder``: private folder for the registry. ``reserved``: bound
    socket that never listens. The socket reserves the port for restarted API servers. Once ready, prints the
    address and starts the compilation of the operations, if requested.
    """
    from weft.cli.processes.front_main import FrontSetup, start_front
    from weft.control.processes.cluster_server import ClusterServer
    from weft.control.processes.supervisor import Supervisor
    from weft.front.first_request import has_template
    from weft.front.front_server import print_ready, ready_text

    # SO_REUSEPORT is set only after the bind: with SO_REUSEPORT from the start, another server of the same
    # user could share the port unnoticed.
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
        print_ready(ready_text(reserved, resolved, section, chats=chats))
        operations.compile(server.switch)

    supervisor = Supervisor(
        engines.members,
        [str(number) for number in range(front.fronts)],
        restarts=front.engine_restarts,
        drain_timeout=front.drain_timeout,
        serves=functools.partial(serves, fallback=resolved.transfer.prefill_fallback),
    )
    secret = resolved.parallel.group_secret
    server = ClusterServer(
        supervisor, engines, start, folder, announce, secret=secret, on_switch=operations.switched
    )
    return server.run()
