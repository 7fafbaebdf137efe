"""Images on a rank without a model: stored embeddings, rows that read an embedding, positions."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.kv.embeddings import ids
from weft.overlap.split import split
from weft.runner.images.image_store import EmbeddingSpans, MediaStore, pool_shape
from weft.types.media_item import MediaItem, rope_positions, spans_of
from weft.types.plan import (
    BindMedia,
    Encode,
    GatherMedia,
    MoveMedia,
    Segment,
    SendMedia,
    StepPlan,
    column,
)
from weft.types.transfer import TransferKey

CPU = torch.device("cpu")
LIMITS = MediaLimits(
    patch=2,
    merge=2,
    row_bytes=24,
    cache_bytes=10 * 2 * 24,
    host_bytes=4 * 2 * 24,
    encode_patches=64,
    most_items=3,
    sections=True,
    levels=2,
    width=2,
    block_rows=2,
)


@dataclass
class Made:
    main: torch.Tensor
    levels: torch.Tensor | None


class CountingTower:
    """A tower: row r of an image is (first byte, r), and n more at level n."""

    def embed(self, image: torch.Tensor) -> Made:
        frames, height, width, colours = image.shape
        assert (frames, colours) == (1, 3)
        rows = (height // 4) * (width // 4)
        first = torch.full((rows,), float(image[0, 0, 0, 0]))
        main = torch.stack([first, torch.arange(rows, dtype=torch.float32)], dim=1)
        return Made(main, torch.stack([main + 1, main + 2]))


def encode(name: int, rows: int, columns: int, *blocks: int) -> Encode:
    grid = (1, 2 * rows, 2 * columns)
    pixels = bytes([name]) * (grid[1] * 2 * grid[2] * 2 * 3)
    return Encode(blocks=ids(blocks), count=rows * columns, grid=grid, pixels=pixels)


def bind(slot: int, start: int, count: int, *blocks: int) -> BindMedia:
    return BindMedia(slot=slot, start=start, count=count, blocks=ids(blocks))


def prefill(*rows: tuple[int, int, int]) -> Segment:
    """Return a segment with rows of (slot, start, count)."""
    slot, start, count = (column(list(values)) for values in zip(*rows, strict=True))
    zero = column([0] * len(rows))
    return Segment(slot=slot, gen=zero, start=start, count=count, logits=zero, sample=zero, next_k=zero)


def store() -> MediaStore:
    return MediaStore(CountingTower(), LIMITS, CPU)


def test_rows_of_chunks_that_begin_and_end_within_images() -> None:
    held = store()
    held.apply(
        [
            encode(1, 1, 3, 9, 4),
            encode(2, 2, 2, 1, 3),
            bind(5, 2, 3, 9, 4),
            bind(5, 6, 4, 1, 3),
            bind(3, 0, 4, 1, 3),
        ]
    )
    made = held.rows(prefill((9, 0, 2), (5, 4, 4), (3, 3, 2)))
    assert made is not None
    assert made.rows.tolist() == [2, 4, 5, 6]
    assert made.main.tolist() == [[1, 2], [2, 0], [2, 1], [2, 3]]
    assert made.levels is not None
    assert made.levels.tolist() == [[[a + n, b + n] for a, b in made.main.tolist()] for n in (1, 2)]
    assert held.rows(prefill((9, 0, 2))) is None


def test_micro_batches_have_their_own_rows() -> None:
    held = MediaStore(CountingTower(), msgspec.structs.replace(LIMITS, cache_bytes=16 * 48), CPU)
    held.apply([encode(1, 4, 8, *range(16, 0, -1)), bind(0, 10, 32, *range(16, 0, -1))])
    micro_batches = split(StepPlan(step=0, prefill=prefill((0, 0, 60))))
    assert micro_batches is not None
    assert micro_batches.cut
    first, second = held.rows(micro_batches.first.prefill), held.rows(micro_batches.second.prefill)
    assert first is not None
    assert second is not None
    cut = micro_batches.cut
    assert first.rows.tolist() == list(range(10, cut))
    assert second.rows.tolist() == list(range(42 - cut))
    assert torch.cat([first.main, second.main])[:, 1].tolist() == list(range(32))


def test_bindings_last_one_plan() -> None:
    held = store()
    held.apply([encode(1, 1, 1, 7), bind(0, 0, 1, 7)])
    assert held.rows(prefill((0, 0, 1))) is not None
    held.apply([])
    assert held.rows(prefill((0, 0, 1))) is None
    held.apply([bind(0, 0, 1, 7)])
    assert held.rows(prefill((0, 0, 1))) is not None
    held.clear()
    assert held.rows(prefill((0, 0, 1))) is None


@pytest.mark.requirement("D7")
def test_embeddings_return_from_the_host_unchanged() -> None:
    held = store()
    held.apply([encode(1, 1, 3, 9, 4), MoveMedia(blocks=ids([9, 4]), host=ids([2, 4]), up=False)])
    held.apply([encode(2, 2, 2, 4, 9), MoveMedia(blocks=ids([1, 2]), host=ids([2, 4]), up=True)])
    held.apply([bind(0, 0, 3, 1, 2), bind(0, 3, 4, 4, 9)])
    made = held.rows(prefill((0, 0, 7)))
    assert made is not None
    assert made.main.tolist() == [[1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2], [2, 3]]
    assert made.levels is not None
    assert made.levels[1, :3].tolist() == [[3, 2], [3, 3], [3, 4]]


def test_callbacks_send_and_exchange_rows_in_order() -> None:
    """The callbacks run in the order of the updates, with rows of the memory that transfers share."""
    said: list[object] = []

    def gather(pool: torch.Tensor, index: torch.Tensor, count: int) -> None:
        said.append((count, index.tolist(), pool[0, index[0]].tolist()))
        pool[:, index] += 1

    key = TransferKey(1, 2, 3)
    memory = torch.zeros(pool_shape(LIMITS))
    held = MediaStore(CountingTower(), LIMITS, CPU, memory=memory, send=said.append, gather=gather)
    send = SendMedia(key=key, blocks=ids([9, 4]), count=3)
    held.apply([encode(5, 1, 3, 9, 4), GatherMedia(blocks=ids([9, 4]), count=3), send])
    assert said == [(3, [18, 19, 8], [5, 0]), send]
    assert memory[0, 4, 0].tolist() == [6, 3]
    for op in (send, GatherMedia(blocks=ids([9, 4]), count=3)):
        with pytest.raises(EngineDead, match="embedding"):
            store().apply([op])
    with pytest.raises(EngineDead, match="memory"):
        MediaStore(CountingTower(), LIMITS, CPU, memory=memory[:2])


def test_updates_that_contradict_the_store_are_errors() -> None:
    held = store()
    with pytest.raises(EngineDead, match="names block 11 of embeddings; there are 10"):
        held.apply([bind(0, 0, 1, 11)])
    with pytest.raises(EngineDead, match="3 rows is assigned 1 blocks"):
        held.apply([bind(0, 0, 3, 1)])
    with pytest.raises(EngineDead, match="has 4 rows in 3 levels: 3 in 3 were expected"):
        held.apply([msgspec.structs.replace(encode(1, 2, 2, 1, 2), count=3)])
    with pytest.raises(EngineDead, match="names block 5 of embeddings; there are 4"):
        held.apply([MoveMedia(blocks=ids([1]), host=ids([5]), up=True)])
    with pytest.raises(EngineDead, match="another number"):
        held.apply([MoveMedia(blocks=ids([1]), host=ids([1, 2]), up=True)])
    with pytest.raises(EngineDead, match="no vision tower"):
        MediaStore(None, LIMITS, CPU).apply([encode(1, 1, 1, 1)])
    with pytest.raises(EngineDead, match="names block 1 of"):
        MediaStore(None, None, CPU).apply([bind(0, 0, 1, 1)])


def items(*places: tuple[int, int, int]) -> list[MediaItem]:
    """Return images at (start, rows, columns), in tokens."""
    return [
        MediaItem(key=b"", start=start, count=rows * columns, grid=(1, 2 * rows, 2 * columns))
        for start, rows, columns in places
    ]


@pytest.mark.requirement("D15")
@pytest.mark.parametrize(
    "places", [[], [(0, 2, 3)], [(4, 1, 5), (9, 3, 3)], [(1, 2, 2), (6, 4, 1), (12, 1, 1)]]
)
def test_positions_count_by_images_as_in_the_reference(places: list[tuple[int, int, int]]) -> None:
    spans = EmbeddingSpans(4, 3, CPU)
    spans.alloc(1, spans_of(items((0, 3, 3)), 2).ravel())
    mine = spans_of(items(*places), 2)
    spans.alloc(2, column(mine.ravel()))
    positions = np.arange(30)
    made = spans.rope_positions(torch.full((30,), 2), torch.from_numpy(positions))
    assert made.tolist() == rope_positions(mine, positions).tolist()
    for text in (0, 3):  # a slot that was never allocated, and the spare slot
        alone = spans.rope_positions(torch.full((30,), text), torch.from_numpy(positions))
        assert alone.tolist() == [positions.tolist()] * 3


def test_a_slot_forgets_the_images_of_the_sequence_before() -> None:
    spans = EmbeddingSpans(2, 3, CPU)
    spans.alloc(0, spans_of(items((0, 2, 2), (5, 2, 2)), 2).ravel())
    spans.alloc(0, column([]))
    made = spans.rope_positions(torch.zeros(12, dtype=torch.int64), torch.arange(12))
    assert made.tolist() == [list(range(12))] * 3
    with pytest.raises(EngineDead, match="do not fit"):
        spans.alloc(0, spans_of(items((0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)), 2).ravel())
