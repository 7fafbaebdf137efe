"""Several models behind one server: the settings of each model, from a topology file or a command line.

    weft serve A B C              each model with the same flags
    weft serve --models-dir DIR   each subfolder with config.json, and each GGUF file, is a model
    weft up FILE                  `models:` in FILE, each with its own flags:

    front: {port: 8000, models-memory: 8G}
    max-num-seqs: 8               # flags of all models
    models:
      small: {model: spool-text, pin: true, load: start}
      large: {model: /models/large, aliases: [big], ttl: 600, groups: [{role: prefill}, {role: decode}]}

Each model resolves as a server of its own. All models are checked before anything starts.
"""

from __future__ import annotations

import math
import os.path
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from weft.common.cores import usable_cores
from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.common.log import get_logger
from weft.config.file import field_of, load_yaml, parse_values
from weft.config.flags import SETTINGS, parse_size
from weft.config.resolve import RANKS_EACH_CORE, resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.scripted_config import resolve_scripted
from weft.config.sections.all import Config, FrontSection
from weft.config.sizing.model_cost import model_cost
from weft.config.topology import (
    GroupSettings,
    Topology,
    check_fields,
    face,
    front_of,
    groups_of,
    resolve_groups,
    short_form,
)

log = get_logger(__name__)

MOST_MODELS = 256
TEXT_KEYS = (
    "chat_template",
    "generation_config",
    "tool_call_parser",
    "reasoning_parser",
    "default_chat_template_kwargs",
    "pooling",
    "scripted",
)
"""Settings of the server that each model may have for itself."""
_OWN = ("aliases", "pin", "ttl", "load", "memory", "groups")
"""Keys of a model besides flags."""
_NOT_SLUG = re.compile(r"[^a-z0-9-]+")


class ModelSettings(NamedTuple):
    """Unresolved settings of one model."""

    topology: Topology
    """Groups of the model, and the settings of the server with the text settings of the model."""
    name: str = ""
    """Name for requests; "" for the name of the checkpoint."""
    aliases: tuple[str, ...] = ()
    """Further names for requests, which /v1/models does not list."""
    pin: bool = False
    ttl: float | None = None
    """Seconds without a request until the unload; None for ``--models-ttl``."""
    starts: bool | None = None
    """True: load at the start. False: load on demand. None: at the start without ``--models-memory``."""
    memory: int | None = None
    """Bytes of memory while the model is loaded; None for an estimate."""


class ResolvedModel(NamedTuple):
    """One model, ready to start."""

    config: EngineConfig
    """Settings for API servers."""
    groups: tuple[EngineConfig, ...]
    section: FrontSection
    cost: int
    """Bytes of memory while the model is loaded."""
    measured: bool
    """True: the engines' report replaces ``cost``."""
    pin: bool
    ttl: float
    starts: bool

    @property
    def name(self) -> str:
        return self.config.served_names[0]


# -- from files and command lines to settings


def has_models(path: str | Path) -> bool:
    """Return True if the topology file lists models. Raise ConfigError for a file that cannot be read."""
    loaded = load_yaml(path, Path(path).name, "FILE")
    return isinstance(loaded, dict) and "models" in loaded


def read_models(path: str | Path, front: Mapping[str, Any]) -> tuple[list[ModelSettings], FrontSection]:
    """Return the models of a topology file, and the settings of the server. ``front``: field values that
    override the file's front settings. Raise ConfigError with the file and the key."""
    name = Path(path).name
    loaded = load_yaml(path, name, "FILE")
    models = loaded["models"]
    if not isinstance(models, dict) or not models:
        raise ConfigError(f"{name}: models must be a mapping, e.g. models: {{small: {{model: spool-text}}}}")
    if len(models) > MOST_MODELS:
        raise ConfigError(f"{name}: {len(models)} models are more than the maximum of {MOST_MODELS}")
    if "groups" in loaded:
        raise ConfigError(f"{name}: write groups under each model, not beside models")
    common = {key: value for key, value in loaded.items() if key not in ("models", "front")}
    check_fields(common, name, ("models", "front"))
    defaults = parse_values(common, name, "FILE")
    section = front_of(loaded.get("front"), name, front)
    return [
        _model(str(key), entry, f"{name}: models: {key}", defaults, section) for key, entry in models.items()
    ], section


def _model(
    name: str, entry: Any, where: str, defaults: Mapping[str, Any], section: FrontSection
) -> ModelSettings:
    """Return the settings of one entry of ``models``. Raise ConfigError."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a mapping, e.g. {{model: spool-text}}")
    flags = {key: value for key, value in entry.items() if key not in _OWN}
    text = {key: value for key, value in flags.items() if field_of(str(key)) in TEXT_KEYS}
    own = {key: value for key, value in flags.items() if key not in text}
    check_fields(own, where, (*_OWN, *TEXT_KEYS))
    if any(field_of(str(key)) == "served_model_name" for key in own):
        raise ConfigError(f"{where}: the key of the model is its name: give further names as aliases")
    values = {**defaults, **parse_values(own, where, "FILE")}
    front = msgspec.structs.replace(section, **parse_values(text, where, "FILE"))
    groups = _entries(entry, name)
    if not isinstance(groups, list) or not groups:
        raise ConfigError(f"{where}: groups must be a list, e.g. [{{role: unified}}]")
    pin, load, ttl = entry.get("pin", False), entry.get("load"), entry.get("ttl")
    aliases = entry.get("aliases", [])
    if not isinstance(pin, bool):
        raise ConfigError(f"{where}: pin must be true or false")
    if load not in (None, "start", "demand"):
        raise ConfigError(f"{where}: load must be start or demand")
    if ttl is not None and (isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not 0 < ttl <= 1e9):
        raise ConfigError(f"{where}: ttl must be a number of seconds above 0, and at most 1e9")
    if not isinstance(aliases, list) or not all(isinstance(one, str) and one for one in aliases):
        raise ConfigError(f"{where}: aliases must be a list of names, e.g. [small, default]")
    memory = parse_size(entry.get("memory"))
    if memory is None and entry.get("memory") is not None:
        raise ConfigError(f"{where}: memory must be a size, e.g. 3G")
    return ModelSettings(
        Topology(front, groups_of(groups, values, where)),
        name,
        tuple(aliases),
        pin,
        None if ttl is None else float(ttl),
        None if load is None else load == "start",
        memory,
    )


def _entries(entry: Mapping[str, Any], name: str) -> Any:
    """Return the list of groups of an entry of ``models``. ``name``: of the model."""
    return entry.get("groups", [{"role": "unified", "name": slug(name)}])


def of_one_model(loaded: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the topology of the groups of one model, in the form of a topology file. ``loaded``: content of
    a file that ``read_models`` accepts. Settings of the server are left out."""
    entry = next(one for key, one in loaded["models"].items() if str(key) == name)
    without = {"models", "front", *_OWN}
    # The same spelling of all flags, so that the flags of the model win.
    flags = {field_of(str(key)): value for part in (loaded, entry) for key, value in part.items()}
    flags = {key: value for key, value in flags.items() if key not in without and key not in TEXT_KEYS}
    return {**flags, "served_model_name": [name], "groups": _entries(entry, name)}


def from_command_line(
    config: Config, models: Sequence[str], towers: bool = False
) -> tuple[list[ModelSettings], list[ModelSettings]]:
    """Return the settings of ``weft serve`` with several models: of the named models, and of the models in
    ``--models-dir``. ``towers``: see ``short_form``. Raise ConfigError."""
    if config.model.served_model_name:
        raise ConfigError(
            "--served-model-name is for one model; `weft up` with models: in a topology file names several",
            param="--served-model-name",
        )
    folder = config.front.models_dir
    found = [] if folder is None else in_folder(folder)
    if len(models) + len(found) > MOST_MODELS:
        raise ConfigError(f"{len(models) + len(found)} models are more than the maximum of {MOST_MODELS}")
    return [_alike(config, one, towers) for one in models], [_alike(config, one, towers) for one in found]


def _alike(config: Config, model: str, towers: bool) -> ModelSettings:
    """Return the settings of one model of a command line."""
    own = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=model))
    short = slug(Path(model).stem if model.endswith(".gguf") else Path(model).name)
    topology = short_form(own, towers=towers)
    return ModelSettings(topology or Topology(own.front, (GroupSettings(short, own, short),)))


def in_folder(folder: str) -> list[str]:
    """Return the paths of the models in a folder, sorted: subfolders with config.json, and GGUF files. Of a
    model in several GGUF files, the first counts; files of vision towers do not. Raise ConfigError."""
    flag = "--models-dir"
    try:
        entries = sorted(expanded(folder).iterdir())
    except OSError as error:
        raise ConfigError(f"{flag} {folder}: {error.strerror}", param=flag) from error
    found = []
    for entry in entries:
        part = re.search(r"-(\d{5})-of-\d{5}\.gguf$", entry.name)
        is_file = entry.suffix == ".gguf" and not entry.name.startswith("mmproj")
        # ``isfile`` is False for a folder without permission, such as lost+found at the root of a disk.
        if os.path.isfile(entry / "config.json") or (is_file and (part is None or int(part[1]) == 1)):
            found.append(str(entry))
    if not found:
        raise ConfigError(f"{flag} {folder} has no subfolder with config.json, and no GGUF file", param=flag)
    return found


def slug(name: str) -> str:
    """Return a name for the group of a model: ``qwen3-0-6b``."""
    made = _NOT_SLUG.sub("-", name.lower()).strip("-")[:24]
    return made if made[:1].isalpha() else f"m-{made}"[:24]


# -- from settings to configurations


def resolve_models(
    models: Sequence[ModelSettings], section: FrontSection, optional: Sequence[ModelSettings] = ()
) -> tuple[ResolvedModel, ...]:
    """Return all models, ready to start. ``optional``: models that are skipped, with a warning, if their
    files cannot be used.

    Models that load at the start share cores and memory with each other, and with the largest model that
    loads on demand. Raise ConfigError with the name of the model.
    """
    refuse_for_several(section)
    together = [*models, *optional]
    starts = [_starts(one, section) for one in together]
    ranks = [sum(g.config.parallel.layout.ranks for g in one.topology.groups) for one in together]
    always = sum(count for count, early in zip(ranks, starts, strict=True) if early)
    total = always + max((n for n, early in zip(ranks, starts, strict=True) if not early), default=0)
    _check_cores(together, total)
    found: list[ResolvedModel] = []
    first = 0
    for number, (one, early) in enumerate(zip(together, starts, strict=True)):
        share = HostShare(ranks=total, first=first if early else always)
        try:
            found.append(_resolved(one, section, share, early))
        except ConfigError as error:
            what = one.name or one.topology.groups[0].config.model.model
            if number < len(models):
                raise ConfigError(f"model {what}: {error.message}", param=error.param) from error
            log.warning("the model %s of --models-dir is skipped: %s", what, error.message)
            continue
        first += ranks[number] if early else 0
    if not found:
        raise ConfigError("no model of --models-dir can be used", param="--models-dir")
    check_names(found)
    _check_memory(found, section)
    return tuple(found)


def _check_cores(models: Sequence[ModelSettings], ranks: int) -> None:
    """Raise ConfigError for more ranks at once than the CPU cores can run."""
    cores = usable_cores()
    on_gpu = all(g.config.runner.device == "cuda" for one in models for g in one.topology.groups)
    if ranks > RANKS_EACH_CORE * cores and not on_gpu:
        raise ConfigError(
            f"{ranks} ranks of all models are too many for the {cores} CPU cores of this process (at most "
            f"{RANKS_EACH_CORE} ranks per core): let models load on demand (--models-memory)"
        )


def _starts(model: ModelSettings, section: FrontSection) -> bool:
    return section.models_memory is None if model.starts is None else model.starts


def _resolved(model: ModelSettings, section: FrontSection, share: HostShare, starts: bool) -> ResolvedModel:
    """Return one model. ``share``: the other models on this host. Raise ConfigError."""
    front = model.topology.front
    if front.scripted is not None:
        one = model.topology.groups[0]
        groups: tuple[EngineConfig, ...] = (
            resolve_scripted(msgspec.structs.replace(one.config, front=front)),
        )
    elif len(model.topology.groups) == 1 and model.topology.groups[0].config.transfer.role == "unified":
        one = model.topology.groups[0]
        config = msgspec.structs.replace(one.config, front=front)
        made = resolve(config, group=one.name, host=share)
        groups = (msgspec.structs.replace(made, base=one.base),)
    else:
        groups = resolve_groups(model.topology, share)
    if model.name:
        groups = tuple(_named(group, model) for group in groups)
    # An adapter that a request has loaded would be lost with the engines.
    pin = model.pin or groups[0].lora.max_loras > 0
    ttl = section.models_ttl if model.ttl is None else model.ttl
    cost, measured = model_cost(groups), model.memory is None
    cost = cost if model.memory is None else model.memory
    return ResolvedModel(face(groups), groups, front, cost, measured, pin, ttl or math.inf, starts)


def _named(group: EngineConfig, model: ModelSettings) -> EngineConfig:
    return msgspec.structs.replace(group, served_names=(model.name,), accepted_names=model.aliases)


def check_names(models: Sequence[ResolvedModel]) -> None:
    """Raise ConfigError if two models have a common name. A path that two models accept is no name."""
    seen: dict[str, str] = {}
    for model in models:
        for name in (*model.config.served_names, *model.config.accepted_names):
            if name in seen:
                raise ConfigError(
                    f"two models are called {name}: name the models in a topology file, under models:"
                )
            seen[name] = model.name


def _check_memory(models: Sequence[ResolvedModel], section: FrontSection) -> None:
    """Raise ConfigError for a model that never fits into ``--models-memory``, and if the models of the start
    do not fit together."""
    budget = memory_budget(section)
    if budget is None:
        return
    for model in models:
        if model.cost > budget:
            raise ConfigError(
                f"model {model.name} needs {model.cost / (1 << 30):.2f} GiB for weights and caches, more "
                "than --models-memory: raise --models-memory, or lower --kv-cache-memory or --max-num-seqs",
                param="--models-memory",
            )
    early = sum(model.cost for model in models if model.starts)
    if early > budget:
        raise ConfigError(
            f"the models that load at the start need {early / (1 << 30):.2f} GiB together, more than "
            "--models-memory: let some models load on demand",
            param="--models-memory",
        )


def memory_budget(section: FrontSection) -> int | None:
    """Return the bytes of ``--models-memory``; None without the flag."""
    return None if section.models_memory is None else parse_size(section.models_memory)


def refuse_for_several(section: FrontSection) -> None:
    """Raise ConfigError for flags of a server of one model."""
    for flag, given in (("--vllm-metrics", section.vllm_metrics), ("--build-ops", section.build_ops)):
        if given:
            raise ConfigError(f"{flag} is for a server of one model: remove {flag}", param=flag)


def refuse_models(section: FrontSection, what: str) -> None:
    """Raise ConfigError for flags of several models at ``what``, which has one model."""
    fields = ("models_dir", "models_memory", "models_ttl", "model_timeout")
    for field in fields:
        setting = SETTINGS[field]
        if getattr(section, field) != setting.default:
            raise ConfigError(f"{setting.flag} is for a server of several models, and not for {what}")
