"""Transfers of image embeddings: dimensions, and shards of rows."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.disagg.protocol.memory import KINDS, Group
from weft.config.sharding import balanced_share
from weft.disagg.protocol.coverage import Coverage
from weft.disagg.protocol.group_layout import blocks_of, compatible, embedding_dims, placed, tensors_of
from weft.disagg.protocol.sender import TransferRefused, check_bound
from weft.disagg.protocol.spans import Side, SpanPlan, arriving
from weft.disagg.protocol.volume import transfer_bytes
from weft.types import transfer as r
from weft.types.media_item import BLOCK_ROWS
from weft.types.transfer import GroupDims, TransferKey, TransferMessageError

LEVELS, WIDTH, BLOCKS = 3, 5, 40
ROW = LEVELS * WIDTH * 2
KEY = TransferKey(1, 0, 9)


def dims(ranks: int, shards: bool = False, **more: int) -> GroupDims:
    facts = {"levels": LEVELS, "width": WIDTH, "num_blocks": BLOCKS, **more}
    return embedding_dims(**facts, ranks=ranks, dtype="bfloat16", shards=shards)


def side(group: GroupDims, table: list[int], start: int, end: int) -> Side:
    return Side(group, placed((blocks_of(table),), group, start, end))


def table(rng: np.random.Generator, rows: int) -> list[int]:
    ids: list[int] = (1 + rng.permutation(BLOCKS)[: -(-rows // BLOCK_ROWS)]).tolist()
    return ids


def region(group: GroupDims) -> np.ndarray:
    (tensor,) = tensors_of(group)[0]
    return np.zeros(tensor.nbytes, np.uint8)


def rows_of(memory: np.ndarray, ids: list[int], count: int) -> np.ndarray:
    """[levels, rows, bytes of a row in a level]."""
    pool = memory.reshape(LEVELS, 1 + BLOCKS, BLOCK_ROWS, -1)
    return pool[:, ids].reshape(LEVELS, -1, pool.shape[-1])[:, :count]


class Moved:
    """One image from a sender to a receiver, carried out on numpy arrays."""

    def __init__(self, ranks: tuple[int, int], rows: int, shards: bool, start: int = 0) -> None:
        rng = np.random.default_rng(rows)
        self.sender, self.receiver = dims(ranks[0]), dims(ranks[1], shards)
        self.rows, self.start = rows, start
        self.tables = table(rng, rows), table(rng, rows)
        self.source = rng.integers(0, 256, len(region(self.sender)), dtype=np.uint8)
        self.targets = [region(self.receiver) for _ in range(ranks[1])]
        self.sent = [0] * ranks[0]
        """Bytes by each rank of the sender."""
        self.got: list[np.ndarray] = []
        """Map each rank of the receiver to its received rows, of every level."""
        for to in range(ranks[1]):
            self.got.append(self.move(to))

    def move(self, to: int) -> np.ndarray:
        here, there = (
            side(group, ids, self.start, self.rows)
            for group, ids in zip((self.sender, self.receiver), self.tables, strict=True)
        )
        coverage = Coverage(arriving(there, to, self.sender, self.start, self.rows))
        written = np.zeros(len(self.targets[to]), np.uint8)
        for rank in range(self.sender.ranks):
            plan = SpanPlan(here, rank, there, to, self.start, self.rows)
            for part in plan.entries(0, range(LEVELS), 0, self.rows):
                coverage.check(part.target, part.spans[:, 1:])
                coverage.add(part.target, part.spans[:, 1:])
                for source, target, size in part.spans.tolist():
                    self.targets[to][target : target + size] = self.source[source : source + size]
                    written[target : target + size] += 1
                    self.sent[rank] += size
        assert coverage.complete()
        assert written.max(initial=0) <= 1, "bytes came twice"
        came = rows_of(written, self.tables[1], self.rows)
        assert int(came.sum()) == int(written.sum()), "bytes went beside the image's rows"
        assert (came == came[:1, :, :1]).all(), "a row came in part, or not of every level"
        rows = np.flatnonzero(came[0, :, 0])
        expected = rows_of(self.source, self.tables[0], self.rows)[:, rows]
        assert (rows_of(self.targets[to], self.tables[1], self.rows)[:, rows] == expected).all()
        return rows


def test_an_embedding_is_described_by_its_levels_and_rows() -> None:
    group = dims(2, True)
    (kind,) = group.kinds
    assert (kind.kind, kind.layers, kind.block_size, kind.shards) == ("embedding", (0, 1, 2), 64, True)
    assert kind.tensors[0].dims == (("layer", 3), ("block", 41), ("position", 64), ("width", 5))
    (tensor,) = tensors_of(group)[0]
    assert tensor.entry_bytes == WIDTH * 2
    assert not dims(1, True).kinds[0].shards, "one rank takes all rows, and exchanges nothing"


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4), (4, 2), (2, 1)])
def test_every_rank_gets_all_rows_of_all_levels(ranks: tuple[int, int]) -> None:
    for rows in (1, 63, 64, 65, 300):
        moved = Moved(ranks, rows, shards=False)
        assert all((got == np.arange(rows)).all() for got in moved.got)
        assert sum(moved.sent) == ranks[1] * rows * ROW


@pytest.mark.requirement("D14")
@settings(max_examples=60, deadline=None)
@given(
    ranks=st.sampled_from([(1, 2), (1, 4), (2, 4), (2, 2), (3, 6), (4, 2)]),
    rows=st.integers(1, 400),
)
def test_shares_are_balanced_and_tile_the_rows_exactly(ranks: tuple[int, int], rows: int) -> None:
    moved = Moved(ranks, rows, shards=True)
    assert np.concatenate(moved.got).tolist() == list(range(rows))
    sizes = [len(got) for got in moved.got]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert sum(moved.sent) == rows * ROW


def test_an_empty_share_is_done_at_once() -> None:
    moved = Moved((1, 4), 2, shards=True)
    assert [got.tolist() for got in moved.got] == [[0], [1], [], []]
    there = side(moved.receiver, moved.tables[1], 0, 2)
    assert Coverage(arriving(there, 3, moved.sender, 0, 2)).nbytes == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_eight_images_cost_the_sender_exactly_so_much_less(ranks: int) -> None:
    images = [256, 1, 77, 64, 300, 2, 999, 640]
    whole, shared = (
        sum(sum(Moved((1, ranks), rows, shards).sent) for rows in images) for shards in (False, True)
    )
    assert shared == sum(images) * ROW
    assert whole == ranks * shared


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("shards", [False, True])
def test_the_volume_is_what_ranks_expect(ranks: tuple[int, int], shards: bool) -> None:
    for start, rows in ((0, 130), (0, 3), (130, 130)):
        sender, receiver = dims(ranks[0]), dims(ranks[1], shards)
        there = side(receiver, table(np.random.default_rng(0), rows), start, rows)
        arrive = [arriving(there, to, sender, start, rows) for to in range(ranks[1])]
        expected = sum(int(spans[:, 1].sum()) for each in arrive for spans in each.values())
        assert transfer_bytes(sender, receiver, start, rows) == expected


def test_where_the_receiver_has_all_of_it_no_block_is_named_and_nothing_moves() -> None:
    for shards in (False, True):
        sender, receiver = dims(1), dims(2, shards)
        offer = r.Admitted(key=KEY, num_prompt=100, dims=sender)
        ends = (r.Endpoint("shm", "a", 1), r.Endpoint("shm", "b", 2))
        bound = r.Bound(key=KEY, start=100, dims=receiver, blocks=(blocks_of([]),), endpoints=ends)
        check_bound(offer, bound)
        there = Side(receiver, placed(bound.blocks, receiver, 100, 100))
        for rank in range(2):
            assert Coverage(arriving(there, rank, sender, 100, 100)).nbytes == 0
            assert SpanPlan(there, 0, there, rank, 100, 100).entries(0, range(LEVELS), 0, 100) == []
    with pytest.raises(TransferMessageError, match="end before position 100"):
        placed((blocks_of([]),), sender, 99, 100)


@pytest.mark.requirement("D8")
def test_embeddings_of_other_towers_are_not_compatible() -> None:
    one = dims(1)
    assert compatible(one, dims(4, True, num_blocks=7)) is None
    assert "layers" in (compatible(one, dims(1, levels=2)) or "")
    assert "other sizes" in (compatible(one, dims(1, width=6)) or "")
    other = embedding_dims(LEVELS, WIDTH, BLOCKS, 1, "float32", False)
    assert "dtypes" in (compatible(one, other) or "")
    assert "kind is embedding" in (compatible(one, Group([KINDS["full"]], 1, 4, 8).dims) or "")


def test_no_cache_of_sequences_has_shares() -> None:
    import msgspec

    (kind,) = Group([KINDS["latent"]], 2, 4, 8).dims.kinds
    wrong = GroupDims(ranks=2, kinds=(msgspec.structs.replace(kind, shards=True),))
    with pytest.raises(TransferMessageError, match="must have all rows"):
        tensors_of(wrong)
    offer = r.Admitted(key=KEY, num_prompt=3, dims=GroupDims(ranks=2, kinds=(kind,)))
    ends = (r.Endpoint("shm", "a", 1), r.Endpoint("shm", "b", 2))
    with pytest.raises((TransferMessageError, TransferRefused), match="must have all rows"):
        check_bound(offer, r.Bound(key=KEY, start=0, dims=wrong, blocks=(blocks_of([1]),), endpoints=ends))


@given(st.integers(0, 500), st.integers(1, 20))
def test_balanced_shares(size: int, ranks: int) -> None:
    shares = [balanced_share(size, rank, ranks) for rank in range(ranks)]
    assert shares[0][0] == 0
    assert shares[-1][1] == size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(shares))
    sizes = [end - begin for begin, end in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
