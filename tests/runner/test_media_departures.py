"""Embeddings between groups in a rank: reports of finished embeddings, and exchange of shards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.runner.test_media import LIMITS, CountingTower, encode
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.config.sharding import balanced_share
from weft.parallel.comm import Comm, FinishedCollective, LocalComm, Pending
from weft.runner.images import media_departures
from weft.runner.images.image_store import MediaStore
from weft.runner.images.media_departures import Departures, Shares
from weft.types.media_item import BLOCK_ROWS
from weft.types.plan import SendMedia
from weft.types.transfer import Blocks, TransferKey

LEVELS, WIDTH, BLOCKS = 3, 4, 8
KEY = TransferKey(1, 2, 3)


class Told:
    """The transfers of a rank, which record calls."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def grow(self, key: TransferKey, blocks: tuple[Blocks, ...]) -> None:
        self.log.append(("grow", key, blocks))

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None:
        self.log.append(("computed", key, layers, begin, end))


def ids(*blocks: int) -> bytes:
    return np.array(blocks, "<i4").tobytes()


def test_an_embedding_may_leave_with_its_blocks_and_all_its_levels() -> None:
    told: Any = Told()
    Departures(told, LEVELS).send(SendMedia(key=KEY, blocks=ids(4, 2), count=65))
    blocks = (Blocks(first=0, ids=ids(4, 2)),)
    assert told.log == [("grow", KEY, blocks), ("computed", KEY, (0, 1, 2), 0, 65)]


@pytest.mark.parametrize(("blocks", "count"), [((1,), 65), ((1, 2), 64), ((), 0)])
def test_a_send_needs_the_blocks_of_its_rows(blocks: tuple[int, ...], count: int) -> None:
    told: Any = Told()
    with pytest.raises(EngineDead, match="is sent out of"):
        Departures(told, LEVELS).send(SendMedia(key=KEY, blocks=ids(*blocks), count=count))
    assert told.log == []


@pytest.mark.requirement("D11")
def test_an_embedding_may_leave_only_once_it_is_there() -> None:
    """A plan encodes and sends. The transfers are notified after the tower, not before."""
    seen: list[torch.Tensor] = []
    store = MediaStore(
        CountingTower(), LIMITS, torch.device("cpu"), send=lambda op: seen.append(store.pool[:, 3:5].clone())
    )
    send = SendMedia(key=KEY, blocks=ids(3, 4), count=4)
    store.apply([encode(9, 2, 2, 3, 4), send])
    (there,) = seen
    assert there[0, :, :, 0].unique().tolist() == [9.0]
    assert torch.equal(there, store.pool[:, 3:5])


class Threads:
    """The ranks of a group as threads with a barrier."""

    def __init__(self, ranks: int) -> None:
        self.given: list[Any] = [None] * ranks
        self.barrier = threading.Barrier(ranks, timeout=deadline(20.0))
        self.sizes: list[tuple[int, ...]] = []

    def comm(self, rank: int) -> Comm:
        class One(LocalComm):
            def all_gather(_, x: torch.Tensor) -> Pending:
                self.given[rank] = x
                self.barrier.wait()
                assert len({tuple(one.shape) for one in self.given}) == 1, "pieces are not equal"
                if not rank:
                    self.sizes.append(tuple(x.shape))
                made = torch.stack(self.given)
                self.barrier.wait()
                return FinishedCollective(made)

        made = One()
        made.rank, made.size = rank, len(self.given)
        return made

    def run(self, work: Callable[[int], None]) -> None:
        errors: list[BaseException] = []

        def one(rank: int) -> None:
            try:
                work(rank)
            except BaseException as error:
                self.barrier.abort()
                errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(self.given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(deadline(30.0))
        if errors:
            raise errors[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 65, 127, 200])
@pytest.mark.parametrize("most", [media_departures.MOST_BYTES, 500])
def test_shares_become_whole_on_every_rank(
    ranks: int, count: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media_departures, "MOST_BYTES", most)
    torch.manual_seed(count)
    whole = torch.randn(LEVELS, (1 + BLOCKS) * BLOCK_ROWS, WIDTH)
    rows = np.array([5, 2, 7, 1])[np.arange(count) // BLOCK_ROWS] * BLOCK_ROWS + np.arange(count) % BLOCK_ROWS
    index = torch.from_numpy(rows)
    pools = []
    for rank in range(ranks):
        pool = torch.full_like(whole, -1.0)
        begin, end = balanced_share(count, rank, ranks)
        pool[:, index[begin:end]] = whole[:, index[begin:end]]
        pools.append(pool)
    threads = Threads(ranks)
    threads.run(lambda rank: Shares(threads.comm(rank)).gather(pools[rank], index, count))
    expected = torch.full_like(whole, -1.0)
    expected[:, index] = whole[:, index]
    for pool in pools:
        assert torch.equal(pool, expected), "a row differs, or one beside the image's was written"
    assert sum(size[1] for size in threads.sizes) == -(-count // ranks)
    row = LEVELS * WIDTH * 4 * ranks
    assert all(size[1] * row <= max(most, row) for size in threads.sizes), "a collective is over its bound"


def test_to_warm_up_touches_the_null_block_alone() -> None:
    pools = [torch.randn(LEVELS, 2 * BLOCK_ROWS, WIDTH) for _ in range(2)]
    before = [pool.clone() for pool in pools]
    threads = Threads(2)
    threads.run(lambda rank: Shares(threads.comm(rank)).warm_up(pools[rank]))
    assert len(threads.sizes) == 1
    for pool, was in zip(pools, before, strict=True):
        assert torch.equal(pool[:, BLOCK_ROWS:], was[:, BLOCK_ROWS:])
