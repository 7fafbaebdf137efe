"""Names of the served model, of the server's instances and of processes."""

from __future__ import annotations

import os.path

from weft.common import log
from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.config.resolved import EngineConfig
from weft.config.sections.all import ModelSection
from weft.types.handshake import EngineIdentity


def served_names(model: ModelSection, path: str) -> tuple[str, ...]:
    """Return the names of the model. Responses use the first name. The default for a folder is its last path
    part.

    Raise ConfigError for unprintable names.
    """
    if model.served_model_name:
        names = model.served_model_name
    elif _is_folder(model, path):
        names = (os.path.basename(os.path.abspath(path)) or model.model,)
    else:
        names = (model.model,)
    if any(not name.isprintable() for name in names):
        raise ConfigError("--served-model-name must be printable text", param="--served-model-name")
    return tuple(dict.fromkeys(names))


def accepted_names(model: ModelSection, path: str) -> tuple[str, ...]:
    """Return further names for requests, never listed: the model's folder as given on the command line."""
    return (model.model,) if not model.served_model_name and _is_folder(model, path) else ()


def _is_folder(model: ModelSection, path: str) -> bool:
    """Return True if ``--model`` is the folder itself, False for a bundled or hub model in the folder."""
    return str(expanded(model.model)) == path


def instance_name(config: EngineConfig, replica: int) -> str:
    """Return the name of a replica for API servers: ``1``.

    In a server of several groups: ``decode1`` or, for a group of several replicas, ``decode1.0``.
    """
    if not config.group:
        return str(replica)
    return f"{config.group}.{replica}" if config.parallel.data_parallel_size > 1 else config.group


def engine_identity(config: EngineConfig) -> EngineIdentity:
    """Return the identity of the engine process with the settings ``config``."""
    name = instance_name(config, config.replica)
    return EngineIdentity(name=name, model=config.served_names[0], start=config.start_id)


def process_name(config: EngineConfig, rank: int | None = None) -> str:
    """Return the process name for log lines of the replica's engine, or of worker ``rank``."""
    if not config.group:
        return log.head_name(config.replica, config.parallel.data_parallel_size, rank)
    instance = instance_name(config, config.replica)
    return instance if rank is None else f"{instance} rank {rank}"
