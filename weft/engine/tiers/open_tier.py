"""Opens the KV tier of a rank, from the configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from weft.attention.base import Backends
from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.devices import available_memory
from weft.config.resolved import EngineConfig
from weft.config.sections.tier_section import disk_folder
from weft.config.sizing.tier import host_bytes, level_flag, tier_bytes
from weft.disagg.transport.copying import digest_spans
from weft.engine.disagg.rank_transfers import dims_of
from weft.engine.ranks.ranks import ranks_of
from weft.engine.tiers.block_copies import BlockCopies, flat
from weft.engine.tiers.rank_tier import RankTier
from weft.ops.numerics import numerics
from weft.runner.runner import Runner
from weft.store.host import HostLevel
from weft.store.namespace import kv_namespace
from weft.store.record_store import RecordStore
from weft.store.records import RecordBuffer
from weft.store.remote.objects import open_objects
from weft.store.remote.remote_store import RemoteStore
from weft.store.segments import SegmentStore
from weft.store.settings import RemoteSettings, StoreSettings
from weft.store.weight_names import WeightNames
from weft.store.weights_digest import WeightsDigest

log = get_logger(__name__)


def noted_weights(config: EngineConfig) -> WeightsDigest | None:
    """Note the state of the weight files, before the weights are loaded; None without a tier. Raises
    ConfigError."""
    stores = config.tier.kv_disk is not None or config.tier.kv_remote is not None
    return WeightsDigest(config) if stores else None


def names_of(config: EngineConfig, rank: int, weights: WeightsDigest | None) -> WeightNames | None:
    """Return the names of weights in keys of the tier, for the first rank of an engine; None for other ranks
    and without a tier. The parameters are those of ``open_tier``."""
    return WeightNames(weights) if level_flag(config.tier) and _number(config, rank) == 0 else None


def open_tier(
    config: EngineConfig, runner: Runner, rank: int, backends: Backends, weights: WeightsDigest | None
) -> RankTier | None:
    """Return the KV tier of ``rank`` (a global rank) over the caches of ``runner``; None without a tier.
    ``backends``: of the runner's attention. ``weights``: see ``noted_weights``."""
    if weights is None and config.tier.kv_host is None:
        return None
    number = _number(config, rank)
    names = tuple(type(backend).__name__ for backend in backends)
    dims, device = dims_of(config, runner.kv), torch.device(config.device)
    copies = BlockCopies(flat(runner.memory), dims, number, device)
    host = _host_level(config, runner, copies)
    cancel: Callable[[], None] = lambda: None  # noqa: E731
    opener: Callable[[], list[RecordStore]] = list
    if weights is not None:
        weights.start()
        cancel, opener = weights.stop, partial(_open_stores, config, names, weights)
    blocks = _blocks_to_prepare(config, runner, copies.own_bytes) if device.type == "cpu" else []
    return RankTier(
        copies, opener, runner.behind_steps, leads=number == 0, cancel=cancel, host=host, blocks=blocks
    )


def _blocks_to_prepare(config: EngineConfig, runner: Runner, nbytes: Sequence[int]) -> list[int]:
    """Return the maximum number of blocks of each KV cache group with memory before the first use: half of
    each pool, and in total half of the available memory, within cgroup limits, for all ranks here.
    ``nbytes``: bytes of a block at the rank."""
    room, counts = (available_memory() or 0) // (2 * config.ranks_beside), list[int]()
    for pool, each in zip(runner.kv.pools, nbytes, strict=True):
        counts.append(min(pool.num_blocks // 2, room // each) if each else 0)
        room -= counts[-1] * each
    return counts


def _number(config: EngineConfig, rank: int) -> int:
    """Return the number of ``rank`` within its engine."""
    return rank - ranks_of(config.replica, config.parallel.layout.tensor)[0]


def _host_level(config: EngineConfig, runner: Runner, copies: BlockCopies) -> HostLevel | None:
    """Return the level in pinned host memory; None without one. Raise EngineDead if the memory cannot be
    pinned."""
    nbytes = host_bytes(config.tier)
    if not nbytes:
        return None
    memory = RecordBuffer(nbytes).payload
    copies.pin(memory)
    shares = [pool.nbytes(config.dtype) for pool in runner.kv.pools]
    return HostLevel(memory, copies.own_bytes, shares)


def _open_stores(
    config: EngineConfig, attention: tuple[str, ...], weights: WeightsDigest
) -> list[RecordStore]:
    """Open the stores, once the digest of the weights is known. A store that cannot be opened is left out,
    with a warning. Raise ConfigError if no store can be opened."""
    made, tier = numerics(torch.device(config.device), attention), config.tier
    digest = weights.wait()
    if digest is None:
        raise ConfigError(weights.error)
    namespace = kv_namespace(config, digest, made)

    def disk() -> RecordStore:
        settings = StoreSettings(
            folder=disk_folder(tier),
            namespace=namespace,
            budget=tier_bytes(tier),
            ttl=tier.kv_disk_ttl,
            shared=tier.kv_disk_shared,
        )
        return SegmentStore(settings, digest=_digest)

    def remote() -> RecordStore:
        settings = RemoteSettings(namespace=namespace, ttl=tier.kv_disk_ttl)
        return RemoteStore(settings, open_objects(tier.kv_remote or ""), digest=_digest)

    given = ((tier.kv_disk, disk), (tier.kv_remote, remote))
    return stores_that_open([opener for flag, opener in given if flag is not None])


def stores_that_open(openers: Sequence[Callable[[], RecordStore]]) -> list[RecordStore]:
    """Return the stores of ``openers``, in order, without the stores that cannot be opened. Raise the last
    ConfigError if none can be opened."""
    stores = list[RecordStore]()
    for number, opener in enumerate(openers, 1):
        try:
            stores.append(opener())
        except ConfigError as error:
            if number == len(openers) and not stores:
                raise
            log.warning("a level of the KV tier is off: %s", error.message)
    return stores


def _digest(memory: np.ndarray, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    # torch warns about memory that is read-only, such as bytes of a header.
    memory = memory if memory.flags.writeable else memory.copy()
    return digest_spans(torch.from_numpy(memory), spans, seeds)
