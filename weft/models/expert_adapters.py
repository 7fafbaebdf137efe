"""LoRA adapters of routed experts and shared experts on one rank: where the tensors go, and the copies.

    X.experts.5.gate_proj                one matrix of one expert
    X.experts, X.experts.base_layer      one stack of all experts (``target_parameters`` of peft); the shape
                                         tells which of both stacks

If ranks have parts of every expert, B is cut as the rows of gate and up, and A as the inputs of down. If
ranks have whole experts, host memory has the adapters of all experts, because experts move. A place of the
pool gets the experts that the rank has at the moment.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from weft.config.adapter_files.tensors import AdapterModule
from weft.layers.build import AdapterOptions
from weft.layers.low_rank import LowRank
from weft.layers.pending_codes import Weight
from weft.models.expert_factors import ScaledExperts
from weft.models.slices import apart
from weft.models.weights import Placement, WeightMap
from weft.moe.block import RoutedMLP
from weft.ops import torch_ops

if TYPE_CHECKING:
    from weft.models.decoder import Model

Tensor = torch.Tensor

#: Name of a module from its layer number on; the part before differs between classes of one model.
_LAYER = re.compile(r"^((?:base_model\.|model\.|language_model\.|text_model\.|transformer\.)*)(layers\..+)$")
_STACKS = {"experts.gate_up": "up", "experts.down": "down"}
_SHARED = {"shared.gate_up": "shared_up", "shared.down": "shared_down"}


@dataclass(slots=True)
class _Matrix:
    """The low-rank part of one matrix of a routed block, or of the same matrix of all experts."""

    block: RoutedMLP
    name: str
    """Attribute of ``ExpertAdapters``."""
    low: LowRank
    shape: tuple[int, int]
    """Outputs and inputs of the whole matrix of an expert."""
    experts: int
    """Number of experts of all ranks; 0 for a shared expert."""
    rows: list[tuple[int, int]]
    """Rows of the whole matrix on this rank, in order."""
    columns: list[tuple[int, int]]
    parts: int
    """2 for gate and up."""
    squares: dict[int, Tensor] = field(default_factory=dict)
    """Square sums of the rows of the matrix of an expert, wide; see ``expert_factors``."""

    @property
    def here(self) -> Sequence[int]:
        """Experts of this rank, in order of their local places; (0,) for a shared expert."""
        return self.block.experts_here if self.experts else (0,)

    def part_of(self, begin: int) -> int:
        """Return the part of the row ``begin``."""
        return begin * self.parts // self.shape[0]


@dataclass(frozen=True, slots=True)
class ExpertPlace:
    """Place of a published tensor: some rows of the matrix of one expert, or a stack of all experts."""

    matrix: _Matrix
    placement: Placement
    expert: int
    """-1 for all experts."""
    rows: tuple[int, int]
    """Rows of the matrix."""
    shape: tuple[int, int]
    """Outputs and inputs of one expert."""
    turned: bool = False
    """True for a stack that is published with inputs before outputs."""
    parameter: str = ""
    """Published name of a stack inside its module."""
    scalable = True
    """True: experts support factors of their outputs (DoRA)."""

    @property
    def parts(self) -> range:
        """Parts of the matrix with rows of the tensor."""
        begin, end = self.rows
        return range(self.matrix.part_of(begin), self.matrix.part_of(end - 1) + 1)

    @property
    def changed(self) -> set[tuple[int, int, int]]:
        """(matrix, expert, part) of the numbers of the model that an adapter of the tensor changes."""
        every = range(max(self.matrix.experts, 1)) if self.expert < 0 else (self.expert,)
        return {(id(self.matrix), expert, part) for expert in every for part in self.parts}


@dataclass(slots=True)
class HeldExperts:
    """Adapter of one matrix in host memory, cut for this rank."""

    matrix: _Matrix
    a: Tensor
    """[experts, parts, rank, inputs of this rank]."""
    b: Tensor
    """[experts, rank, outputs of this rank], with the scale."""
    rank: int
    lengths: Tensor | None = None
    """DoRA: lengths of the rows, wide [experts, outputs of this rank]; NaN for outputs without a length."""
    factors: tuple[tuple[int, ...], Tensor] | None = None
    """DoRA: experts of this rank, and the factors of their outputs, wide [experts here, outputs]."""


def short(module: str) -> str:
    """Return the name of a module from its layer number on, or the whole name."""
    match = _LAYER.match(module)
    return module if match is None else match[2]


def _bare(module: str) -> str:
    """Return a short name without the endings for nested layers of peft."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return short(module)


class RoutedAdapters:
    """The adapters of all routed blocks of a model."""

    def __init__(self, model: Model, weights: WeightMap, options: AdapterOptions) -> None:
        """Allocate the pools. Call before the model is packed."""
        self._options = options
        self._dtype = model.dtype
        self._matrices = list(_matrices(model))
        owned = {(id(one.block), one.name): one for one in self._matrices}
        self.names: dict[str, ExpertPlace] = {}
        """Name of a published module -> place. Stacks are in ``stacks``."""
        self.stacks: dict[str, list[ExpertPlace]] = {}
        """Name of the module with the stacks -> places of the stacks."""
        self._scaled: dict[tuple[int | None, int], list[HeldExperts]] = {}
        """Adapters with factors, by replica and place."""
        self.known = set[str]()
        """Names of experts' modules, also without memory for adapters of experts."""
        blocks = {name: module for name, module in model.named_modules() if isinstance(module, RoutedMLP)}
        for name, placement in weights.placements.items():
            self._add(name, placement, blocks, owned)
        for one in self._matrices:
            one.low.allocate_stack(*_sizes(one))

    def _add(
        self,
        name: str,
        placement: Placement,
        blocks: Mapping[str, RoutedMLP],
        owned: Mapping[tuple[int, str], _Matrix],
    ) -> None:
        """Note the place of one published tensor, if the tensor is a matrix of experts."""
        for ending, attribute in (_STACKS | _SHARED).items():
            block = blocks.get(placement.parameter.removesuffix(f".{ending}"))
            if block is None or not placement.parameter.endswith(f".{ending}"):
                continue
            if ending in _STACKS:
                self.known |= {short(name.removesuffix(".weight")), short(name.rpartition(".")[0])}
            matrix = owned.get((id(block), attribute))
            if matrix is None:
                return
            place = _place(matrix, placement)
            if place is None:
                return
            if place.expert < 0 and matrix.experts:
                module, _, parameter = name.rpartition(".")
                self.stacks.setdefault(short(module), []).append(replace(place, parameter=parameter))
            else:
                self.names[short(name.removesuffix(".weight"))] = place
            return

    @property
    def nbytes(self) -> int:
        return sum(one.low.nbytes for one in self._matrices)

    def find(self, module: AdapterModule) -> ExpertPlace | None:
        """Return the place of an adapted module, or None."""
        if not module.stacks:
            return self.names.get(short(module.module))
        known = {one.parameter: one for one in self.stacks.get(_bare(module.module), ())}
        for stack in module.stacks:
            found = known.get(stack.parameter)
            if found is None or found.shape != (module.outputs, module.inputs):
                continue
            if found.matrix.experts * stack.rank == module.rows:
                return found
        return None

    def why_not(self, module: str) -> str | None:
        """Return the reason why adapters of experts are not served; None if ``module`` names no experts."""
        if self._options.experts or _bare(module) not in self.known:
            return None
        return "adapters of experts require --lora-experts"

    def read(
        self, modules: Iterable[tuple[AdapterModule, ExpertPlace]], tensors: Mapping[str, Tensor]
    ) -> list[HeldExperts]:
        """Return the modules of one adapter in the model's dtype, one entry per matrix of a layer."""
        of: dict[int, list[tuple[AdapterModule, ExpertPlace]]] = {}
        for module, place in modules:
            of.setdefault(id(place.matrix), []).append((module, place))
        return [self._held(found[0][1].matrix, found, tensors) for found in of.values()]

    def _held(
        self,
        matrix: _Matrix,
        modules: Sequence[tuple[AdapterModule, ExpertPlace]],
        tensors: Mapping[str, Tensor],
    ) -> HeldExperts:
        wide = torch_ops.wide(self._dtype)
        rank = max(_numbers(module, place)[0] for module, place in modules)
        count = max(matrix.experts, 1)
        outputs, inputs = matrix.shape
        a = torch.zeros(count, matrix.parts, rank, inputs, dtype=self._dtype)
        b = torch.zeros(count, rank, outputs, dtype=self._dtype)
        scaled = any(module.magnitude for module, _ in modules)
        lengths = torch.full((count, outputs), torch.nan, dtype=wide) if scaled else None
        for module, place in modules:
            number = max(place.expert, 0)
            own = slice(None) if place.expert < 0 and matrix.experts else slice(number, number + 1)
            own_rank, scale = _numbers(module, place)
            experts = matrix.experts if module.stacks else 0
            first, second = apart(experts, tensors[module.a], tensors[module.b].to(wide) * scale)
            second = _arranged(place, second, wide)
            begin, end = place.rows
            for part in place.parts:
                a[own, part, :own_rank] = first.to(self._dtype)
            b[own, :own_rank, begin:end] = second.transpose(1, 2).to(self._dtype)
            if module.magnitude and lengths is not None:
                column = tensors[module.magnitude].to(wide).view(1, -1, 1)
                lengths[own, begin:end] = _arranged(place, column, wide).squeeze(2)
        a = torch.cat([a[..., begin:end] for begin, end in matrix.columns], dim=-1)
        b = torch.cat([b[..., begin:end] for begin, end in matrix.rows], dim=-1)
        if lengths is not None:
            lengths = torch.cat([lengths[:, begin:end] for begin, end in matrix.rows], dim=-1)
        return HeldExperts(matrix, a.contiguous(), b.contiguous(), rank, lengths)

    def clear(self, place: int, replica: int | None = None) -> None:
        """Remove the adapter of ``place``. ``replica``: another replica; None for the own."""
        for one in self._matrices:
            pool = one.low.pool
            assert pool is not None
            if not one.experts and replica is not None:
                continue
            own, changing, stride = self._numbered(one, place, replica)
            if own not in changing:
                continue
            numbers = list(range(own, len(pool.ranks), stride))
            pool.a[numbers] = 0
            pool.b[numbers] = 0
            for number in numbers:
                pool.set_rank(number, 0)
                pool.factors.pop(number, None)
        self._scaled.pop((replica, place), None)
        # One set per block, and gate and up come before down.
        for one in self._matrices:
            if one.experts or replica is None:
                own, changing, _ = self._numbered(one, place, replica)
                changing.discard(own)

    def _numbered(self, one: _Matrix, place: int, replica: int | None) -> tuple[int, set[int], int]:
        """Return (number of ``place`` in the pool of the first expert, numbers in use, numbers of an expert).

        A shared expert serves the rows of one replica only.
        """
        adapters = one.block.low
        assert adapters is not None
        places = self._options.places
        if not one.experts:
            return place, adapters.changing_shared, places
        first = adapters.first if replica is None else replica * places
        return first + place, adapters.changing, places * adapters.replicas

    def place(self, held: Sequence[HeldExperts], place: int, replica: int | None = None) -> None:
        """Copy the adapter ``held`` to the empty ``place``. ``replica``: another replica, which needs the
        routed experts only; None for the own."""
        for one in held:
            matrix, pool = one.matrix, one.matrix.low.pool
            assert pool is not None
            if not matrix.experts and replica is not None:
                continue
            own, changing, stride = self._numbered(matrix, place, replica)
            here = torch.tensor(matrix.here, dtype=torch.int64)
            numbers = torch.arange(len(here)) * stride + own
            pool.a[numbers, :, : one.rank] = one.a[here].to(pool.a.device)
            pool.b[numbers, : one.rank] = one.b[here].to(pool.b.device)
            for number in numbers.tolist():
                pool.set_rank(number, one.rank)
            changing.add(own)
            if one.lengths is not None:
                self._scaled.setdefault((replica, place), []).append(one)
                self._scale(one, place, replica)

    def forget(self) -> None:
        """Forget the adapters with factors. Call after a loss of ranks, before adapters are placed again."""
        self._scaled.clear()

    def forget_squares(self) -> None:
        """Forget the lengths of the rows of all matrices. Call after the weights have changed."""
        for one in self._matrices:
            one.squares.clear()

    def moved(self) -> None:
        """Set the factors (DoRA) of the experts that are here now. Call after experts have moved."""
        for (replica, place), held in self._scaled.items():
            for one in held:
                self._scale(one, place, replica)

    def _scale(self, one: HeldExperts, place: int, replica: int | None) -> None:
        """Set the factors of the outputs of an adapter in ``place``."""
        pool = one.matrix.low.pool
        assert pool is not None
        own, _, stride = self._numbered(one.matrix, place, replica)
        ScaledExperts(one).update()
        assert one.factors is not None
        for number, factors in enumerate(one.factors[1]):
            pool.factors[number * stride + own] = factors


def _matrices(model: Model) -> Iterable[_Matrix]:
    """Yield the matrices of all routed blocks that take adapters."""
    for block in model.modules():
        if not isinstance(block, RoutedMLP) or block.low is None:
            continue
        for ending, name in (_STACKS | _SHARED).items():
            low = getattr(block.low, name)
            if low is None:
                continue
            holder = getattr(block, ending.partition(".")[0])
            weight = model.notes.weight(getattr(holder, ending.partition(".")[2]))
            shape = weight.global_shape
            experts = block.router.weight.shape[0] if name in _STACKS.values() else 0
            yield _Matrix(
                block=block,
                name=name,
                low=low,
                shape=(shape[-2], shape[-1]),
                experts=experts,
                rows=_spans(weight, len(shape) - 2),
                columns=_spans(weight, len(shape) - 1),
                parts=2 if "gate_up" in ending and block.gated else 1,
            )


def _spans(weight: Weight, dim: int) -> list[tuple[int, int]]:
    """Return the parts of ``dim`` of the global parameter that this rank stores."""
    shard = weight.note.shard
    if shard is None or shard.dim != dim:
        return [(0, weight.global_shape[dim])]
    return list(shard.spans)


def _sizes(one: _Matrix) -> tuple[int, int, tuple[int, int], list[tuple[int, int, int]]]:
    """Return the arguments of ``LowRank.allocate_stack``."""
    spans, begin = [], 0
    for first, last in one.rows:
        middle = one.shape[0] // one.parts
        # A span may hold rows of both parts.
        for part in range(one.parts):
            low, high = max(first, part * middle), min(last, (part + 1) * middle)
            if low < high:
                spans.append((part, begin + low - first, begin + high - first))
        begin += last - first
    inputs = sum(end - first for first, end in one.columns)
    count = 1
    if one.experts:
        assert one.block.low is not None
        count = len(one.here) * one.block.low.replicas
    return count, one.parts, (begin, inputs), spans


def _place(matrix: _Matrix, placement: Placement) -> ExpertPlace | None:
    """Return the place of a published tensor; None for a tensor that mixes columns."""
    index = placement.index
    outputs, inputs = matrix.shape
    expert = -1
    if matrix.experts and index and isinstance(index[0], int):
        expert, index = index[0], index[1:]
    rows = (0, outputs)
    if index:
        if len(index) > 1 or not isinstance(index[0], slice):
            return None
        rows = index[0].indices(outputs)[:2]
    stacked = bool(matrix.experts) and expert < 0
    probe = torch.zeros(matrix.experts if stacked else 1, rows[1] - rows[0], 1)
    for turned in (False, True) if stacked else (False,):
        place = ExpertPlace(matrix, placement, expert, rows, (rows[1] - rows[0], inputs), turned)
        try:
            if _arranged(place, probe, probe.dtype).shape == probe.shape:
                return place
        except (RuntimeError, ValueError, IndexError):
            continue
    return None


def _numbers(module: AdapterModule, place: ExpertPlace) -> tuple[int, float]:
    """Return (rank, scale) of a module at its place."""
    for stack in module.stacks:
        if stack.parameter == place.parameter:
            return stack.rank, stack.scale
    return module.rank, module.scale


def _arranged(place: ExpertPlace, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``b`` [experts, outputs, rank] with the outputs in the order of the parameter."""
    placement = place.placement
    if place.expert >= 0 or not place.matrix.experts:
        return placement.arranged(b[0], dtype).unsqueeze(0)
    return placement.arranged(b.transpose(1, 2) if place.turned else b, dtype)
