"""Filling parameters from published tensors, plain or quantized, one weight at a time."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.spec import QuantizedSpec
from weft.models.files import WeightFile
from weft.models.quantized.readers import Lacks, read
from weft.models.quantized.scales import Misfit
from weft.models.quantized.sources import Part, Source, names_of
from weft.models.weights import WeightMap

Tensor = torch.Tensor

_log = get_logger(__name__)


def is_zero_bias(part: Part, sources: Mapping[str, Source]) -> bool:
    """Whether ``part``, which the model lacks, is a bias of zeros that quantization tools write.

    Raises ConfigError where it is such a bias and not zero.
    """
    weight = sources.get(f"{part.name.removesuffix('.bias')}.weight")
    if not part.name.endswith(".bias") or weight is None or "qweight" not in weight.parts:
        return False
    with WeightFile(part.path) as file:
        if file.tensor(part.name).count_nonzero():
            raise ConfigError(
                f"weight {part.name} is not zero, and config.json says that there is no such bias",
                param="--model",
            )
    return True


@dataclass(slots=True)
class Target:
    """A model's parameters, where they come from, and what was read into them."""

    weights: WeightMap
    parameters: Mapping[str, nn.Parameter]
    quantized: QuantizedSpec | None
    wide: torch.dtype
    """What scales are applied in."""
    counts: Counter[str] = field(default_factory=Counter)
    """Quantized weights by format."""
    published: int = 0
    """Bytes of them in the files."""
    held: int = 0
    """Bytes that they take in memory."""

    def fill(self, source: Source, file: WeightFile) -> None:
        """Copies ``source`` into its part of a parameter. ``file``: the open file at ``source.path``.

        Raises ConfigError that names the weight, and a part that is missing or does not fit.
        """
        parts = {role: _read(part, source, file) for role, part in source.parts.items()}
        try:
            form, pieces = read(parts, self.quantized, self.wide)
            size = 0
            for piece in pieces:
                size += copy(source.name, piece.values, self.weights, self.parameters, piece.index)
            expected = self._bytes(source.name)
            if size != expected:
                raise Misfit(f"they make {size} bytes, config.json says {expected}")
        except Lacks as error:
            names = " or ".join(names_of(source.name, error.role))
            raise ConfigError(
                f"weight {source.name} is quantized and lacks {names}; its other parts are in "
                f"{source.path.name}",
                param="--model",
            ) from error
        except Misfit as error:
            raise ConfigError(
                f"the parts of weight {source.name} in {source.path.name} do not fit: {error}",
                param="--model",
            ) from error
        if form:
            self.counts[form] += 1
            self.published += sum(part.nbytes for part in parts.values())
            self.held += size

    def _bytes(self, name: str) -> int:
        placement = self.weights.placements[name]
        return self.parameters[placement.parameter].data[placement.index].nbytes

    def report(self, dtype: torch.dtype) -> None:
        """One log line, where anything was quantized."""
        if not self.counts:
            return
        formats = ", ".join(f"{count} {form}" for form, count in self.counts.items())
        _log.info(
            "quantized weights: %s; %.1f MB in the files, held as %s in %.1f MB (nothing here computes with "
            "them packed); activations are not quantized",
            formats,
            self.published / 1e6,
            str(dtype).removeprefix("torch."),
            self.held / 1e6,
        )


def _read(part: Part, source: Source, file: WeightFile) -> Tensor:
    if part.path == source.path:
        return file.tensor(part.name)
    with WeightFile(part.path) as other:
        return other.tensor(part.name)


def copy(
    name: str,
    values: Tensor,
    weights: WeightMap,
    parameters: Mapping[str, nn.Parameter],
    index: tuple[int, ...] = (),
) -> int:
    """Copies ``values`` into the part of a parameter (or matrix ``index`` of it) that ``name`` fills.

    Returns its bytes. Raises ConfigError for values of another shape, and for numbers of less than 16 bits.
    """
    placement = weights.placements[name]
    whole = parameters[placement.parameter].data[placement.index]
    target = whole[index] if not index or index[0] < len(whole) else None
    if target is not None:
        with contextlib.suppress(ValueError, IndexError, RuntimeError):  # its shape will not do either
            # A matrix of a stack is arranged as a stack of one.
            values = placement.arranged(values[None] if index else values, target.dtype)
            values = values[0] if index else values
    if target is None or values.shape != target.shape:
        shape = list(values.shape) if not index else [f"{index[0] + 1} or more", *values.shape]
        raise ConfigError(
            f"weight {name} has shape {shape}, config.json says {list(whole.shape)}", param="--model"
        )
    table = not target.is_floating_point() and not values.is_floating_point()  # of ids
    if not table and (not values.is_floating_point() or values.element_size() < 2):
        raise ConfigError(
            f"weight {name} has type {values.dtype}; quantized weights need a quantization_config in "
            "config.json",
            param="--model",
        )
    target.copy_(values)
    return target.nbytes
