"""``weft serve``: one group, or several with ``--prefill``, ``--decode`` and ``--encode``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from weft.cli import options
from weft.cli.processes.spares import open_spares
from weft.common import env
from weft.common.errors import ConfigError
from weft.config.flags import SETTINGS
from weft.config.sections.all import Config
from weft.engine.ranks.processes import Spares


@click.command(cls=options.Command)
@click.argument("models", metavar="[MODEL]...", nargs=-1)
@options.settings(options.ALL)
def serve(models: tuple[str, ...], **given: Any) -> int:
    """Serve MODEL over an OpenAI-compatible API.

    MODEL is a folder, a hub name or a bundled model (see `weft models`). The default is a bundled model. With
    --prefill P and --decode D, P groups compute prompts and D groups compute outputs from the caches of the
    former. With --encode E, E groups encode images for the other groups. The other groups then load no vision
    tower, unless --no-language-model-only asks for a tower as a fallback. All groups have the same flags.
    `weft up` starts groups with different flags.

    Several MODELs, or --models-dir, make a server of several models: each request names one. With
    --models-memory, models load on the first request, and idle models make room.
    """
    config = with_keys(options.build(given, models[0] if len(models) == 1 else None))
    with open_spares(config.front, torchless=config.front.scripted is not None) as spares:
        return _serve(config, models, given, spares)


def _serve(config: Config, models: tuple[str, ...], given: dict[str, Any], spares: Spares) -> int:
    """Resolve the configuration and serve. Return the exit status. Raise ConfigError."""
    from weft.cli.serve.server import configure_log, run
    from weft.config.models.several import refuse_models
    from weft.config.resolve import resolve
    from weft.config.scripted_config import resolve_scripted
    from weft.config.secret_file import check_secrets, warn_of_readable_keys
    from weft.config.topology import resolve_groups, short_form

    configure_log(config.front)
    warn_of_readable_keys(given.get("config"))
    towers = given.get("language_model_only") is False
    if len(models) > 1 or config.front.models_dir is not None:
        return _several(config, models, given, towers, spares)
    refuse_models(config.front, "a server of one model")
    if config.front.scripted is not None:
        return run((resolve_scripted(config),), config.front, spares)
    topology = short_form(config, towers=towers)
    groups = (resolve(config),) if topology is None else resolve_groups(topology)
    check_secrets(groups)
    return run(groups, config.front, spares)


def _several(
    config: Config, models: tuple[str, ...], given: dict[str, Any], towers: bool, spares: Spares
) -> int:
    """Serve several models with the same flags. Return the exit status. ``towers``: see ``short_form``. Raise
    ConfigError."""
    from weft.cli.serve.several_models import run_models
    from weft.config.models.several import from_command_line, resolve_models
    from weft.config.secret_file import check_secrets

    if given.get("model") is not None:
        raise ConfigError("--model is for one model: name all models without the flag", param="--model")
    named, found = from_command_line(config, models, towers)
    resolved = resolve_models(named, config.front, found)
    check_secrets([group for model in resolved for group in model.groups])
    return run_models(resolved, config.front, spares)


def with_keys(config: Config) -> Config:
    """Return ``config`` with the keys of WEFT_API_KEY and WEFT_ADMIN_KEY, unless flags or the file give keys.

    Raise ConfigError if a variable is set but blank: a blank variable must not open the server.
    """
    front = config.front
    if not front.api_key and env.is_set("WEFT_API_KEY"):
        keys = _keys("api_key", "WEFT_API_KEY", env.get("WEFT_API_KEY"))
        front = msgspec.structs.replace(front, api_key=keys)
    if not front.admin_key and env.is_set("WEFT_ADMIN_KEY"):
        keys = _keys("admin_key", "WEFT_ADMIN_KEY", env.get("WEFT_ADMIN_KEY"))
        front = msgspec.structs.replace(front, admin_key=keys)
    return msgspec.structs.replace(config, front=front)


def _keys(setting: str, variable: str, text: str) -> Any:
    """Return the keys in a variable. Raise ConfigError for a blank variable."""
    if not text.strip(", \t\r\n"):
        raise ConfigError(
            f"{variable} is set but empty: set {variable} to a key, or unset {variable} to serve without keys"
        )
    return SETTINGS[setting].parse(text, variable)
