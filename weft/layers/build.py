"""Settings for the construction of layers: dtype, device, ops and rank; base classes of layers."""

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
from weft.layers.pending_codes import Notes, PendingCodes, in_place, largest_in_place, take_mixed
from weft.layers.shard import Shard
from weft.ops import (
    coded,
    implementations,  # noqa: F401 (registers every implementation)
    torch_ops,
)
from weft.ops.low_rank import AdapterRows
from weft.ops.moe import Contribution
from weft.ops.registry import Implementation, choose
from weft.ops.row_routes import RowRoutes
from weft.parallel.comm import Comm, Pending, reduced
from weft.parallel.mesh import Mesh
from weft.types.exchange import UNAGREED, Exchange


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """Division of experts over ranks; see ``ParallelSection``."""

    dispatch: str = "auto"
    redundant: int = 0
    """Places for additional copies of experts, per layer."""
    counts: bool = False
    """True if tokens per expert are counted, as input for moves of experts."""

    @property
    def moving(self) -> bool:
        """True if two tokens with the same expert may find the expert on different ranks."""
        return self.counts or self.redundant > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """Memory for LoRA adapters; see ``LoraSection``."""

    places: int = 0
    """Adapters in device memory at the same time; 0 for none."""
    rank: int = 0
    """Largest rank of an adapter."""
    experts: bool = False
    """True for memory for adapters of routed experts."""
    saved: bool = False
    """True for memory for whole embeddings and output heads."""
    like_places: bool = False
    """True for the layouts of a model with places, without memory for adapters: new weights of such a model
    are read in these layouts."""

    @property
    def apart(self) -> bool:
        """True if each matrix has its own product, to which the low-rank product is added."""
        return self.like_places or self.places > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """Dtype, device and group of a model under construction."""

    dtype: torch.dtype
    device: torch.device
    mesh: Mesh = field(default_factory=Mesh)
    quantization: str = "none"
    """Rounding of the matrices of linear layers; ``none`` for plain. Heads are rounded to 8 bits."""
    staged: bool = False
    """True if matrices wait on the host until packing, because plain matrices are larger than packed ones."""
    invariant: bool = False
    """Require ops in which the bits of a row do not depend on other rows."""
    rank_counts: tuple[int, ...] = (2, 4, 8)
    """Numbers of ranks that may divide the model. Rows of x are rounded alike with all of them."""
    experts: ExpertOptions = ExpertOptions()
    adapters: AdapterOptions = AdapterOptions()
    ops: dict[tuple[str, torch.dtype], Implementation] = field(default_factory=dict)
    """Chosen implementations, by op and dtype."""
    notes: Notes = field(default_factory=Notes)
    """Notes about the parameters of the model, for the loader and for ``Packs.pack``."""

    @property
    def comm(self) -> Comm:
        """Communicator for sums of partial results."""
        return self.mesh.tp

    @property
    def divides_experts(self) -> bool:
        """True if the expert-parallel group has several ranks, and each rank has some whole experts."""
        return self.mesh.ep.size > 1

    def op(self, name: str, *, wide: bool = False) -> Implementation:
        """Return the implementation of ``name`` and note the choice. Raises ConfigError if there is none."""
        dtype = self.wide if wide else self.dtype
        result = self.ops[name, dtype] = choose(name, dtype, self.device, invariant=self.invariant)
        return result

    def same_packing(self, name: str) -> Implementation:
        """Return the implementation of the op ``name`` that reads the packing of another op's matrix. Not
        noted, because only rare steps use this op."""
        kind = self._kind(0)
        named = name if kind == "none" else f"{name}_{kind}"
        return choose(named, self.dtype, self.device, invariant=self.invariant)

    def matrix_op(self, name: str, *, wide: bool = False, divided: int = 0) -> Implementation:
        """Return ``op`` for a matrix to which quantization applies. Wide matrices are never quantized.

        ``divided`` is the total number of inputs of a matrix with inputs divided over ranks, otherwise 0.
        Rounding of x must not depend on the number of ranks. With ``divided``, w8a8 and int8 therefore round
        groups of inputs (``coded.row_group``), and w8a8-fp8 becomes fp8. Without such groups w8a8 and int8
        become int8-exact, and w4a8 and int4 become int4-exact: rows of x stay as they are.
        """
        kind = self._kind(divided)
        return self.op(name if kind == "none" or wide else f"{name}_{kind}", wide=wide)

    @property
    def wide(self) -> torch.dtype:
        """Dtype of unrounded values: float64 in a float64 model, otherwise float32."""
        return torch_ops.wide(self.dtype)

    def part(self, size: int) -> Shard:
        """Return the rank's share of ``size`` heads, columns and the like."""
        return Shard((sharding.share(size, self.comm.rank, self.comm.size),), size)

    def kv_part(self, heads: int) -> Shard:
        """Return the rank's share of KV heads: at least one head, which other ranks may share."""
        return Shard((sharding.share_of_kv(heads, self.comm.rank, self.comm.size),), heads)

    def local(self, spec: ModelSpec) -> ModelSpec:
        """Return ``spec`` with the rank's sizes. Raises ConfigError if the sizes do not divide."""
        return sharding.local_spec(spec, self.mesh.layout)

    def weight(
        self,
        *shape: int,
        shard: Shard | None = None,
        wide: bool = False,
        device: torch.device | None = None,
    ) -> nn.Parameter:
        """Return an uninitialized weight of the local ``shape``; the loader fills the memory in place.

        ``shard``: part of the global weight, by default all. Padding beyond the shard is zero. ``device``:
        default is the model's.
        """
        memory = torch.empty(shape, dtype=self.wide if wide else self.dtype, device=device or self.device)
        parameter = nn.Parameter(memory, requires_grad=False)
        if shard is not None and not shard.whole:
            assert shape[shard.dim] >= shard.count
            parameter.data.narrow(shard.dim, shard.count, shape[shard.dim] - shard.count).zero_()
            note = self.notes.weight(parameter).note
            note.shard = shard
            # A part of a row cannot give the row's scale, so the loader notes the row's maximum.
            by_row = self.quantization in ("int8", "w8a8")
            if not wide and by_row and 0 < shard.dim == len(shape) - 1:
                note.largest = torch.zeros((*shape[:-1], 1), dtype=self.wide, device=parameter.device)
        return parameter

    def matrix(self, *shape: int, shard: Shard | None = None, wide: bool = False) -> nn.Parameter:
        """Return ``weight`` for a matrix, or a stack of matrices, possibly loaded as codes.

        The layer must take the matrix with ``Packs._give`` or a function of ``layers.pending_codes``. If
        ``staged``, the memory is on the CPU.
        """
        if wide:
            return self.weight(*shape, shard=shard, wide=wide)
        where = torch.device("cpu") if self.staged else self.device
        made = self.weight(*shape, shard=shard, device=where)
        note = self.notes.weight(made).note
        note.held = PendingCodes(self.device)
        if shard is not None and not shard.whole and shard.dim == len(shape) - 1:
            # Groups of a whole row must not depend on the cut, so the loader rounds before the cut.
            note.rounds = coded.GROUPED.get(self._kind(shard.size))
        return made

    def row_group(self, divided: int) -> int:
        """Return ``coded.row_group`` of rows of ``divided`` inputs, which ranks divide."""
        return coded.row_group(self.quantization, divided, self.rank_counts)

    def _kind(self, divided: int) -> str:
        """Return the quantization of a matrix; ``divided``: see ``matrix_op``."""
        if not divided:
            return self.quantization
        group = self.row_group(divided)
        kinds = {
            "w8a8": f"w8a8-{group}" if group else "int8-exact",
            "int8": f"int8-{group}" if group else "int8-exact",
            "w4a8": "w4a8" if group else "int4-exact",
            "int4": "int4" if group else "int4-exact",
            "w8a8-fp8": "fp8",
        }
        return kinds.get(self.quantization, self.quantization)


class Layer(nn.Module):
    """A module without hooks. Calls go directly to ``forward``; a step makes some hundred calls."""

    adapted: tuple[str, ...] = ()
    """Names of the linear layers to which ``forward`` passes the adapters of the rows."""

    def __call__(self, *inputs: Any) -> Any:
        return self.forward(*inputs)


class FeedForward(Layer):
    """Feed-forward part of a block: [T, hidden] to a partial [T, hidden], which is summed over ranks."""

    reads_ids: bool = False
    """True if the block reads token ids."""

    def steps(
        self,
        comm: Comm,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, torch.Tensor]:
        """Return the block's contribution to the stream, [T, hidden]; yield once per collective.

        x: [T, hidden]; ids: int64 [T], token ids of the rows, needed with ``reads_ids``; comm: sums partials;
        exchange: agreement of the ranks about rows sent to other ranks; adapters: places of the rows; routes:
        recorded or forced experts of the rows, for routed blocks.
        """
        return (yield from reduced(comm, self.forward(x, ids, adapters)))

    def terms(
        self,
        comm: Comm,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        exchange: Exchange = UNAGREED,
        adapters: AdapterRows | None = None,
        routes: RowRoutes | None = None,
    ) -> Generator[Pending, None, Contribution]:
        """Return ``steps`` for a caller whose next norm adds the contribution (``RMSNorm.add``).

        Routed blocks may return terms, which the norm adds in its own kernel.
        """
        return (yield from self.steps(comm, x, ids, exchange, adapters, routes))


class Packs(Layer, ABC):
    """A layer with loaded weights to convert to the layout of an op.

    ``pack`` is called once, after loading and before the first forward. Plain weights without further use are
    then dropped, layer by layer, so a model is never in memory twice.
    """

    _notes: Notes
    """``Build.notes``. Set by layers with matrices."""

    @abstractmethod
    def pack(self) -> None:
        """Make the layouts for ``forward``."""

    def _give(self, weight: str, op: Implementation) -> object:
        """Return the input of ``op`` for the parameter ``weight``.

        A packed parameter becomes None; otherwise the attribute is the parameter in its final memory.
        """
        noted = self._notes.weight(getattr(self, weight))
        codes = take_mixed(noted, op.pack_codes is not None, mixes=op.mixes)
        if codes is not None and op.pack_codes is not None:
            setattr(self, weight, None)
            return op.pack_codes(codes)
        largest = largest_in_place(noted)
        plain = in_place(noted)
        if op.pack is None:
            setattr(self, weight, plain)
            return plain
        packed = op.pack(plain.data) if largest is None else op.pack(plain.data, largest)
        setattr(self, weight, None)
        return packed


def pack_all(model: nn.Module) -> None:
    """Pack every layer of ``model`` in order of definition: an embedding before a tied head.

    After each layer the freed memory returns to the system; the C library would retain a part.
    """
    for module in model.modules():
        if isinstance(module, Packs):
            module.pack()
            trim_heap()
