"""What every layer is built with: where its weights live, how they are computed with, and its rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.ops import (
    implementations,  # noqa: F401 (registers every implementation)
    torch_ops,
)
from weft.ops.registry import Implementation, choose
from weft.parallel.comm import Comm


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Dtype, device and group of a model under construction."""

    dtype: torch.dtype
    device: torch.device
    comm: Comm
    quantization: str = "none"
    """``int8``: the matrices of linear layers are kept in 8 bits; not the embedding and the head."""
    invariant: bool = False
    """Demand ops whose bits do not depend on the other rows."""
    ops: dict[tuple[str, torch.dtype], Implementation] = field(default_factory=dict)
    """What was chosen, by op and dtype."""

    def op(self, name: str, *, wide: bool = False) -> Implementation:
        """How ``name`` is computed in this model. Raises ConfigError when nothing here can."""
        dtype = self.wide if wide else self.dtype
        made = self.ops[name, dtype] = choose(name, dtype, self.device, invariant=self.invariant)
        return made

    def matrix_op(self, name: str, *, wide: bool = False) -> Implementation:
        """``op`` for a matrix that quantization applies to (wide ones are never quantized)."""
        quantized = self.quantization != "none" and not wide
        return self.op(f"{name}_{self.quantization}" if quantized else name, wide=wide)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of what is never rounded to the model's: float64 in a float64 model, else float32."""
        return torch_ops.wide(self.dtype)

    def weight(self, *shape: int, wide: bool = False) -> nn.Parameter:
        """Uninitialized memory for one weight; the loader fills it in place."""
        dtype = self.wide if wide else self.dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)


class Layer(nn.Module):
    """A module without hooks: to call it is to call ``forward``, which a step does some hundred times."""

    #: Whether ``forward`` of a feed-forward layer reads the token ids of its rows.
    reads_ids: bool = False

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class Packs(Layer, ABC):
    """A layer that hands its loaded weights to an op in the op's own layout.

    ``pack`` is called once, after loading and before the first forward; plain weights that nothing reads
    any more are dropped then, layer by layer, so that no model is in memory twice.
    """

    @abstractmethod
    def pack(self) -> None:
        """Makes the layouts that ``forward`` reads."""

    def _give(self, weight: str, op: Implementation) -> object:
        """What ``op`` takes for the parameter called ``weight``, which is dropped if it is not that."""
        plain = getattr(self, weight)
        if op.pack is None:
            return plain
        packed = op.pack(plain.data)
        setattr(self, weight, None)
        return packed
