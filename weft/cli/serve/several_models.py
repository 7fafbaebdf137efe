"""A server of several models.

One API server runs in this process and owns the engines of all models. With ``--fronts N`` the API servers
are child processes, and this process is their supervisor (``weft.control.processes``).
"""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from weft.cli.processes import child
from weft.cli.processes.spares import open_spares
from weft.common import signals
from weft.common.folder import private_folder
from weft.common.title import set_title
from weft.config.file_limits import ask_for_files
from weft.config.sections.all import Config, FrontSection
from weft.config.sections.tls import server_context
from weft.config.topology import serves

if TYPE_CHECKING:
    from weft.config.models.several import ResolvedModel
    from weft.control.processes.engine_owner import EngineOwner
    from weft.engine.ranks.processes import Spares, Start
    from weft.engine.server.engine_processes import EngineGroups

_SECONDS_TO_CLOSE = 5.0
CONFIG_ERROR = 2
"""Exit status of a process with an invalid configuration."""


class ModelEngines:
    """The engine processes of one model. Implements ``several_models.ModelProcesses``: each ``start`` begins
    with new processes in a new folder."""

    def __init__(self, model: ResolvedModel, folder: Path, start: Start) -> None:
        """``folder``: private folder of the server. ``start``: starts an engine's process."""
        self._model, self._folder, self._start = model, folder, start
        self._groups: EngineGroups | None = None
        self._own: Path | None = None
        self.owner: EngineOwner | None = None
        """Owner of the present processes; None while the model is not loaded."""
        self.refused = False
        """True after a process ended with a configuration error."""

    def start(self) -> EngineOwner:
        """Start the processes. Call from the main thread: the processes end with the calling thread."""
        from weft.control.processes.engine_owner import EngineOwner
        from weft.engine.server.engine_processes import EngineGroups

        front, config = self._model.section, self._model.config
        self._own = Path(tempfile.mkdtemp(prefix="m", dir=self._folder))
        self._groups = EngineGroups(self._model.groups, self._own, front.log_settings, self._start)
        self.owner = EngineOwner(
            self._groups.members,
            self._groups,
            front.engine_restarts,
            serves=functools.partial(serves, fallback=config.transfer.prefill_fallback),
            drain_timeout=front.drain_timeout,
        )
        self.owner.start()
        return self.owner

    def close(self, seconds: float) -> None:
        """End the processes, and remove their folder."""
        groups, self._groups, self.owner = self._groups, None, None
        if groups is not None:
            self.refused |= CONFIG_ERROR in groups.close(seconds)
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


def run_models(models: Sequence[ResolvedModel], front: FrontSection, spares: Spares) -> int:
    """Serve until a stop signal. Return the exit status; 2 if the server failed and an engine had a
    configuration error. ``spares`` starts the processes, which have ended at the return. Installs signal
    handlers; call from the main thread."""
    groups = [group for model in models for group in model.groups]
    ask_for_files(groups, front)
    signal.signal(signals.RESTART, signal.SIG_IGN)
    server_context(front)  # a wrong TLS file ends the start here, before any process loads a model
    from weft.cli.serve.server import Operations
    from weft.front.front_server import bind

    # The socket of several API servers only reserves the port.
    listener = bind(front.host, front.port, listens=front.fronts == 1)
    set_title("server" if front.fronts == 1 else "supervisor", f"{len(models)} models")
    child.forbid_core_dumps()
    for number in signals.handled_stops():
        signal.signal(number, signals.end)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals.STOPS)
    folder = private_folder()
    operations = Operations(tuple(groups), False, spares.start)
    engines = [ModelEngines(model, folder, operations.start) for model in models]
    status = 1
    try:
        if front.fronts == 1:
            status = _serve(models, engines, front, listener)
        else:
            status = _serve_fronts(models, engines, front, folder, listener)
    finally:
        signals.ignore()
        signal.signal(signals.RESTART, signal.SIG_IGN)
        listener.close()
        for one in engines:
            one.close(0.0 if status > 128 else _SECONDS_TO_CLOSE)
        shutil.rmtree(folder, ignore_errors=True)
    return 2 if status != 0 and any(one.refused for one in engines) else status


def _serve(
    models: Sequence[ResolvedModel],
    engines: Sequence[ModelEngines],
    front: FrontSection,
    listener: socket.socket,
) -> int:
    """Run the API server over the models. Return the exit status."""
    from weft.front.front_server import serve
    from weft.front.requests.models.model_set import model_set

    section, found = model_set(models, engines, front, None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.STOPS)

    def restart(*_: object) -> None:
        for one in engines:
            if one.owner is not None:
                one.owner.ask_restart()

    signal.signal(signals.RESTART, restart)
    return serve(found.plans[0].config, section, found, listener=listener)


def _serve_fronts(
    models: Sequence[ResolvedModel],
    engines: Sequence[ModelEngines],
    front: FrontSection,
    folder: Path,
    reserved: socket.socket,
) -> int:
    """Run several API servers over the models, as their supervisor. Return the exit status. ``reserved``: see
    ``weft.cli.serve.server.run_fronts``."""
    from weft.cli.processes.front_main import FrontSetup, start_front
    from weft.config.models.several import memory_budget
    from weft.control.model_fronts import SharedTable
    from weft.control.processes.cluster_server import ClusterServer
    from weft.control.processes.model_loads import ModelLoads
    from weft.control.processes.supervisor import Supervisor
    from weft.engine.server.engine_processes import EngineGroups
    from weft.front.first_request import has_template
    from weft.front.front_server import print_ready, ready_text
    from weft.front.requests.models.model_set import facts

    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    section = msgspec.structs.replace(front, port=reserved.getsockname()[1])
    config = models[0].config

    def start(name: str, incarnation: int, link: socket.socket) -> subprocess.Popen[bytes]:
        setup = FrontSetup(
            config=config,
            section=section,
            name=name,
            folder=str(folder),
            serving=incarnation > 1,
            incarnation=incarnation,
            models=tuple(models),
        )
        return start_front(setup, link)

    def announce() -> None:
        chats = has_template(config, front)
        names = [model.name for model in models]
        print_ready(ready_text(reserved, config, section, chats=chats, names=names))

    table = SharedTable([facts(model) for model in models], memory_budget(front))
    loads = ModelLoads(table, {one.name: each for one, each in zip(models, engines, strict=True)})
    supervisor = Supervisor(
        (),
        [str(number) for number in range(front.fronts)],
        restarts=front.engine_restarts,
        drain_timeout=front.drain_timeout,
    )
    none = EngineGroups((), folder, front.log_settings)
    return ClusterServer(supervisor, none, start, folder, announce, models=loads).run()


def describe(models: Sequence[ResolvedModel], front: FrontSection) -> str:
    """Return the plan of the server as text: a line for the server, and a line per model."""
    lines = [f"{len(models)} models on {front.host}:{front.port}"]
    width = max(len(model.name) for model in models)
    for model in models:
        ranks = sum(group.parallel.layout.ranks for group in model.groups)
        notes = ["at the start" if model.starts else "on demand", *(["pinned"] if model.pin else [])]
        lines.append(
            f"  {model.name:<{width}}  {model.cost / (1 << 30):.2f} GiB, {len(model.groups)} group"
            f"{'s' * (len(model.groups) != 1)}, {ranks} rank{'s' * (ranks != 1)}, {', '.join(notes)}"
        )
    return "\n".join(lines)


def up_models(file: str, given: Mapping[str, Any], keyed: Callable[[Config], Config], *, check: bool) -> int:
    """Serve the models of a topology file. Return the exit status. ``given``: field values of the command
    line. ``keyed``: adds the keys of the environment. ``check``: only print the plan. Raise ConfigError."""
    from weft.cli.serve.server import configure_log
    from weft.config.models.several import read_models, resolve_models
    from weft.config.secret_file import check_secrets, warn_of_readable_keys

    settings, section = read_models(file, given)
    front = keyed(Config(front=section)).front
    configure_log(front)
    warn_of_readable_keys(file)
    models = resolve_models(settings, front)
    check_secrets([group for model in models for group in model.groups])
    if check:
        server_context(front)
        click.echo(describe(models, front))
        return 0
    torchless = all(group.scripted for model in models for group in model.groups)
    with open_spares(front, torchless=torchless) as spares:
        return run_models(models, front, spares)
