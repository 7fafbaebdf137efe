"""Topologies: the groups of a server, each with a role and settings, plus settings common to all groups.

A topology is a YAML file, or the short form ``weft serve --prefill P --decode D``:

    model: spool-text            # any flag of an engine: the default of all groups
    front: {port: 8000}          # flags of the server
    groups:
      - {role: prefill, tp: 2}   # any flag of an engine, for this group
      - {role: decode, count: 2} # decode0 and decode1

If the file has groups with the role encode, prefill and unified groups take image embeddings from these
groups. Then only encode groups load the vision tower, unless the file states otherwise
(``language-model-only: false``).

The whole topology is checked, and every group resolved, before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.file import field_of, load_yaml, parse_values
from weft.config.flags import SETTINGS, from_values, suggest
from weft.config.foreign import unknown
from weft.config.hosts import refuse_hosts
from weft.config.resolve import RANKS_EACH_CORE, resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import Config, FrontSection, ModelSection, ParallelSection, TransferSection
from weft.types.messages import Role

log = get_logger(__name__)

MOST_GROUPS = 1024
ROLES: tuple[str, ...] = get_args(Role)
_NAME = re.compile(r"[a-z][a-z0-9-]{0,23}")
_OWN_KEYS = ("role", "count", "name")
"""Keys of a group besides the flags."""
_NOT_IN_FILES = ("prefill", "decode", "encode")
_OF_ALL = tuple(
    name
    for name in TransferSection.__struct_fields__
    if name not in ("role", "decode_watermark", "take_embeddings", "shard_embeddings")
)
"""Flags with the same value in all groups of a server.

API servers, or both ends of a transfer, depend on them.
"""
_OF_EXPERTS = ("enable_expert_parallel", "redundant_experts", "eplb_interval")
_NO_EXPERTS = {name: getattr(ParallelSection(), name) for name in _OF_EXPERTS}
_ONE_MODEL = tuple(
    name
    for name in ModelSection.__struct_fields__
    if name not in ("dtype", "max_model_len", "trust_remote_code")
)


class GroupSettings(NamedTuple):
    """Unresolved settings of one group. The role is ``config.transfer.role``."""

    name: str
    config: Config
    base: str = ""
    """Name without the number: ``decode`` for ``decode0``."""


class Topology(NamedTuple):
    """Unresolved settings of a server."""

    front: FrontSection
    groups: tuple[GroupSettings, ...]


def short_form(config: Config, towers: bool = False) -> Topology | None:
    """Return the topology of ``weft serve --prefill P --decode D --encode E``.

    With E alone, the topology has one unified group besides the encode groups. Return None for a server of
    one group. Return None also if only one of P and D is given: ``resolve`` refuses that combination.
    ``towers``: True if prefill and unified groups load the vision tower despite encode groups.

    Raise ConfigError if ``--role`` is given.
    """
    section = config.transfer
    if section.role != "unified":
        raise ConfigError(
            f"--role {section.role} applies to a single group: use --prefill P --decode D --encode E "
            "for groups of each role, or a topology file (weft up FILE)",
            param="--role",
        )
    if bool(section.prefill) != bool(section.decode) or not (section.prefill or section.encode):
        return None
    numbers = {"prefill": section.prefill, "decode": section.decode, "unified": int(not section.prefill)}
    groups: list[GroupSettings] = []
    for role, count in (*numbers.items(), ("encode", section.encode)):
        one = _with_role(config, role)
        if section.encode:
            computes = role in ("prefill", "unified")
            one = _with_images(one, tower=role == "encode" or (towers and computes), takes=computes)
        # Names count within a role: prefill0, prefill1, decode0, ..
        groups += [GroupSettings(f"{role}{number}", one, role) for number in range(count)]
    return Topology(config.front, tuple(groups))


def read_topology(path: str | Path, front: Mapping[str, Any] | None = None) -> Topology:
    """Return the topology of a YAML file. ``front``: field values that override the file's front settings.

    Raise ConfigError with the file and the key if the file cannot be read, a key is unknown, duplicate or
    misplaced, or a value is wrong.
    """
    name = Path(path).name
    loaded = load_yaml(path, name, "FILE")
    if isinstance(loaded, dict) and "models" in loaded:
        raise ConfigError(f"{name} lists several models, and this command takes a topology of one model")
    if not isinstance(loaded, dict) or not isinstance(loaded.get("groups"), list) or not loaded["groups"]:
        raise ConfigError(f"{name} must be a mapping with a list of groups, e.g. groups: [{{role: unified}}]")
    common = {key: value for key, value in loaded.items() if key not in ("groups", "front")}
    check_fields(common, name, ("groups", "front"))
    defaults = parse_values(common, name, "FILE")
    return Topology(
        front_of(loaded.get("front"), name, front or {}), groups_of(loaded["groups"], defaults, name)
    )


def groups_of(entries: list[Any], defaults: Mapping[str, Any], name: str) -> tuple[GroupSettings, ...]:
    """Return the groups of a list. ``defaults``: field values of all groups. ``name``: of the list's place in
    errors. Raise ConfigError."""
    groups: list[GroupSettings] = []
    numbers = dict.fromkeys(ROLES, 0)
    # Known before the first group: the settings of all groups depend on encode groups anywhere in the file.
    encodes = any(isinstance(entry, dict) and entry.get("role") == "encode" for entry in entries)
    for number, entry in enumerate(entries):
        groups += _groups(entry, f"{name}: groups[{number}]", defaults, numbers, encodes)
    if len(groups) > MOST_GROUPS:
        raise ConfigError(f"{name}: {len(groups)} groups are more than the maximum of {MOST_GROUPS}")
    names = [group.name for group in groups]
    for twice in (one for one in names if names.count(one) > 1):
        raise ConfigError(f"{name}: two groups are called {twice!r}: give one of them another name")
    return tuple(groups)


def _groups(
    entry: Any, where: str, defaults: Mapping[str, Any], numbers: dict[str, int], encodes: bool
) -> list[GroupSettings]:
    """Return the groups of one entry. Raise ConfigError.

    ``numbers``: number of earlier groups per role; updated. ``encodes``: True if the server has encode
    groups.
    """
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a mapping, e.g. {{role: decode, count: 2}}")
    role = SETTINGS["role"].parse(entry.get("role", "unified"), f"{where}: role")
    count = entry.get("count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_GROUPS:
        raise ConfigError(f"{where}: count must be an integer of at least 1 and at most {MOST_GROUPS}")
    settings = {key: value for key, value in entry.items() if key not in _OWN_KEYS}
    check_fields(settings, where, _OWN_KEYS)
    own = parse_values(settings, where, "FILE")
    config = _with_role(from_values({**defaults, **own}), role)
    if encodes:
        # Common settings of images apply to groups with a choice. An encode group always has the tower, and
        # only groups that compute prompts take embeddings, unless the group's own entry says otherwise.
        said, computes = {**defaults, **own}, role in ("prefill", "unified")
        takes = (said if computes else own).get("take_embeddings", computes)
        text_only = (own if role == "encode" else said).get("language_model_only", takes or role == "decode")
        config = _with_images(config, not text_only, takes, own)
    name = entry.get("name")
    if name is None:
        first = numbers[role]
        numbers[role] += count
        return [GroupSettings(f"{role}{n}", config, role) for n in range(first, first + count)]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"{where}: name must have at most 24 characters of a-z, 0-9 and -, and begin with a letter"
        )
    return [GroupSettings(f"{name}{n}" if count > 1 else name, config, name) for n in range(count)]


def check_fields(given: Mapping[Any, Any], where: str, others: tuple[str, ...]) -> None:
    """Raise ConfigError for unknown or misplaced keys. ``others``: valid keys besides flags."""
    for key in map(str, given):
        field = field_of(key)
        setting = SETTINGS.get(field)
        if setting is None:
            known = [*others, *(one.key for one in SETTINGS.values() if one.section != "front")]
            raise ConfigError(f"{where}: unknown key {key!r}.{unknown(field.replace('_', '-'), known)}")
        # The key is a known flag. The remaining checks find flags in the wrong place.
        if setting.section == "front":
            raise ConfigError(f"{where}: {key!r} is a setting of the server: write {key!r} under front")
        if field in _NOT_IN_FILES:
            raise ConfigError(f"{where}: {key!r} is not allowed in a topology: list groups instead")
        if field == "role":
            raise ConfigError(f"{where}: role is a setting of a group: write role under groups")


def front_of(given: Any, name: str, flags: Mapping[str, Any]) -> FrontSection:
    """Return the server settings under ``front``, overridden by ``flags``. Raise ConfigError."""
    where = f"{name}: front"
    if given is not None and not isinstance(given, dict):
        raise ConfigError(f"{where} must be a mapping, e.g. {{port: 8000}}")
    known = [setting.key for setting in SETTINGS.values() if setting.section == "front"]
    for key in map(str, given or {}):
        field = field_of(key).replace("_", "-")
        if field not in known:
            raise ConfigError(f"{where}: unknown key {key!r}.{suggest(field, known)}")
    return from_values({**parse_values(given or {}, where, "FILE"), **flags}).front


def _with_role(config: Config, role: str) -> Config:
    """Return ``config`` with ``role`` and without numbers of groups."""
    transfer = msgspec.structs.replace(config.transfer, role=role, prefill=0, decode=0, encode=0)
    return msgspec.structs.replace(config, transfer=transfer)


def _with_images(config: Config, tower: bool, takes: bool, own: Collection[str] = ()) -> Config:
    """Return the settings of a group in a server with encode groups.

    ``tower``: True if the group encodes images. ``takes``: True if the group receives embeddings. ``own``:
    fields set by the group's own entry.
    """
    parallel = config.parallel
    # Common settings of experts do not apply to an encode group.
    if config.transfer.role == "encode":
        none = {name: value for name, value in _NO_EXPERTS.items() if name not in own}
        parallel = msgspec.structs.replace(parallel, **none)
    return msgspec.structs.replace(
        config,
        parallel=parallel,
        transfer=msgspec.structs.replace(config.transfer, take_embeddings=takes),
        model=msgspec.structs.replace(config.model, language_model_only=not tower),
    )


# -- from settings to configurations


def resolve_groups(topology: Topology, host: HostShare | None = None) -> tuple[EngineConfig, ...]:
    """Return the configurations of all groups, in order, each with its share of the host. ``host``: share of
    all groups together, beside other models; None for the whole host.

    Raise ConfigError with the group names if a group cannot work, two groups cannot work together, or the
    groups serve nothing.
    """
    _check_roles(topology)
    for one in topology.groups:
        refuse_hosts(one.config.parallel, f"group {one.name}: hosts")
    here = [one.config.parallel.layout.ranks for one in topology.groups]
    found: dict[int, EngineConfig] = {}
    # Resolve encode groups first: for a model without a tower their error is the clearest.
    order = sorted(range(len(here)), key=lambda number: _role(topology.groups[number]) != "encode")
    for number in order:
        name, config, base = topology.groups[number]
        before = sum(here[:number])
        share = HostShare(ranks=sum(here), first=before)
        if host is not None:
            share = HostShare(ranks=host.ranks, first=host.first + before)
        try:
            made = resolve(msgspec.structs.replace(config, front=topology.front), group=name, host=share)
            found[number] = msgspec.structs.replace(made, base=base)
        except ConfigError as error:
            raise ConfigError(f"group {name}: {error.message}", param=error.param) from error
    resolved = [found[number] for number in range(len(here))]
    check_alike(resolved)
    _check_cores(resolved)
    return tuple(resolved)


def _role(group: GroupSettings) -> Role:
    """Return the role of a group."""
    return group.config.transfer.role


def serves(roles: set[str], fallback: str = "none") -> bool:
    """Return True if groups of ``roles`` can serve a request. ``fallback``: see ``--prefill-fallback``."""
    return "unified" in roles or ("decode" in roles and ("prefill" in roles or fallback == "local"))


def face(groups: tuple[EngineConfig, ...]) -> EngineConfig:
    """Return the configuration that API servers use: the first group that ends sequences, with the common
    limits.

    The result takes images (``spec.vision``) if a prefill or unified group can have images encoded.
    """
    first = next(group for group in groups if group.transfer.role not in ("prefill", "encode"))
    replace = msgspec.structs.replace
    images = [group.spec.vision for group in groups if _takes_images(group)]
    first = replace(first, spec=replace(first.spec, vision=images[0] if images else None))
    if len(groups) == 1:
        return first
    tokens = [group for group in groups if group.transfer.role != "encode"]
    # Timeouts take the maximum and lengths the minimum over the groups: both must hold for every group.
    timeout = max(group.parallel.rank_timeout for group in groups)
    together = all(group.parallel.enable_expert_parallel for group in tokens)
    length = min(group.kv.max_model_len for group in tokens)
    parallel = replace(first.parallel, rank_timeout=timeout, enable_expert_parallel=together)
    return replace(first, parallel=parallel, kv=replace(first.kv, max_model_len=length))


def _takes_images(group: EngineConfig) -> bool:
    """Return True if the group computes prompts with images, encoded in the group or by other groups."""
    media = group.kv.media
    return (
        group.transfer.role in ("prefill", "unified") and media is not None and (media.tower or media.takes)
    )


def _check_roles(topology: Topology) -> None:
    """Raise ConfigError if the roles of the groups cannot serve a request."""
    roles: set[str] = {_role(group) for group in topology.groups}
    if roles == {"encode"}:
        raise ConfigError(
            "the groups cannot serve requests: encode groups need a unified group, or a prefill and a "
            "decode group"
        )
    if not serves(roles):
        lacks = "decode" if "prefill" in roles else "prefill"
        has = "prefill" if lacks == "decode" else "decode"
        raise ConfigError(
            f"the groups cannot serve requests: groups with role {has} need at least one group with "
            f"role {lacks}, or a unified group"
        )


def check_alike(groups: list[EngineConfig]) -> None:
    """Raise ConfigError unless the groups can take over each other's sequences.

    Encode groups must be able to encode the other groups' images.
    """
    first = next(group for group in groups if group.transfer.role != "encode")
    for other in groups:
        for flag, one, two in _facts(first, other):
            if one != two:
                raise ConfigError(
                    f"groups {first.group} and {other.group} can never work together: {flag} is {one} in "
                    f"{first.group} and {two} in {other.group}",
                    param=flag,
                )
        if _model(first, other) != _model(other, first):
            raise ConfigError(
                f"groups {first.group} and {other.group} can never work together: their models or caches "
                "differ",
                param="--model",
            )


def _model(one: EngineConfig, other: EngineConfig) -> object:
    """Return the part of the model spec on which the two groups must agree.

    With an encode group: the vision spec. With a decode group: everything except the vision spec.
    """
    roles = (one.transfer.role, other.transfer.role)
    if "encode" in roles:
        return one.spec.vision
    return msgspec.structs.replace(one.spec, vision=None) if "decode" in roles else one.spec


def _facts(one: EngineConfig, other: EngineConfig) -> list[tuple[str, object, object]]:
    """Return (flag, value of ``one``, value of ``other``) of all settings that must be equal."""
    found: list[tuple[str, object, object]] = []
    takes = one.transfer.take_embeddings or other.transfer.take_embeddings
    apart = takes or not {"decode", "encode"}.isdisjoint((one.transfer.role, other.transfer.role))
    for sections, names in (
        ((one.model, other.model), _ONE_MODEL),
        ((one.transfer, other.transfer), _OF_ALL),
    ):
        for name in names:
            # Decode groups, encode groups and takers of embeddings differ by design in the tower.
            if name == "language_model_only" and apart:
                continue
            found.append((SETTINGS[name].flag, getattr(sections[0], name), getattr(sections[1], name)))
    found.append(("--dtype", one.dtype, other.dtype))
    if other.transfer.role == "encode":  # an encode group has no caches
        return found
    found.append(("--kv-cache-dtype", one.cache.kv_cache_dtype, other.cache.kv_cache_dtype))
    methods = one.speculation.speculative_method, other.speculation.speculative_method
    if {"mtp", "draft", "eagle3"}.intersection(methods):  # both have a cache; n-grams have none
        found.append(("--speculative-method", *methods))
    return found


def _check_cores(groups: list[EngineConfig]) -> None:
    """Check CPU cores like ``resolve.check_cores``, over all groups: warn above one rank per core, raise
    ConfigError above ``RANKS_EACH_CORE``."""
    ranks, cores = groups[0].host.ranks, usable_cores()
    if ranks <= cores or all(group.device != "cpu" for group in groups):
        return
    if ranks > RANKS_EACH_CORE * cores:
        raise ConfigError(
            f"{ranks} ranks of {len(groups)} groups are too many for the {cores} CPU cores of this "
            f"process (at most {RANKS_EACH_CORE} ranks per core): start fewer or smaller groups"
        )
    log.warning(
        "%d ranks of %d groups, with at least one thread each, share %d CPU cores", ranks, len(groups), cores
    )
