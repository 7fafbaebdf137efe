"""New settings for the groups of a server that runs: ``weft restart --file``.

A restart replaces one group after the other, so groups with old and with new settings work side by side.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config.alone import settings_of
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.topology import Topology, check_alike, read_topology


def renewed(text: str, present: Sequence[EngineConfig], names: Collection[str]) -> dict[str, EngineConfig]:
    """Return group -> configuration for the groups ``names`` of ``present``, from the topology ``text``.

    A group that the text does not list has the settings of the first group with the same base name. Groups
    keep their share of the host and their GPUs. Raise ConfigError if the text is wrong, if a group cannot
    work beside all others, or if a setting changes that a restart cannot change.
    """
    topology = _read(text)
    made = {old.group: _renewed(topology, old) for old in present if old.group in names}
    check_alike([*present, *made.values()])
    return made


def _read(text: str) -> Topology:
    with tempfile.TemporaryDirectory(prefix="weft-") as folder:
        path = Path(folder) / "topology.yaml"
        path.write_text(text)
        return read_topology(path)


def _renewed(topology: Topology, old: EngineConfig) -> EngineConfig:
    """Return the configuration of the group of ``old`` in ``topology``."""
    settings = settings_of(topology, old.group)
    config = msgspec.structs.replace(settings.config, front=topology.front)
    try:
        new = resolve(config, group=old.group, host=old.host)
    except ConfigError as error:
        raise ConfigError(f"group {old.group}: {error.message}", param=error.param) from error
    for what, now, then in _fixed(old, new):
        if now != then:
            raise ConfigError(
                f"group {old.group}: {what} is {now} and would be {then}; a restart cannot change this value: "
                "start another server with the file"
            )
    return msgspec.structs.replace(new, base=old.base, gpus=old.gpus)


def _fixed(old: EngineConfig, new: EngineConfig) -> list[tuple[str, object, object]]:
    """Return (name, old value, new value) of the facts on which API servers or other groups rely."""
    return [
        ("the role", old.transfer.role, new.transfer.role),
        ("the model", old.served_names, new.served_names),
        ("the number of ranks", old.parallel.layout.ranks, new.parallel.layout.ranks),
        ("the number of replicas", old.parallel.data_parallel_size, new.parallel.data_parallel_size),
        ("the number of hosts", old.parallel.nnodes, new.parallel.nnodes),
        ("the device", old.device, new.device),
        ("--max-model-len", old.kv.max_model_len, new.kv.max_model_len),
        ("--enable-expert-parallel", _experts(old), _experts(new)),
    ]


def _experts(config: EngineConfig) -> bool:
    return config.parallel.enable_expert_parallel
