"""Resolution of single groups of a topology (on their own host, or again while a server runs), and of an API
server whose groups run on other hosts.

weft engine FILE --group decode1    one group of FILE, alone on its host
weft front FILE                     the API server of FILE; no group runs here
weft restart --file FILE            new settings for groups that run, one group after the other
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config import hub
from weft.config.flags import suggest
from weft.config.hosts import check_hosts, ranks_on
from weft.config.names import accepted_names, served_names
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import Config
from weft.config.topology import GroupSettings, Topology, check_alike, face, read_topology, serves


def group_alone(
    topology: Topology,
    name: str,
    advertise: str | None = None,
    secret: str | None = None,
    index: int = 0,
) -> EngineConfig:
    """Return the configuration of group ``name``, which has this host for itself. ``advertise``: address of
    this host for other hosts, or None. ``secret``: file in place of the topology's ``group-secret``.
    ``index``: number of this host among the hosts of the group.

    ``name`` may have a number that the topology does not list: ``decode7`` has the settings of ``decode0``.
    Raise ConfigError for an unknown name, and for a group that cannot work.
    """
    group = settings_of(topology, name)
    parallel = group.config.parallel
    if advertise is not None:
        parallel = msgspec.structs.replace(parallel, advertise=advertise)
    parallel = msgspec.structs.replace(parallel, ray_labels=None)  # for the owner of the group
    if secret is not None:
        parallel = msgspec.structs.replace(parallel, group_secret=secret)
    share = HostShare(ranks=len(ranks_on(check_hosts(parallel), index)), index=index)
    config = msgspec.structs.replace(group.config, front=topology.front, parallel=parallel)
    return msgspec.structs.replace(resolve(config, group=name, host=share), base=group.base)


def front_alone(topology: Topology) -> EngineConfig:
    """Return the configuration of an API server for the groups of ``topology``, which run elsewhere.

    Memory and devices of this host do not matter. Raise ConfigError.
    """
    share = HostShare(ranks=1, elsewhere=True)
    found: list[EngineConfig] = []
    # Groups of one entry of the file share their settings, so one of them is enough.
    for group in {id(group.config): group for group in topology.groups}.values():
        parallel = msgspec.structs.replace(group.config.parallel, ray_labels=None)
        config = msgspec.structs.replace(group.config, front=topology.front, parallel=parallel)
        found.append(resolve(config, group=group.name, host=share))
    roles: set[str] = {one.transfer.role for one in found}
    if not serves(roles):
        raise ConfigError(
            f"the groups cannot serve requests: {' and '.join(sorted(roles))} groups alone are not enough; "
            "list a unified group, or a prefill and a decode group"
        )
    return face(tuple(found))


def settings_of(topology: Topology, name: str) -> GroupSettings:
    """Return the settings of group ``name``, or of the first group with the same base name. Raise
    ConfigError for an unknown name."""
    groups = {group.name: group for group in topology.groups}
    if name in groups:
        return groups[name]
    for group in topology.groups:
        if group.base in bases_of(name):
            return group
    raise ConfigError(
        f"--group {name}: the file has the groups {', '.join(groups)}.{suggest(name, groups)}",
        param="--group",
    )


def bases_of(name: str) -> list[str]:
    """Return the possible base names of group ``name``: ``name`` without one to four digits at its end."""
    digits = len(name) - len(name.rstrip("0123456789"))
    return [name[:-count] for count in range(1, min(digits, 4) + 1) if count < len(name)]


# -- new settings for groups that run


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
        path.write_text(text, encoding="utf-8")
        return read_topology(path)


def _renewed(topology: Topology, old: EngineConfig) -> EngineConfig:
    """Return the configuration of the group of ``old`` in ``topology``."""
    settings = settings_of(topology, old.group)
    config = msgspec.structs.replace(settings.config, front=topology.front)
    try:
        new = _resolved(config, old)
    except ConfigError as error:
        raise ConfigError(f"group {old.group}: {error.message}", param=error.param) from error
    for what, now, then in _fixed(old, new):
        if now != then:
            raise ConfigError(
                f"group {old.group}: {what} is {now} and would be {then}; a restart cannot change this "
                "value: start another server with the file"
            )
    return msgspec.structs.replace(new, base=old.base, gpus=old.gpus)


def _resolved(config: Config, old: EngineConfig) -> EngineConfig:
    """Return ``config``, resolved with the files of ``old``: a restart downloads nothing.

    Raise ConfigError.
    """
    model = config.model
    if all(hub.is_local(name) for name in (model.model, model.tokenizer) if name is not None):
        return resolve(config, group=old.group, host=old.host)
    for field in ("model", "revision", "load_format", "tokenizer"):
        now, then = getattr(old.model, field), getattr(model, field)
        if now != then:
            flag = field.replace("_", "-")
            raise ConfigError(
                f"--{flag} is {now} and would be {then}; a restart downloads no files: start another server"
            )
    # Without a revision the hub might name a newer commit than the one that runs.
    tokenizer = None if model.tokenizer is None else old.tokenizer_path
    files = msgspec.structs.replace(model, model=old.model_path, revision=None, tokenizer=tokenizer)
    new = resolve(msgspec.structs.replace(config, model=files), group=old.group, host=old.host)
    path = new.model_path
    return msgspec.structs.replace(
        new, model=model, served_names=served_names(model, path), accepted_names=accepted_names(model, path)
    )


def _fixed(old: EngineConfig, new: EngineConfig) -> list[tuple[str, object, object]]:
    """Return (name, old value, new value) of the facts on which API servers or other groups rely."""
    return [
        ("the role", old.transfer.role, new.transfer.role),
        ("the model", old.served_names, new.served_names),
        ("the number of ranks", old.parallel.layout.ranks, new.parallel.layout.ranks),
        ("the number of replicas", old.parallel.data_parallel_size, new.parallel.data_parallel_size),
        ("the number of hosts", old.parallel.hosts, new.parallel.hosts),
        ("the device", old.device, new.device),
        ("--max-model-len", old.kv.max_model_len, new.kv.max_model_len),
        ("--enable-expert-parallel", _experts(old), _experts(new)),
    ]


def _experts(config: EngineConfig) -> bool:
    return config.parallel.enable_expert_parallel
