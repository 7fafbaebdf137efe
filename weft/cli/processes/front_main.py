"""Entry point of an API server that shares engines: ``python -m weft.cli.processes.front_main PARENT
CHANNEL``.

CHANNEL is the descriptor of the channel to the supervisor (``weft.control.processes.channel``). A
``FrontSetup`` arrives on standard input, as msgpack. The status is 2 after a configuration error, and 1 after
any other failure.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weft.cli.processes import child
from weft.common import log
from weft.common.errors import WeftError
from weft.common.title import set_title
from weft.config.models.several import ResolvedModel
from weft.config.resolved import EngineConfig
from weft.config.sections.all import FrontSection
from weft.control.processes.channel import LoadLink, SupervisorLink
from weft.control.processes.process_registry import RegistryOwner, RegistryReader
from weft.engine.ranks.processes import ProcessCommand, start_process

if TYPE_CHECKING:
    from weft.front.requests.models.several_models import ModelSet


class FrontSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Start parameters of an API server."""

    config: EngineConfig
    section: FrontSection
    """Settings, with the port shared by all API servers."""
    name: str
    folder: str
    """Folder of the registry."""
    serving: bool = False
    """True if other API servers of the server answer requests already."""
    incarnation: int = 1
    models: tuple[ResolvedModel, ...] = ()
    """Models of a server of several models."""


def start_front(setup: FrontSetup, link: socket.socket) -> subprocess.Popen[bytes]:
    """Start an API server and return the process, without a wait for readiness. ``link``: the child's channel
    end.

    Call from the main thread: the kernel ends the child when the calling thread ends.
    """
    data = msgspec.msgpack.encode(setup)
    return start_process(ProcessCommand("front_main", (), data, descriptors=(link.fileno(),)))


def run(arguments: list[str]) -> int:
    """Run an API server until an order to end.

    ``arguments``: process id of the parent, descriptor of the link. Return the exit status; 2 after an error,
    which is printed.
    """
    parent, descriptor = arguments
    child.begin(int(parent))
    setup = child.read_setup(FrontSetup)
    models = f"{len(setup.models)} models" if setup.models else setup.config.served_names[0]
    set_title(f"front {setup.name}", models)
    log.configure(setup.section.log_settings, f"front {setup.name}")
    link = SupervisorLink(socket.socket(fileno=int(descriptor)), setup.serving)
    reader = RegistryReader(Path(setup.folder))
    section, owner = _owner(setup, link, reader)
    from weft.front.front_server import serve
    from weft.front.siblings import Siblings

    def fronts() -> list[str]:
        return [record.name for record in reader.read().of("front") if record.state == "running"]

    siblings = Siblings(setup.name, Path(setup.folder), fronts, lambda: reader.read().carrier)
    try:
        return serve(setup.config, section, owner, link, siblings)
    except WeftError as error:
        print(f"weft: {error.message}", file=sys.stderr, flush=True)
        return 2


def _owner(
    setup: FrontSetup, link: SupervisorLink, reader: RegistryReader
) -> tuple[FrontSection, RegistryOwner | ModelSet]:
    """Return the settings with plain keys, and the owner of the engines, or all models of a server of several
    models."""
    if not setup.models:
        commands = LoadLink(link)
        return setup.section, RegistryOwner(reader, commands.report, commands, link.keeps)
    from weft.control.processes.model_hub import SupervisorHub
    from weft.front.requests.models.model_set import model_set

    hub = SupervisorHub(link, reader, f"{setup.name}/{setup.incarnation}")
    return model_set(setup.models, None, setup.section, hub)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
