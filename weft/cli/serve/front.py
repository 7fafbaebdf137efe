"""``weft front``: an API server whose groups run alone (``weft engine``)."""

from __future__ import annotations

import functools
import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from weft.control.directory.directory_owner import DirectoryOwner
    from weft.control.directory.record import DirectoryReader


@click.command(cls=options.Command)
@click.argument("file", type=click.Path())
@directory_option
@options.settings(("front",), file=False)
def front(file: str, directory: str, **given: Any) -> int:
    """Serve the groups of the topology FILE, which run alone, over an OpenAI-compatible API.

    The API server finds the engines in the directory (`weft engine FILE --group NAME`), and starts and ends
    none. Engines may join and leave at any time. Several API servers may serve the same engines, on one host
    or on several. The end of an API server ends no engine. With `models` in FILE, each request names one of
    the models; a model is loaded while an engine of the model runs.
    """
    from weft.config.models.several import has_models

    serves = serve_models if has_models(file) else serve_model
    return serves(file, directory, options.given_values(given))


def serve_model(file: str, directory: str, given: Mapping[str, Any]) -> int:
    """Serve the groups of one model. Return the exit status. ``given``: field values of the command line.
    Raise ConfigError."""
    from weft.config.alone import front_alone
    from weft.config.models.several import refuse_models
    from weft.config.topology import read_topology
    from weft.front.front_server import serve

    topology = read_topology(file, given)
    section = with_keys(Config(front=topology.front)).front
    refuse_models(section, "`weft front`")
    _prepare(file, section)
    config = front_alone(topology._replace(front=section))
    begin([config], section)
    return serve(config, section, owner_of(config, _reader(directory, section)))


def serve_models(file: str, directory: str, given: Mapping[str, Any]) -> int:
    """Serve the groups of several models. The rest: see ``serve_model``."""
    from weft.config.models.alone import models_alone
    from weft.config.models.several import read_models
    from weft.control.directory.directory_hub import ByModel, DirectoryHub
    from weft.front.front_server import serve
    from weft.front.requests.models.model_set import model_set

    settings, section = read_models(file, given)
    section = with_keys(Config(front=section)).front
    _prepare(file, section)
    models = models_alone(settings, section)
    begin([model.config for model in models], section)
    records = ByModel(_reader(directory, section), [model.name for model in models])
    owners = {model.name: owner_of(model.config, records.of(model.name)) for model in models}
    section, found = model_set(models, None, section, DirectoryHub(owners, section.recovery_timeout))
    return serve(models[0].config, section, found)


def _prepare(file: str, section: FrontSection) -> None:
    """Configure the log of an API server. Raise ConfigError for several API servers in one command."""
    from weft.cli.serve.server import configure_log
    from weft.config.secret_file import warn_of_readable_keys

    if section.fronts > 1:
        raise ConfigError(
            "--fronts is for `weft serve` and `weft up`: start several `weft front`, each with its own port",
            param="--fronts",
        )
    configure_log(section)
    warn_of_readable_keys(file)


def _reader(directory: str, section: FrontSection) -> DirectoryReader:
    """Return the directory, which never waits. Raise ConfigError."""
    from weft.control.directory.backends import directory_for_front

    return directory_for_front(directory, next(iter(section.admin_key), ""))


def owner_of(config: EngineConfig, directory: DirectoryReader) -> DirectoryOwner:
    """Return the owner of the engines of one model. Raise ConfigError for an unusable secret."""
    from weft.config.topology import serves
    from weft.control.directory.directory_owner import DirectoryOwner
    from weft.parallel.secret import read_keys

    secret = config.parallel.group_secret
    return DirectoryOwner(
        directory,
        config.served_names[0],
        None if secret is None else read_keys(secret),
        functools.partial(serves, fallback=config.transfer.prefill_fallback),
    )


def begin(configs: Sequence[EngineConfig], section: FrontSection) -> None:
    """Prepare this process to be an API server whose engines belong to others. ``configs``: of each model."""
    from weft.config.file_limits import ask_for_files

    ask_for_files(configs, section)
    set_title("front", configs[0].served_names[0] if len(configs) == 1 else f"{len(configs)} models")
    child.forbid_core_dumps()
    signal.signal(signals.RESTART, signal.SIG_IGN)
