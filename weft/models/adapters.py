"""LoRA adapters of a model on one rank: the copies in host memory, and the places in the pools.

    files --read, in a thread--> copy in host memory --a plan has PlaceAdapter--> place of the pools

``adapter_targets``, ``expert_adapters`` and ``table_adapters`` know where the tensors go.
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
from weft.config.adapter_files.tensors import AdapterModule, listed
from weft.config.adapters import CONFIG, WEIGHTS, AdapterFile, digest_of, read_adapter
from weft.layers.build import AdapterOptions
from weft.models.adapter_factors import Scaled, factors_of
from weft.models.adapter_targets import ALL, Target, columns_of, rows_of, targets_of
from weft.models.expert_adapters import ExpertPlace, HeldExperts, RoutedAdapters, short
from weft.models.expert_factors import ScaledExperts, keep_factors
from weft.models.table_adapters import HeldTables, TableAdapters
from weft.models.weights import WeightMap
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """One module of an adapter in host memory, cut for this rank, with the scale in ``b``."""

    target: Target
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

    @property
    def scaled(self) -> bool:
        """True if the adapter has lengths of rows (DoRA)."""
        lengths = [self.tables.lengths]
        lengths += [one.magnitude for one in self.linear]
        lengths += [one.lengths for one in self.experts]
        return any(one is not None for one in lengths)


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
        self._targets = targets_of(model, weights)
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
        self._placed: dict[tuple[int | None, int], str] = {}
        """Digest of the adapter in each place, by replica (None: the own) and place."""
        self.stale = False
        """True if the weights have changed since the factors (DoRA) were computed."""
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
        unknown, misfits, twice = [], [], []
        changed = set[tuple[int, int, int]]()
        for module in adapter.modules:
            if (why := self._routed.why_not(module.module)) is not None:
                raise ConfigError(f"{why}; the adapter has {module.module}", param="--lora-experts")
            if self._tables.takes(module):
                continue
            target = self._target(module)
            if target is None or module.table or (module.magnitude and not target.scalable):
                unknown.append(module.module)
            elif target.shape != (module.outputs, module.inputs):
                outputs, inputs = target.shape
                misfits.append(
                    f"{module.module} [{module.outputs}, {module.inputs}] instead of [{outputs}, {inputs}]"
                )
            else:
                if not changed.isdisjoint(target.changed):
                    twice.append(module.module)
                changed |= target.changed
        misfits += [why for saved in adapter.saved if (why := self._tables.why_not(saved)) is not None]
        problems = [
            f"{what}: {listed(names)}"
            for what, names in (
                ("modules that take no adapter", unknown),
                ("matrices that do not fit", misfits),
                ("matrices that are changed twice", twice),
            )
            if names
        ]
        if problems:
            raise ConfigError(
                f"the adapter does not fit the model; {'; '.join(problems)}", param="--lora-modules"
            )

    def apply(self, ops: Iterable[SlotUpdate]) -> None:
        """Apply the updates of a plan that concern adapters, in order. Call for every plan, on all ranks.

        Raises EngineDead if a folder does not have the digest any more.
        """
        if self.stale:
            self._refresh()
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

    def forget(self) -> None:
        """Forget all adapters. Call after a loss of ranks: every replica sends adapters and places again.

        Ranks that were not lost forget, too, because ``hold`` computes with all ranks together.
        """
        for known in (self._held, self._holders, self._reading, self._placed):
            known.clear()
        self._routed.forget()

    def weights_changed(self) -> None:
        """Call on all ranks after the weights have changed in place. The next ``apply`` computes the factors
        (DoRA) again."""
        self.stale = True

    def _refresh(self) -> None:
        """Compute the factors of all adapters again, and copy these adapters to their places again."""
        self.stale = False
        for low in self._layers:
            low.forget_squares()
        self._routed.forget_squares()
        self._tables.forget_squares()
        # Sorted: the sums over ranks must pair.
        scaled = sorted(digest for digest, copy in self._held.items() if copy.scaled)
        for digest in scaled:
            copy = self._held[digest]
            self._tables.finish(copy.tables)
            self._held[digest] = replace(copy, factors=self._factors(copy))
        for (replica, place), digest in list(self._placed.items()):
            if digest in scaled:
                self.place(digest, place, replica)

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
            raise ConfigError(
                "the files of the adapter have changed since the load; load the adapter again",
                param="--lora-modules",
            )
        adapter = read_adapter(folder, name, max_rank=self._options.rank, digest=digest)
        self.check(adapter)
        try:
            tensors = load(data)
        except SafetensorError as error:
            raise ConfigError(f"{WEIGHTS} is not readable: {error}", param="--lora-modules") from error
        linear, experts = [], []
        for module in adapter.modules:
            target = None if self._tables.takes(module) else self._target(module)
            if isinstance(target, Target):
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
                layer = layers.setdefault(id(low), Scaled(low, divided=columns_of(held.target.taken) != ALL))
                layer.add(held.target.parts, held.a, held.b, held.magnitude, map(rows_of, held.target.taken))
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
        self._placed[replica, place] = digest
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
            for part in one.target.parts:
                pool.a[place, part, :rank].copy_(one.a, non_blocking=True)
            for window in one.target.taken:
                rows, to, *_ = (*rows_of(window), None)
                pool.b[place, :rank, to].copy_(one.b[:, rows], non_blocking=True)
            ranks[id(pool)] = max(rank, ranks.get(id(pool), 0))
            pool.set_rank(place, ranks[id(pool)])
        for low in self._layers:
            if low.pool is not None and low.pool.ranks[place]:
                low.placed(place)

    def _target(self, module: AdapterModule) -> Target | ExpertPlace | None:
        """Return the target of a module, found by the whole name or by the name from the layer number on."""
        if not module.stacks:
            found = self._targets.get(module.module) or self._by_layer.get(short(module.module))
            if found is not None:
                return found
        return self._routed.find(module)

    def _read(self, module: AdapterModule, target: Target, tensors: Mapping[str, Tensor]) -> _Held:
        """Return one module in the model's dtype. The scale is multiplied in a wide dtype before rounding."""
        wide = torch_ops.wide(self._dtype)
        a = tensors[module.a]
        b = target.placement.arranged(tensors[module.b].to(wide) * module.scale, wide)
        columns = columns_of(target.taken)
        made = [values.to(self._dtype).contiguous() for values in (a[:, columns], b.T)]
        if self._pinned:
            made = [values.pin_memory() for values in made]
        lengths = None
        if module.magnitude:
            column = tensors[module.magnitude].to(wide).unsqueeze(1)
            lengths = target.placement.arranged(column, wide).squeeze(1)
        return _Held(target=target, a=made[0], b=made[1], magnitude=lengths)
