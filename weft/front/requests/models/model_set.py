"""The models of a server for an API server, from resolved settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weft.config.models.several import ResolvedModel, memory_budget
from weft.config.sections.all import FrontSection
from weft.control.models import ModelFacts
from weft.front.requests.models.named_model import KeyModels, split_keys
from weft.front.requests.models.several_models import ModelPlan, ModelProcesses, ModelSet

if TYPE_CHECKING:
    from weft.front.requests.models.shared_models import ModelHub


def facts(model: ResolvedModel) -> ModelFacts:
    """Return the settings of a model for the table of models."""
    return ModelFacts(model.name, model.cost, model.pin, model.ttl, model.starts)


def model_set(
    models: Sequence[ResolvedModel],
    engines: Sequence[ModelProcesses] | None,
    front: FrontSection,
    hub: ModelHub | None,
) -> tuple[FrontSection, ModelSet]:
    """Return (settings of the server with plain keys, the models for the API server). ``engines``: None if
    another process owns the engines, which ``hub`` reaches."""
    names = {
        name: model.name
        for model in models
        for name in (*model.config.served_names, *model.config.accepted_names)
    }
    keys, of_key = split_keys(front.api_key, names)
    section = msgspec.structs.replace(front, api_key=keys)
    owned: Sequence[ModelProcesses | None] = [None] * len(models) if engines is None else engines
    plans = tuple(
        ModelPlan(
            model.config,
            model.groups,
            msgspec.structs.replace(model.section, api_key=keys),
            facts(model),
            processes,
            model.measured,
        )
        for model, processes in zip(models, owned, strict=True)
    )
    return section, ModelSet(plans, memory_budget(front), KeyModels(of_key), hub)
