"""Master weights: copies of the parameters in a wide dtype (at least float32), and the checkpoint tensors.

    optimizer ──> master (float32) ──> published tensor (dtype of the file) ──> plain parameter ──> packed
                                          └──> checkpoint folder, engine

After each change, the plain parameter is filled from the published tensor, as the loader does. An engine that
loads the published tensors therefore has the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from weft.common.errors import ConfigError
from weft.models.files import WeightFile
from weft.models.weights import Placement, WeightMap
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Master:
    """One parameter of a model, in two precisions."""

    name: str
    """Name of the parameter in the model, e.g. ``blocks.0.attention.qkv.weight``."""
    plain: nn.Parameter
    """The parameter of the model, in the dtype of the engine. Ops read or pack this parameter."""
    value: nn.Parameter
    """Wide copy with the layout of ``plain``. The optimizer changes this copy."""
    trained: bool = True
    """False for the bias of expert scores (``router.correction``), which has no gradient."""

    def gather(self) -> None:
        """Add the gradient of ``plain`` to the gradient of ``value``. Clears the gradient of ``plain``.

        Ops give gradients to ``value``. Code outside of the ops gives gradients to ``plain``.
        """
        if self.plain.grad is None:
            return
        own = self.plain.grad.to(self.value.dtype)
        self.value.grad = own if self.value.grad is None else self.value.grad.add_(own)
        self.plain.grad = None


class Masters:
    """The master weights of a model, found by the memory address of the plain parameter: layers pass
    ``parameter.data`` to the ops, not the parameter."""

    def __init__(self) -> None:
        self._by_memory: dict[int, Master] = {}
        self.version = 0
        """Number of changes of the plain parameters. Packed weights of older versions are stale."""

    def add(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Add a master of each floating-point parameter."""
        for name, parameter in parameters:
            if parameter.is_floating_point() and parameter.numel():
                copy = parameter.detach().to(wide(parameter.dtype), copy=True)
                trained = not name.endswith(".router.correction")
                master = Master(name, parameter, nn.Parameter(copy, requires_grad=trained), trained)
                self._by_memory[parameter.data_ptr()] = master

    def __iter__(self) -> Iterator[Master]:
        return iter(self._by_memory.values())

    def of(self, tensor: Tensor | None) -> Master | None:
        """Return the master of a parameter or its ``data``; None for any other tensor."""
        if tensor is None:
            return None
        found = self._by_memory.get(tensor.data_ptr())
        return found if found is not None and found.plain.shape == tensor.shape else None


@dataclass(frozen=True, slots=True)
class _Part:
    """One published tensor as a part of a master."""

    master: Master
    placement: Placement
    shape: tuple[int, ...]
    dtype: torch.dtype
    """Dtype in the checkpoint."""
    order: Tensor | None
    """int64: index in the published tensor of each element of the part; None for the same order."""


class Published:
    """The tensors of a checkpoint, read from and written to masters."""

    def __init__(self, masters: Masters, weights: WeightMap, files: Sequence[Path]) -> None:
        """``weights``: placements of the tensors in ``files``. Raises ConfigError for a tensor that the
        loader changes by arithmetic, because such a tensor cannot be written back."""
        self._masters = masters
        by_name = {master.name: master for master in masters}
        self._parts: dict[str, _Part] = {}
        for path in files:
            with WeightFile(path) as file:
                for name in file.names():
                    placement = weights.placements.get(name)
                    if placement is not None and placement.parameter in by_name:
                        tensor = file.tensor(name)
                        self._parts[name] = _part(name, by_name[placement.parameter], placement, tensor)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each published tensor, in the dtype of the checkpoint."""
        for name, part in self._parts.items():
            yield name, _published(part, part.master.value.detach(), part.placement.offset).to(part.dtype)

    def gradients(self) -> Mapping[str, Tensor]:
        """Return the gradients of the masters under the published names, in the dtype of the masters."""
        found = {}
        for name, part in self._parts.items():
            gradient = part.master.value.grad
            if gradient is not None:
                found[name] = _published(part, gradient, 0.0)
        return found

    @torch.no_grad()
    def apply(self) -> None:
        """Fill the plain parameters from the published tensors, as the loader does."""
        for name, tensor in self.tensors():
            part = self._parts[name]
            plain = part.master.plain
            plain[part.placement.index] = part.placement.arranged(tensor, plain.dtype).to(plain.dtype)
        self._masters.version += 1


def _part(name: str, master: Master, placement: Placement, tensor: Tensor) -> _Part:
    """Return the part of ``master`` that the published ``tensor`` fills. Raises ConfigError."""
    order = None
    if placement.parts or placement.read is not None:
        # Run the loader on element numbers. The loader only moves elements if all numbers come back.
        numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
        arranged = replace(placement, offset=0.0).arranged(numbers, torch.float64)
        order = arranged.flatten().long()
        if not torch.equal(order.double().sort().values, numbers.flatten()):
            raise ConfigError(
                f"this model cannot be trained: the loader changes values of {name}", param="--model"
            )
    return _Part(master, placement, tuple(tensor.shape), tensor.dtype, order)


def _published(part: _Part, values: Tensor, offset: float) -> Tensor:
    """Return the published tensor of ``values``, which has the layout of the master. No memory is shared."""
    own = values[part.placement.index]
    own = own - offset if offset else own.clone()
    if part.order is None:
        return own.reshape(part.shape)
    made = torch.empty_like(own.flatten())
    made[part.order] = own.flatten()
    return made.view(part.shape)
