"""Opens the KV tier of a rank, from the configuration."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np
import torch

from weft.config.namespace import kv_namespace, numerics_tag
from weft.config.resolved import EngineConfig, KVConfig
from weft.config.sections.tier_section import disk_folder
from weft.config.sharding import local_spec
from weft.config.tiers import tier_bytes
from weft.config.weights_digest import weights_digest
from weft.disagg.protocol.group_layout import group_dims
from weft.disagg.transport.copying import digest_spans
from weft.engine.disagg.rank_transfers import dims_of
from weft.engine.ranks.ranks import ranks_of
from weft.engine.tiers.block_copies import BlockCopies
from weft.engine.tiers.rank_tier import RankTier, flat
from weft.runner.runner import Runner
from weft.store.segments import SegmentStore, StoreSettings
from weft.types.layout import Layout
from weft.types.transfer import GroupDims


def open_tier(config: EngineConfig, runner: Runner, rank: int) -> RankTier | None:
    """Return the KV tier of ``rank`` (a global rank) over the caches of ``runner``; None without a tier."""
    if config.tier.kv_disk is None:
        return None
    number = rank - ranks_of(config.replica, config.parallel.layout.tensor)[0]
    copies = BlockCopies(
        flat(runner.memory), dims_of(config, runner.kv), number, partial(_dims, config, runner.kv)
    )
    return RankTier(copies, partial(_open_store, config), runner.behind_steps, leads=number == 0)


def _open_store(config: EngineConfig) -> SegmentStore:
    """Open the store. Reads all weights if no digest is cached. Raise ConfigError."""
    namespace = kv_namespace(config, weights_digest(config), numerics_tag(config))
    settings = StoreSettings(
        folder=disk_folder(config.tier),
        namespace=namespace,
        budget=tier_bytes(config.tier),
        ttl=config.tier.kv_disk_ttl,
        shared=config.tier.kv_disk_shared,
    )
    return SegmentStore(settings, digest=_digest)


def _digest(memory: np.ndarray, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    # torch warns about memory that is read-only, such as bytes of a header.
    memory = memory if memory.flags.writeable else memory.copy()
    return digest_spans(torch.from_numpy(memory), spans, seeds)


def _dims(config: EngineConfig, kv: KVConfig, ranks: int) -> GroupDims:
    """Return the layout of a group of ``ranks`` ranks for the same model. Raise ConfigError if the model
    cannot be divided so."""
    spec = local_spec(config.spec, Layout(tensor=ranks, data=1, expert=False))
    pairs = zip(kv.pools, config.spec.caches, spec.caches, strict=True)
    pools = [
        (msgspec.structs.replace(pool, cache=whole), msgspec.structs.replace(pool, cache=local))
        for pool, whole, local in pairs
    ]
    whole, local = (msgspec.structs.replace(kv, pools=tuple(pool[side] for pool in pools)) for side in (0, 1))
    return group_dims(whole, local, ranks, config.dtype, snapshots=True)
