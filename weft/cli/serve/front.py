"""``weft front``: an API server whose groups run alone (``weft engine``)."""

from __future__ import annotations

import functools
import signal
from typing import Any

import click

from weft.cli import options
from weft.cli.processes import child
from weft.cli.serve.engine import directory_option
from weft.cli.serve.serve import with_keys
from weft.common import signals
from weft.common.errors import ConfigError
from weft.common.title import set_title
from weft.config.resolved import EngineConfig
from weft.config.sections.all import Config, FrontSection


@click.command(cls=options.Command)
@click.argument("file", type=click.Path())
@directory_option
@options.settings(("front",), file=False)
def front(file: str, directory: str, **given: Any) -> int:
    """Serve the groups of the topology FILE, which run alone, over an OpenAI-compatible API.

    The API server finds the engines in the directory (`weft engine FILE --group NAME`), and starts and ends
    none. Engines may join and leave at any time. Several API servers may serve the same engines, on one host
    or on several. The end of an API server ends no engine.
    """
    from weft.cli.serve.server import configure_log
    from weft.config.alone import face_alone
    from weft.config.models.several import refuse_models
    from weft.config.secret_file import warn_of_readable_keys
    from weft.config.topology import read_topology, serves
    from weft.control.directory.backends import directory_for_front
    from weft.control.directory.directory_owner import DirectoryOwner
    from weft.front.front_server import serve
    from weft.parallel.secret import read_keys

    topology = read_topology(file, options.given_values(given))
    section = with_keys(Config(front=topology.front)).front
    refuse_models(section, "`weft front`")
    if section.fronts > 1:
        raise ConfigError(
            "--fronts is for `weft serve` and `weft up`: start several `weft front`, each with its own port",
            param="--fronts",
        )
    configure_log(section)
    warn_of_readable_keys(file)
    config = face_alone(topology._replace(front=section))
    begin(config, section)
    secret = config.parallel.group_secret
    owner = DirectoryOwner(
        directory_for_front(directory, next(iter(section.admin_key), "")),
        config.served_names[0],
        None if secret is None else read_keys(secret),
        functools.partial(serves, fallback=config.transfer.prefill_fallback),
    )
    return serve(config, section, owner)


def begin(config: EngineConfig, section: FrontSection) -> None:
    """Prepare this process to be an API server whose engines belong to others."""
    from weft.config.file_limits import ask_for_files

    ask_for_files((config,), section)
    set_title("front", config.served_names[0])
    child.forbid_core_dumps()
    signal.signal(signals.RESTART, signal.SIG_IGN)
