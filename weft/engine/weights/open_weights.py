"""Opens the weights of a rank: how a second model is read for an update, and experts of another placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from weft.engine.weights.rank_weights import RankWeights, Tensors
from weft.models.refill import refill, weights_of
from weft.moe.balance import ExpertLayers
from weft.moe.placement import Placement
from weft.store.weight_names import WeightNames
from weft.types.weights import WeightsUpdate


def open_weights(
    model: Any,
    rank: int,
    load: Callable[..., Any],
    caches: Callable[[], Sequence[torch.Tensor]] = tuple,
    names: WeightNames | None = None,
) -> RankWeights:
    """Return the weights of ``rank`` for ``model``, which is in use. A draft model keeps its weights.

    ``load``: returns another model of the rank, with ``files``, ``changed`` and, for divided experts,
    ``placements`` as ``load_model``; without ``files`` with the weights of the start. For ``caches`` and
    ``names`` see ``RankWeights``.
    """
    target = getattr(model, "target", model)
    experts: ExpertLayers | None = getattr(target, "experts", None)

    def places() -> tuple[Placement, ...] | None:
        return None if experts is None else experts.placements

    def model_of(
        update: WeightsUpdate | None, changed: set[str] | None, placed: Sequence[Placement] | None
    ) -> Any:
        """Return a model with the weights of ``update``; None: of the start."""
        more: dict[str, Any] = {} if placed is None else {"placements": placed}
        files = None if update is None else [Path(one) for one in update.files]
        return load(files=files, changed=changed, **more)

    @torch.no_grad()
    def read(update: WeightsUpdate) -> Tensors:
        changed = set[str]() if update.partial else None
        return weights_of(model_of(update, changed, places()), changed)

    adapters = getattr(target, "adapters", None)
    changed = None if adapters is None else adapters.weights_changed
    made = RankWeights(rank, lambda: weights_of(target), read, caches, names, places, changed)

    @torch.no_grad()
    def reload(placements: Sequence[Placement]) -> ExpertLayers | None:
        """Return the experts of another placement, with the weights in use."""
        first = made.updates[0] if made.updates and not made.updates[0].partial else None
        fresh = model_of(first, None, placements)
        for update in made.updates[1 if first is not None else 0 :]:
            changed = set[str]()
            part = model_of(update, changed, placements)
            refill(weights_of(fresh), weights_of(part, changed))
        found: ExpertLayers | None = fresh.experts
        return found

    if experts is not None:
        experts.reload = reload
    return made
