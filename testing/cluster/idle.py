"""Invariants of an engine: reservations for images, and complete cleanup when idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from testing.cluster.check import require
from weft.kv.embeddings import EmbeddingCache
from weft.scheduler.encode.encode_scheduler import EncodeScheduler

if TYPE_CHECKING:
    from testing.cluster.engine_process import EngineProcess


def check_reservations(engine_process: EngineProcess) -> None:
    """Raise Violation if blocks wait for the embeddings of a sequence without blocks for all its images.

    Blocks reserved by a running transfer are fine. The rule prevents two sequences that wait for each other.
    """
    scheduler = engine_process.engine.scheduler
    if isinstance(scheduler, EncodeScheduler) or not scheduler._state.images._coming:
        return
    images = scheduler._state.images
    for key, coming in images._coming.items():
        whole = any(one.reserved and key in one.counts for one in images._images.values())
        require(
            whole or coming.transfer is not None,
            f"{engine_process.name}: blocks {coming.held.blocks} wait for a sequence that has not all "
            "of its blocks",
        )


def check_idle(engine_process: EngineProcess) -> None:
    """Raise Violation if an idle engine still has sequences, slots, blocks, transfers or pinned
    embeddings."""
    engine_process.check()
    live, name = sorted(engine_process.engine.live()), engine_process.name
    require(not live, f"{name}: sequences {live} live when nobody asks for any")
    kv, scheduler = engine_process.engine.kv, engine_process.engine.scheduler
    stats = scheduler.stats()
    if isinstance(scheduler, EncodeScheduler):
        book = scheduler._book
        left = (len(book._transfers), book.pixels, book.waits)
        require(not any(left), f"{name}: transfers, pixels, waiting images {left} are left when idle")
        _check_cache(name, scheduler.cache)
        return
    require(stats.free_slots == kv.num_slots, f"{name}: slots are missing when idle")
    blocks = tuple(pool.num_blocks for pool in kv.pools)
    require(stats.free_blocks == blocks, f"{name}: blocks are missing when idle")
    images = scheduler._state.images
    transfers = (len(images), len(images._images), len(images._offers), len(images._coming))
    require(not any(transfers), f"{name}: transfers of images {transfers} are left when idle")
    require(not scheduler._state.media._uses, f"{name}: embeddings are used when nobody runs")
    _check_cache(name, scheduler._state.media.cache)


def _check_cache(name: str, cache: EmbeddingCache) -> None:
    """Raise Violation unless every block is free or in one embedding, and no embedding is pinned."""
    pinned = [held.key for held in cache if held.pins or not held.ready]
    require(not pinned, f"{name}: embeddings {pinned} are promised when idle")
    device = [block for held in cache if not held.on_host for block in held.blocks]
    free = [*cache._free, *cache._leaving, *device]
    require(
        sorted(free) == list(range(1, cache.blocks + 1)), f"{name}: blocks of embeddings are lost: {free}"
    )
    host = [*cache._host_free, *(block for held in cache if held.on_host for block in held.blocks)]
    require(
        sorted(host) == list(range(1, cache.host_blocks + 1)), f"{name}: host blocks are lost: {sorted(host)}"
    )
