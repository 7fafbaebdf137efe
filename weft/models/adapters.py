"""LoRA adapters of a model on one rank: where the tensors go, the copies in host memory, the pool.

The family's weight map has all knowledge: an adapter tensor ``X.lora_B`` goes where the rows of ``X.weight``
go, and ``X.lora_A`` where the columns go. No family code deals with adapters.

    layer divided by outputs     A whole, B cut as the outputs
    layer divided by inputs      A cut as the inputs, B whole; the products are added to the partial results
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from weft.common.errors import ConfigError, EngineDead
from weft.common.log import get_logger
from weft.config.adapter_files.reading import MOST_SETTINGS, read_regular
from weft.config.adapter_files.tensors import AdapterModule
from weft.config.adapters import CONFIG, WEIGHTS, AdapterFile, digest_of, read_adapter
from weft.layers.build import AdapterOptions, Layer
from weft.layers.low_rank import LowRank
from weft.layers.pending_codes import Weight
from weft.models.adapter_factors import Scaled, factors_of
from weft.models.expert_adapters import ExpertPlace, HeldExperts, RoutedAdapters, short
from weft.models.expert_factors import ScaledExperts, keep_factors
from weft.models.slices import Window, part_shape, windows
from weft.models.table_adapters import HeldTables, TableAdapters
from weft.models.weights import Placement, WeightMap
from weft.ops import torch_ops
from weft.ops.low_rank import LowRankPool
from weft.types.plan import (
    HoldAdapter,
    PlaceAdapter,
    ReadAdapter,
    ReleaseAdapter,
    ReplicaUpdate,
    SlotUpdate,
)

if TYPE_CHECKING:
    from weft.models.decoder import Model

_log = get_logger(__name__)

Tensor = torch.Tensor

_ALL = slice(None)
_SHOWN = 8
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The place of one published matrix in the low-rank part of a layer."""

    low: LowRank
    part: int
    placement: Placement
    shape: tuple[int, int]
    """Outputs and inputs of the published matrix."""
    taken: tuple[Window, ...]
    """Windows of this rank; () if the rank stores nothing of the matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One module of an adapter in host memory, cut for this rank, with the scale in ``b``."""

    target: _Target
    a: Tensor
    """[rank, inputs of this rank]."""
    b: Tensor
    """[rank, outputs of the published matrix], in the order of the parameter."""
    magnitude: Tensor | None = None
    """DoRA: lengths of the rows, wide [outputs of the published matrix], in the order of the parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """One adapter in host memory."""

    linear: list[_Held]
    experts: list[HeldExperts]
    tables: HeldTables
    factors: list[tuple[LowRankPool, Tensor]] = field(default_factory=list)
    """DoRA: factors of the outputs of a layer, wide, on the device."""


class _Reading:
    """One adapter that a thread reads."""

    def __init__(self, digest: str, folder: str, name: str) -> None:
        self.digest, self.folder, self.name = digest, folder, name
        self.done: Future[AdapterFile] = Future()
        self.copy: _Copy | None = None


class Adapters:
    """The adapters of a model on one rank."""

    def __init__(self, model: Model, weights: WeightMap, options: AdapterOptions) -> None:
        """Allocate the pool. Call before the model is packed: notes about parameters end there."""
        self._options = options
        self._dtype = model.dtype
        self._comm = model.mesh.tp
        self._replica = model.mesh.layout.replica(model.mesh.rank)
        self._pinned = model.device.type == "cuda"
        self._targets = _targets(model, weights)
        self._by_layer = {short(name): target for name, target in self._targets.items()}
        self._routed = RoutedAdapters(model, weights, options)
        self._tables = TableAdapters(model, weights, options)
        self._layers = list({id(target.low): target.low for target in self._targets.values()}.values())
        self.capturable = all(low.capturable for low in self._layers)
        """True if steps with adapters of linear layers can be captured."""
        self._held: dict[str, _Copy] = {}
        """Adapters in host memory, by digest."""
        self._reading: dict[str, _Reading] = {}
        self._holders: dict[str, set[int]] = {}
        """Replicas that need the adapter in host memory, by digest."""
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._op_by_op = set[int]()
        """Places of adapters whose steps cannot be captured."""
        self.nbytes = self._tables.nbytes + sum(low.nbytes for low in self._layers)
        """Bytes of the places of this rank."""
        self.nbytes += self._routed.nbytes
        _log.info(
            "%d places for LoRA adapters of rank %d: %.1f MB", options.places, options.rank, self.nbytes / 1e6
        )

    def captures(self, present: Sequence[int]) -> bool:
        """Return True if a step with the adapters in the places ``present`` can be captured."""
        return self.capturable and self._op_by_op.isdisjoint(present)

    def check(self, adapter: AdapterFile) -> None:
        """Raise ConfigError unless every module of ``adapter`` fits the model. The message lists modules."""
        if adapter.rank > self._options.rank:
            raise ConfigError(
                f"the adapter has rank {adapter.rank}, and --max-lora-rank is {self._options.rank}",
                param="--max-lora-rank",
            )
        unknown, misfits = [], []
        for module in adapter.modules:
            if (why := self._routed.why_not(module.module)) is not None:
                raise ConfigError(f"{why}; the adapter has {module.module}", param="--lora-experts")
            if self._tables.takes(module):
                continue
            target = self._target(module)
            if target is None or module.table or (module.magnitude and not takes_factors(target)):
                unknown.append(module.module)
            elif target.shape != (module.outputs, module.inputs):
                outputs, inputs = target.shape
                misfits.append(
                    f"{module.module} [{module.outputs}, {module.inputs}] instead of [{outputs}, {inputs}]"
                )
        misfits += [why for saved in adapter.saved if (why := self._tables.why_not(saved)) is not None]
        problems = [
            f"{what}: {_listed(names)}"
            for what, names in (
                ("modules that take no adapter", unknown),
                ("matrices that do not fit", misfits),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the adapter does not fit the model; {'; '.join(problems)}", param="--lora-modules"
            )

    def apply(self, ops: Iterable[SlotUpdate]) -> None:
        """Apply the updates of a plan that concern adapters, in order.

        Raises EngineDead if a folder does not have the digest any more.
        """
        for op in ops:
            other = op.replica if isinstance(op, ReplicaUpdate) else None
            update = op.update if isinstance(op, ReplicaUpdate) else op
            holder = self._replica if other is None else other
            if isinstance(update, ReadAdapter):
                self._holders.setdefault(update.digest, set()).add(holder)
                self.prefetch(update.digest, update.folder)
            elif isinstance(update, HoldAdapter):
                self._holders.setdefault(update.digest, set()).add(holder)
                try:
                    self.hold(update.digest, update.folder)
                except (ConfigError, OSError, KeyError) as error:
                    raise EngineDead(f"the files of a LoRA adapter changed while in use: {error}") from error
            elif isinstance(update, PlaceAdapter):
                self.place(update.digest, update.place, other)
            elif isinstance(update, ReleaseAdapter):
                self._release(update.digest, holder)

    def _release(self, digest: str, replica: int) -> None:
        """Free the host memory of an adapter, unless another replica needs the adapter."""
        holders = self._holders.get(digest, set())
        holders.discard(replica)
        if not holders:
            self._holders.pop(digest, None)
            self._held.pop(digest, None)
            self._reading.pop(digest, None)

    def forget_others(self) -> None:
        """Forget the needs of other replicas: after a loss of ranks every replica sends them again."""
        for digest, holders in list(self._holders.items()):
            for replica in holders - {self._replica}:
                self._release(digest, replica)

    def changes_experts(self, adapter: AdapterFile) -> bool:
        """Return True if ``adapter`` changes routed experts."""
        targets = (self._target(module) for module in adapter.modules)
        return any(isinstance(one, ExpertPlace) and one.matrix.experts > 0 for one in targets)

    def prefetch(self, digest: str, folder: str, name: str = "") -> Future[AdapterFile]:
        """Begin to read an adapter in a thread. Idempotent, except after an error. Return the adapter, or the
        errors of ``hold``. ``name``: for errors."""
        known = self._reading.get(digest)
        if known is None or (known.done.done() and known.copy is None):
            known = self._reading[digest] = _Reading(digest, folder, name)
            self._threads.submit(self._read_beside, known)
        return known.done

    def _read_beside(self, reading: _Reading) -> None:
        try:
            reading.copy, adapter = self._copy_of(reading.digest, reading.folder, reading.name)
        except BaseException as error:
            reading.done.set_exception(error)
        else:
            reading.done.set_result(adapter)

    def hold(self, digest: str, folder: str) -> None:
        """Take an adapter into host memory: the result of ``prefetch``, or read now. Idempotent. All ranks
        must call together.

        Raise ConfigError for files that are no adapter of the model, or with another digest.
        """
        if digest in self._held:
            return
        reading = self._reading.pop(digest, None)
        if reading is not None:
            wait([reading.done])
        # Files that could not be read before may be there now.
        made = None if reading is None else reading.copy
        copy = made if made is not None else self._copy_of(digest, folder)[0]
        self._tables.finish(copy.tables)
        self._held[digest] = replace(copy, factors=self._factors(copy))

    def _copy_of(self, digest: str, folder: str, name: str = "") -> tuple[_Copy, AdapterFile]:
        """Read and check an adapter. Runs in any thread: computes nothing with the model's weights."""
        # Headers first: a file that does not fit is never read into memory.
        path = Path(folder)
        self.check(read_adapter(folder, name, max_rank=self._options.rank, digest=digest))
        # One copy of the bytes for digest and tensors: the files may change meanwhile.
        data = read_regular(path / WEIGHTS)
        if digest_of(read_regular(path / CONFIG, MOST_SETTINGS), data) != digest:
            raise ConfigError("the files of the adapter have other content", param="--lora-modules")
        adapter = read_adapter(folder, name, max_rank=self._options.rank, digest=digest)
        self.check(adapter)
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ConfigError(f"{WEIGHTS} is not readable: {error}", param="--lora-modules") from error
        linear, experts = [], []
        for module in adapter.modules:
            target = None if self._tables.takes(module) else self._target(module)
            if isinstance(target, _Target):
                linear.append(self._read(module, target, tensors))
            elif target is not None:
                experts.append((module, target))
        copy = _Copy(
            linear=[held for held in linear if held.target.taken],
            experts=self._routed.read(experts, tensors),
            tables=self._tables.read(adapter, tensors),
        )
        return copy, adapter

    def _factors(self, copy: _Copy) -> list[tuple[LowRankPool, Tensor]]:
        """Return the factors of all linear layers with lengths of rows, and keep the factors of experts in
        ``copy``. All ranks must call together."""
        layers: dict[int, Scaled] = {}
        for held in copy.linear:
            if held.magnitude is not None:
                low = held.target.low
                layer = layers.setdefault(id(low), Scaled(low, divided=_columns(held.target.taken) != _ALL))
                layer.add(held.target.part, held.a, held.b, held.magnitude, map(_rows, held.target.taken))
        experts = [ScaledExperts(held) for held in copy.experts if held.lengths is not None]
        made = factors_of([*layers.values(), *experts], self._comm)
        keep_factors(experts, made[len(layers) :])
        pools = [layer.low.pool for layer in layers.values() if layer.low.pool is not None]
        return list(zip(pools, made, strict=False))

    def experts_moved(self) -> None:
        """Call after experts have moved between ranks."""
        self._routed.moved()

    def place(self, digest: str, place: int, replica: int | None = None) -> None:
        """Copy an adapter to ``place`` of the pool, over any other adapter. ``replica``: another replica,
        whose rows need the routed experts of this rank; None for the own."""
        held = self._held.get(digest)
        if held is None:
            raise EngineDead("a LoRA adapter is placed that was never read")
        if replica is not None:
            self._routed.clear(place, replica)
            self._routed.place(held.experts, place, replica)
            return
        ranks: dict[int, int] = {}
        for low in self._layers:
            assert low.pool is not None
            if low.pool.ranks[place]:
                low.clear(place)
        self._routed.clear(place)
        self._routed.place(held.experts, place)
        self._tables.clear(place)
        self._tables.place(held.tables, place)
        self._op_by_op.discard(place)
        if held.experts or held.factors or held.tables.eager:
            self._op_by_op.add(place)
        for scaled, factors in held.factors:
            scaled.factors[place] = factors
        for one in held.linear:
            pool = one.target.low.pool
            assert pool is not None
            rank = len(one.a)
            pool.a[place, one.target.part, :rank].copy_(one.a, non_blocking=True)
            for window in one.target.taken:
                rows, to, *_ = (*_rows(window), None)
                pool.b[place, :rank, to].copy_(one.b[:, rows], non_blocking=True)
            ranks[id(pool)] = max(rank, ranks.get(id(pool), 0))
            pool.set_rank(place, ranks[id(pool)])
        for low in self._layers:
            if low.pool is not None and low.pool.ranks[place]:
                low.placed(place)

    def _target(self, module: AdapterModule) -> _Target | ExpertPlace | None:
        """Return the target of a module, found by the whole name or by the name from the layer number on."""
        if not module.stacks:
            found = self._targets.get(module.module) or self._by_layer.get(short(module.module))
            if found is not None:
                return found
        return self._routed.find(module)

    def _read(self, module: AdapterModule, target: _Target, tensors: Mapping[str, Tensor]) -> _Held:
        """Return one module in the model's dtype. The scale is multiplied in a wide dtype before rounding."""
        wide = torch_ops.wide(self._dtype)
        a = tensors[module.a]
        b = target.placement.arranged(tensors[module.b].to(wide) * module.scale, wide)
        columns = _columns(target.taken)
        made = [values.to(self._dtype).contiguous() for values in (a[:, columns], b.T)]
        if self._pinned:
            made = [values.pin_memory() for values in made]
        lengths = None
        if module.magnitude:
            column = tensors[module.magnitude].to(wide).unsqueeze(1)
            lengths = target.placement.arranged(column, wide).squeeze(1)
        return _Held(target=target, a=made[0], b=made[1], magnitude=lengths)


def _targets(model: Model, weights: WeightMap) -> dict[str, _Target]:
    """Return published module name -> target, for all layers that take adapters, and allocate the layers."""
    layers = dict(_adapted(model))
    parameters = model.notes.weights(model.named_parameters())
    found: dict[str, list[tuple[str, Placement]]] = {}
    for name, placement in weights.placements.items():
        owner = placement.parameter.removesuffix(_WEIGHT)
        weighs = placement.parameter.endswith(_WEIGHT) and name.endswith(_WEIGHT)
        if owner in layers and weighs and _keeps_columns(placement, parameters[placement.parameter]):
            found.setdefault(owner, []).append((name.removesuffix(_WEIGHT), placement))
    made: dict[str, _Target] = {}
    for owner, placed in found.items():
        weight = parameters[owner + _WEIGHT]
        spans = []
        for part, (name, placement) in enumerate(placed):
            taken = tuple(windows(weight, placement.index))
            outputs, inputs = part_shape(weight, placement.index)
            made[name] = _Target(
                low=layers[owner], part=part, placement=placement, shape=(outputs, inputs), taken=taken
            )
            spans += [(part, *_span(_rows(window)[1], weight.parameter.shape[0])) for window in taken]
        outputs, inputs = weight.parameter.shape
        layers[owner].allocate(len(placed), (outputs, inputs), spans)
    return made


def takes_factors(target: _Target | ExpertPlace) -> bool:
    """Return True if the layer of ``target`` supports factors of its outputs (DoRA)."""
    return isinstance(target, ExpertPlace) or target.low.base is not None


def _adapted(model: Model) -> Iterable[tuple[str, LowRank]]:
    """Yield (name, low-rank part) of each layer that gets the adapters of the rows."""
    for name, module in model.named_modules():
        for child in module.adapted if isinstance(module, Layer) else ():
            low = getattr(getattr(module, child), "low", None)
            if low is not None:
                yield f"{name}.{child}", low


def _keeps_columns(placement: Placement, weight: Weight) -> bool:
    """Return True if the parameter stores whole columns of the published matrix, in any order of rows."""
    if len(weight.parameter.shape) != 2 or len(placement.index) > 1:
        return False
    if placement.read is None:
        return True
    rows = part_shape(weight, placement.index)[0]
    try:
        return placement.read(torch.zeros(rows, 1)).shape == (rows, 1)
    except (RuntimeError, ValueError, IndexError):
        return False


def _rows(window: Window) -> tuple[slice, slice]:
    """Return (rows of the published matrix, rows of the local parameter) of a window."""
    source = window.source[0] if window.source else _ALL
    target = window.target[0] if window.target else _ALL
    assert isinstance(target, slice)
    return source, target


def _columns(taken: Iterable[Window]) -> slice:
    """Return the columns of the published matrix on this rank, equal in every window."""
    return next((window.source[1] for window in taken if len(window.source) > 1), _ALL)


def _span(rows: slice, count: int) -> tuple[int, int]:
    begin, end, _ = rows.indices(count)
    return begin, end


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
