"""A vision tower alone, for encode groups. Only the weights of the tower are read from the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.config.families.weight_files import weight_files
from weft.config.spec import ModelSpec
from weft.layers.build import Build, pack_all
from weft.models.loader import fill, fill_randomly
from weft.models.refill import pack_changed
from weft.models.vision import make_tower
from weft.models.vision.weights import tower_weights


class TowerAlone(nn.Module):
    """A model without its text part. Parameters have the same names as in the whole model."""

    def __init__(self, spec: ModelSpec, build: Build) -> None:
        """Build the tower of ``spec``. Raises ConfigError for a model without a tower, or for unavailable
        ops."""
        super().__init__()
        if spec.vision is None:
            raise ConfigError(f"{spec.architecture} has no vision tower", param="--role")
        self.spec = spec
        self.dtype = build.dtype
        self.notes = build.notes
        self._ops = build.ops
        self.vision = make_tower(spec.vision, build)

    @property
    def varying(self) -> tuple[str, ...]:
        """Ops with batch-dependent rows, as in ``weft.models.decoder.Model``."""
        return tuple(
            sorted({f"{op} ({made.name})" for (op, _), made in self._ops.items() if not made.invariant})
        )


def load_tower(
    folder: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
    *,
    invariant: bool = False,
    files: Sequence[Path] | None = None,
    changed: set[str] | None = None,
) -> TowerAlone:
    """Return the tower of ``folder`` with its weights, ready to compute.

    With equal arguments, the weights have the same bits as those of ``weft.models.loader.load_model``, which
    also explains ``files`` and ``changed``. Raises ConfigError for a model without a tower, and for weights
    that do not fit.
    """
    model = TowerAlone(spec, Build(dtype=dtype, device=device, invariant=invariant))
    if load_format == "dummy":
        fill_randomly(model, seed)
    else:
        assert spec.vision is not None
        if files is None:
            files = weight_files(Path(folder), load_format, spec.vision.published)
        fill(model, tower_weights(spec.vision), files, spec.layers, progress, changed=changed)
    pack_all(model) if changed is None else pack_changed(model, changed)
    return model
