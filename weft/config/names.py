"""Names of the model that is served: those that are shown, and those that requests may use beside them; and
names of the server's instances.
"""

from __future__ import annotations

import os.path
from pathlib import Path

from weft.common import log
from weft.common.errors import ConfigError
from weft.config.resolved import EngineConfig
from weft.config.sections import ModelSection


def served_names(model: ModelSection, path: str) -> tuple[str, ...]:
    """Names of the model, the one reported first. A local folder at ``path`` has its last part as name."""
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
    """Names that requests may use beside the served ones, and that are never listed: a folder, as it was
    given.
    """
    return (model.model,) if not model.served_model_name and _is_folder(model, path) else ()


def _is_folder(model: ModelSection, path: str) -> bool:
    """Whether ``--model`` names the folder itself, not a bundled or a hub model that lies there."""
    return str(Path(model.model).expanduser()) == path


def instance_name(config: EngineConfig, replica: int) -> str:
    """What fronts call a replica: ``1``; in a server of several groups ``decode1`` or, of several replicas of
    one, ``decode1.0``.
    """
    if not config.group:
        return str(replica)
    return f"{config.group}.{replica}" if config.parallel.data_parallel_size > 1 else config.group


def process_name(config: EngineConfig, rank: int | None = None) -> str:
    """What log lines of the replica's head, or of its worker ``rank``, name as their process."""
    if not config.group:
        return log.head_name(config.replica, config.parallel.data_parallel_size, rank)
    instance = instance_name(config, config.replica)
    return instance if rank is None else f"{instance} rank {rank}"
