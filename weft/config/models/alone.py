"""Several models whose groups run alone: the models of an API server, and the topology of one group.

    weft front FILE                     the API server of all models of FILE; no group runs here
    weft engine FILE --group decode1    one group of one model of FILE

Others start and end the engines, so a model is loaded as long as the model has engines. Settings of models
that load on demand are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config.alone import bases_of, front_alone, settings_of
from weft.config.flags import SETTINGS
from weft.config.models.several import (
    ModelSettings,
    ResolvedModel,
    check_names,
    has_models,
    read_models,
    refuse_for_several,
)
from weft.config.sections.all import FrontSection
from weft.config.topology import Topology, read_topology

_ON_DEMAND = ("models_dir", "models_memory", "models_ttl")
"""Settings of the server for models that load on demand."""
_LOADED = "engines that run alone are always loaded: remove "


def models_alone(models: Sequence[ModelSettings], section: FrontSection) -> tuple[ResolvedModel, ...]:
    """Return the models of an API server whose groups run elsewhere. ``section``: settings of the server.

    Raise ConfigError for settings of models that load on demand, for two models with a common name of a model
    or a group, and for groups that cannot serve, with the name of the model.
    """
    refuse_for_several(section)
    for field in _ON_DEMAND:
        if getattr(section, field) != SETTINGS[field].default:
            flag = SETTINGS[field].flag
            raise ConfigError(f"{flag} is for models that load on demand; {_LOADED}{flag}", param=flag)
    _check_groups(models)
    made = tuple(_resolved(model) for model in models)
    check_names(made)
    return made


def topology_of(file: str | Path, group: str) -> Topology:
    """Return the topology of the model that has ``group``, from a file of one or of several models. ``group``
    may have a number that the file does not list. Raise ConfigError for an unknown group."""
    if not has_models(file):
        return read_topology(file)
    models, section = read_models(file, {})
    _check_groups(models)
    topologies = [named_topology(model) for model in models]
    found = settings_of(Topology(section, tuple(one for each in topologies for one in each.groups)), group)
    return next(each for each in topologies if found in each.groups)


def named_topology(model: ModelSettings) -> Topology:
    """Return the topology of a model, which serves the model under its key in ``models``."""
    groups = []
    for one in model.topology.groups:
        section = msgspec.structs.replace(one.config.model, served_model_name=(model.name,))
        groups.append(one._replace(config=msgspec.structs.replace(one.config, model=section)))
    return model.topology._replace(groups=tuple(groups))


def _resolved(model: ModelSettings) -> ResolvedModel:
    """Return one model. Raise ConfigError."""
    for key, given in (
        ("load: demand", model.starts is False),
        ("ttl", model.ttl is not None),
        ("memory", model.memory is not None),
    ):
        if given:
            raise ConfigError(f"model {model.name}: {_LOADED}{key}")
    try:
        config = front_alone(named_topology(model))
    except ConfigError as error:
        raise ConfigError(f"model {model.name}: {error.message}", param=error.param) from error
    config = msgspec.structs.replace(config, accepted_names=model.aliases)
    # The memory is unknown until an engine has reported its blocks.
    return ResolvedModel(
        config, (config,), model.topology.front, cost=0, measured=True, pin=True, ttl=math.inf, starts=True
    )


def _check_groups(models: Sequence[ModelSettings]) -> None:
    """Raise ConfigError if groups of two models have a common name, or may get one with a number: engines of
    one directory have different names."""
    owners: dict[str, str] = {}
    for model in models:
        for name in dict.fromkeys(group.base or group.name for group in model.topology.groups):
            _refuse_common(name, owners.setdefault(name, model.name), model.name)
    for name, owner in owners.items():
        for base in bases_of(name):
            _refuse_common(name, owners.get(base, owner), owner)


def _refuse_common(group: str, one: str, other: str) -> None:
    """Raise ConfigError unless ``one`` and ``other`` are the same model: both may have a group ``group``."""
    if one != other:
        raise ConfigError(
            f"the models {one} and {other} may both have groups called {group!r}, and engines that run alone "
            "need different names: give the groups of one model another name (name: NAME)"
        )
