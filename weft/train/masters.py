"""Wide copies of the parameters of a model, and their way to and from the tensors of a checkpoint.

    optimizer ──> master (float32) ──> published tensor (dtype of the file) ──> plain parameter ──> packed
                                          └──> checkpoint folder, engine

After each change the plain parameter is filled from the published tensor, by the rules of the loader. So an
engine that loads the published tensors has the same bits.
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
    """Parameter that the ops read or pack, in the dtype of the engine."""
    value: nn.Parameter
    """Wide copy with the layout of ``plain``. The optimizer changes this copy."""
    trained: bool = True
    """False for a parameter without a gradient: the correction of expert scores, which balances load."""

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
    """The trained parameters of a model. Found by the memory of the plain parameter, because layers pass
    ``parameter.data`` to the ops."""

    def __init__(self) -> None:
        self._by_memory: dict[int, Master] = {}
        self.version = 0
        """Number of changes of the plain parameters. Packed weights of an older version are stale."""

    def adopt(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Make a master of each parameter with floating-point values."""
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
        """``weights``: names of the checkpoint in ``files``. Raises ConfigError for a tensor whose values the
        loader computes, because such a tensor cannot be written back."""
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
        # The loader arranges the numbers of the elements. Without arithmetic each number stays.
        numbers = torch.arange(tensor.numel(), dtype=torch.float64).view(tensor.shape)
        arranged = replace(placement, offset=0.0).arranged(numbers, torch.float64)
        order = arranged.flatten().long()
        if not torch.equal(order.double().sort().values, numbers.flatten()):
            raise ConfigError(f"this model cannot be trained: the loader computes {name}", param="--model")
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
