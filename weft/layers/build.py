"""What every layer is built with: where its weights live, how they are computed with, and its rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft.common.allocator import trim_heap
from weft.config import sharding
from weft.config.spec import ModelSpec
from weft.layers.held import allow_codes, in_place, largest_in_place, take_mixed
from weft.layers.shard import Shard, keep_largest, mark, round_whole
from weft.ops import (
    coded,
    implementations,  # noqa: F401 (registers every implementation)
    torch_ops,
)
from weft.ops.registry import Implementation, choose
from weft.parallel.comm import Comm, Pending, reduced
from weft.parallel.mesh import Mesh
from weft.types.exchange import UNAGREED, Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """How ranks divide experts, where they do; see ``ParallelSection``."""

    dispatch: str = "auto"
    redundant: int = 0
    """Places for further copies of experts, in each layer."""
    counts: bool = False
    """Whether tokens of each expert are counted, to move experts by."""

    @property
    def moving(self) -> bool:
        """Whether two tokens with one expert may find it on different ranks."""
        return self.counts or self.redundant > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Dtype, device and group of a model under construction."""

    dtype: torch.dtype
    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    quantization: str = "none"
    """Other than ``none``: matrices of linear layers are rounded to it, and heads to 8 bits."""
    staged: bool = False
    """Whether matrices wait on the host until their layers pack them: they are larger than what is packed."""
    invariant: bool = False
    """Demand ops whose bits do not depend on the other rows."""
    experts: ExpertOptions = ExpertOptions()
    ops: dict[tuple[str, torch.dtype], Implementation] = field(default_factory=dict)
    """What was chosen, by op and dtype."""

    @property
    def comm(self) -> Comm:
        """Over which partials are summed."""
        return self.mesh.tp

    @property
    def divides_experts(self) -> bool:
        """Whether each rank of a domain of several has some experts, whole."""
        return self.mesh.ep.size > 1

    def op(self, name: str, *, wide: bool = False) -> Implementation:
        """How ``name`` is computed in this model. Raises ConfigError when nothing here can."""
        dtype = self.wide if wide else self.dtype
        result = self.ops[name, dtype] = choose(name, dtype, self.device, invariant=self.invariant)
        return result

    def matrix_op(self, name: str, *, wide: bool = False, divided: int = 0) -> Implementation:
        """``op`` for a matrix that quantization applies to (wide ones are never quantized).

        ``divided``: of one whose inputs ranks divide, how many all have. What is rounded to 8 bits may not
        depend on how many ranks there are: so whole rows of these are not, nor parts that ranks may cut.
        """
        kind = self._kind(divided)
        return self.op(name if kind == "none" or wide else f"{name}_{kind}", wide=wide)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of what is never rounded to the model's: float64 in a float64 model, else float32."""
        return torch_ops.wide(self.dtype)

    def part(self, size: int) -> Shard:
        """This rank's share of ``size`` heads, columns and the like."""
        return Shard((sharding.share(size, self.comm.rank, self.comm.size),), size)

    def kv_part(self, heads: int) -> Shard:
        """This rank's share of KV heads: at least one, which other ranks may have too."""
        return Shard((sharding.share_of_kv(heads, self.comm.rank, self.comm.size),), heads)

    def local(self, spec: ModelSpec) -> ModelSpec:
        """``spec`` as this rank computes it. Raises ConfigError where it does not divide."""
        return sharding.local_spec(spec, self.mesh.layout)

    def weight(
        self,
        *shape: int,
        shard: Shard | None = None,
        wide: bool = False,
        device: torch.device | None = None,
    ) -> nn.Parameter:
        """Uninitialized memory for one weight of a local ``shape``; the loader fills it in place.

        shard: what part of the global weight it is; by default all. device: other than the model's.
        """
        memory = torch.empty(shape, dtype=self.wide if wide else self.dtype, device=device or self.device)
        parameter = nn.Parameter(memory, requires_grad=False)
        if shard is not None and not shard.whole:
            assert shape[shard.dim] >= shard.count
            parameter.data.narrow(shard.dim, shard.count, shape[shard.dim] - shard.count).zero_()
            mark(parameter, shard)
            if not wide and 0 < shard.dim == len(shape) - 1 and self._kind(shard.size) == "int8":
                keep_largest(parameter, self.wide)
        return parameter

    def matrix(self, *shape: int, shard: Shard | None = None, wide: bool = False) -> nn.Parameter:
        """``weight`` for a matrix, or a stack of them, that may be loaded as codes: ``Packs._give`` takes
        it.
        """
        if wide:
            return self.weight(*shape, shard=shard, wide=wide)
        where = torch.device("cpu") if self.staged else self.device
        made = allow_codes(self.weight(*shape, shard=shard, device=where), self.device)
        if shard is not None and not shard.whole and shard.dim == len(shape) - 1:
            rounds = coded.GROUPED.get(self._kind(shard.size))
            if rounds is not None:
                round_whole(made, rounds)
        return made

    def rounds_inner(self, divided: int) -> bool:
        """Whether w4a8 rounds rows of ``divided`` inputs, which ranks may divide."""
        return self._kind(divided) == "w4a8"

    def _kind(self, divided: int) -> str:
        """The kind of quantization of a matrix; ``divided``: see ``matrix_op``."""
        if self.quantization == "w8a8" and divided:
            return "int8"
        return "int4" if self.quantization == "w4a8" and divided % coded.UNCUT else self.quantization


class Layer(nn.Module):
    """A module without hooks: to call it is to call ``forward``, which a step does some hundred times."""

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class FeedForward(Layer):
    """What follows attention in a block: of [T, hidden] a partial, which ranks sum."""

    reads_ids: bool = False
    """Whether it reads the token ids of its rows."""

    def steps(
        self, comm: Comm, x: torch.Tensor, ids: torch.Tensor | None, exchange: Exchange = UNAGREED
    ) -> Generator[Pending, None, torch.Tensor]:
        """What the block adds to its stream, [T, hidden]; yields once for each collective.

        x: [T, hidden]; ids: int64 [T], the tokens of its rows, where ``reads_ids``; comm: sums partials;
        exchange: what ranks agreed on for rows that go to other ranks.
        """
        return (yield from reduced(comm, self.forward(x, ids)))


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
        codes = take_mixed(plain, op.pack_codes is not None, mixes=op.mixes)
        if codes is not None and op.pack_codes is not None:
            setattr(self, weight, None)
            return op.pack_codes(codes)
        largest = largest_in_place(plain)
        plain = in_place(plain)
        if op.pack is None:
            setattr(self, weight, plain)
            return plain
        packed = op.pack(plain.data) if largest is None else op.pack(plain.data, largest)
        setattr(self, weight, None)
        return packed


def pack_all(model: nn.Module) -> None:
    """Packs every layer of ``model``, in order of definition: an embedding before the head tied to it.

    What a layer's weights were loaded in goes back to the system, of which the C library would keep a part.
    """
    for module in model.modules():
        if isinstance(module, Packs):
            module.pack()
            trim_heap()
