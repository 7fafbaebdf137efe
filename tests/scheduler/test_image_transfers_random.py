"""Random loads of images from other groups: no starvation, no lost block, no early reuse of a block.

Transfers fail, are slow or are answered late. Ranks are lost, clients leave, pools are small. See
``image_world``.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from tests.scheduler.fake_runner import BAD_SEED, kv_config
from tests.scheduler.image_world import World, limits
from tests.scheduler.test_media import ask, random_parts
from tests.support.slow import mostly_slow, seeds
from weft.common.errors import EngineDead, InvalidRequest
from weft.kv.embeddings import EmbeddingCache
from weft.scheduler.images.image_transfers import ImageTransfers
from weft.scheduler.images.media_book import MediaBook
from weft.types.grammar import Text


def random_world(seed: int, harm: float = 1.0) -> World:
    """Return a world after a random load. With ``harm`` 0 nothing fails, no client leaves, no rank is
    lost."""
    rng = random.Random(seed)
    tower = harm > 0 and rng.random() < 0.4
    kv = kv_config(
        blocks=rng.choice([14, 24, 64]),
        window=rng.choice([None, None, 6]),
        slots=rng.choice([4, 12]),
        caching=rng.random() < 0.6,
        states=rng.choice([0, 0, 5]),
        copies=rng.choice([1, 1, 3]),
        media=limits(
            cache_bytes=rng.choice([42, 48, 90]),
            block_rows=rng.choice([1, 3, 4]),
            host_bytes=rng.choice([0, 0, 24, 60]),
            encode_patches=rng.choice([1, 8, 40]),
            tower=tower,
            shards=rng.random() < 0.4,
        ),
    )
    world = World(
        kv,
        rng.choice([1, 2]),
        seed,
        harm,
        step_policy=rng.choice(["mixed", "exclusive"]),
        long_prefill_token_threshold=rng.choice([0, 1, 3, 7]),
        max_num_seqs=rng.choice([1, 2, 8]),
    )
    for number in range(rng.choice([6, 25])):
        load(world, rng, number)
        for _ in range(rng.choice([0, 0, 1, 8])):
            world.turn()
        if rng.random() < 0.08 * harm:
            world.abort(rng.choice(world.streams))
        if rng.random() < 0.04 * harm:
            world.lose()
    world.run(120.0)  # four times the slowest case
    world.check_end()
    return world


def load(world: World, rng: random.Random, number: int) -> None:
    """Submit one request of 1 to 3 choices."""
    parts = random_parts(rng)
    own = rng.random() < 0.5
    for choice in range(rng.choice([1, 1, 1, 3])):
        request = ask(
            0,
            *parts,
            request=500 + number,
            choice=choice,
            seed=rng.choice([1, 1, 1, 2, BAD_SEED]),
            priority=rng.choice([0, 0, 0, 1]),
            max_tokens=rng.randint(1, 12),
        )
        if rng.random() < 0.1:
            request = msgspec.structs.replace(request, grammar=Text(text="x"))
        world.ask(request, transfers=own or choice == 0)


@pytest.mark.requirement("D16")
@seeds(7, 20, 1000)
def test_random_loads(seeds: Sequence[int]) -> None:
    seen: set[str] = set()
    hits = moved = lost = preempted = encoded = 0
    for seed in seeds:
        world = random_world(seed)
        stats = world.scheduler.stats()
        seen |= world.seen
        hits += stats.image_hits
        moved += world.runner.moved
        lost += stats.recoveries
        preempted += stats.preemptions
        encoded += stats.images_encoded
    assert min(hits, moved, lost, preempted, encoded) > 0
    assert seen >= {
        "evicted",
        "TransferWanted",
        "TransferReceived",
        "TransferFailed",
        "TransferFreed",
        "ReserveTransfer",
        "CancelTransfer",
    }


@pytest.mark.requirement("D17")
@seeds(10, 30, 30)
def test_without_faults_no_sequence_is_sent_again(seeds: Sequence[int]) -> None:
    """No sequence waits longer than a transfer may take, whichever resource is short.

    Preempted sequences and sequences without transfers may still have to request images again.
    """
    calm = 0
    for seed in seeds:
        world = random_world(seed, harm=0.0)
        most = max(stream.attempts for stream in world.streams)
        if world.scheduler.stats().preemptions == 0:
            calm += 1
            assert {stream.attempts for stream in world.streams if stream.transfer_choices} == {1}, seed
            assert most <= 2
    assert calm > len(seeds) // 3


def test_many_requests_with_many_images_and_room_for_one() -> None:
    """The pool holds the images of one request. All requests are served, in order."""
    world = World(kv_config(blocks=64, media=limits(cache_bytes=18 * 3)), 2, max_num_seqs=4)
    for number in range(40):
        world.ask(ask(0, 5 * number + 4, [3], 5 * number + 3, [4], 5 * number + 9, [number % 7]))
    world.run(40.0)
    world.check_end()
    assert {stream.attempts for stream in world.streams} == {1}


def _never(*rest: Any) -> None:
    return None


_ANSWER = ImageTransfers._reserve


def _greedy(transfers: ImageTransfers, images: Any) -> bool:
    """Planted bug: reserve blocks as soon as one image fits."""
    counts = images.counts
    for key in list(counts):
        images.counts = {key: counts[key]}
        _ANSWER(transfers, images)
    images.counts = counts
    return True


def _hasty(cache: EmbeddingCache, blocks: int, victims: Any) -> bool:
    """Planted bug: reuse blocks that plans in flight still touch."""
    if not cache._make_room(blocks, victims):
        return False
    cache._free += cache._leaving
    cache._leaving.clear()
    return True


def _freed_with_the_sequence(transfers: ImageTransfers, transfer: Any) -> Any:
    if transfer.over:
        return None
    transfer.over = True
    transfers.freed(transfer)
    return transfer.images.sequence


def _come(transfers: ImageTransfers, transfer: Any, held: Any) -> None:
    """Planted bug: mark the image as ready, but never release the pin."""
    transfers._coming.pop(held.key, None)
    held.ready, held.whole = True, not transfers._book.shards


def _whole(transfers: ImageTransfers, transfer: Any, held: Any) -> None:
    _ARRIVE(transfers, transfer, held)
    held.whole = True


_ARRIVE = ImageTransfers._arrive
BUGS: dict[str, tuple[Any, str, Any]] = {
    "blocks are given to each image as they come": (ImageTransfers, "_reserve", _greedy),
    "a room writes where a plan reads": (EmbeddingCache, "make_room", _hasty),
    "what failed is given away before it is free": (ImageTransfers, "failed", _freed_with_the_sequence),
    "what landed stays pinned": (ImageTransfers, "_arrive", _come),
    "shares are read as if they were whole": (ImageTransfers, "_arrive", _whole),
    "what is wanted may go": (MediaBook, "wants", lambda book, key: False),
    "who lacks an image waits for ever": (MediaBook, "lost", lambda book, sequence, start: False),
    "who is late is not given back": (ImageTransfers, "late", lambda transfers, now: []),
}


@pytest.mark.requirement("D16")
@mostly_slow("bug", list(BUGS), 2)
def test_planted_bugs_are_seen(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The random loads above detect each planted bug."""
    where, name, what = BUGS[bug]
    monkeypatch.setattr(where, name, what, raising=False)
    with pytest.raises((AssertionError, EngineDead, KeyError, InvalidRequest)):
        _all_of_it()


def _all_of_it() -> None:
    for seed in range(60):
        random_world(seed, harm=float(seed % 2))
        if seed < 3:
            test_many_requests_with_many_images_and_room_for_one()
