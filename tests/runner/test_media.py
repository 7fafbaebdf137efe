"""Images on a rank: what is held, which rows read it, how positions count, without a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import MediaLimits
from weft.overlap.split import split
from weft.runner.media import MediaStore, Spans
from weft.types.media import MediaItem, rope_positions, spans_of
from weft.types.plan import BindMedia, DropMedia, Encode, Segment, StepPlan, column

CPU = torch.device("cpu")
LIMITS = MediaLimits(
    patch=2, merge=2, row_bytes=16, cache_bytes=1 << 20, encode_patches=64, most_items=3, sections=True
)


@dataclass
class Made:
    main: torch.Tensor
    levels: torch.Tensor | None


class CountingTower:
    """Row r of an image is (its first byte, r); of level n, n more."""

    def embed(self, image: torch.Tensor) -> Made:
        frames, height, width, colours = image.shape
        assert (frames, colours) == (1, 3)
        rows = (height // 4) * (width // 4)
        main = torch.stack([torch.full((rows,), float(image[0, 0, 0, 0])), torch.arange(rows)], dim=1)
        return Made(main, torch.stack([main + 1, main + 2]))


def encode(media: int, rows: int, columns: int) -> Encode:
    grid = (1, 2 * rows, 2 * columns)
    return Encode(media=media, grid=grid, pixels=bytes([media]) * (grid[1] * 2 * grid[2] * 2 * 3))


def prefill(*rows: tuple[int, int, int]) -> Segment:
    """Rows of (slot, start, count)."""
    slot, start, count = (column(list(values)) for values in zip(*rows, strict=True))
    zero = column([0] * len(rows))
    return Segment(slot=slot, gen=zero, start=start, count=count, logits=zero, sample=zero, next_k=zero)


def store() -> MediaStore:
    return MediaStore(CountingTower(), LIMITS, CPU)


def test_rows_of_chunks_that_begin_and_end_within_images() -> None:
    held = store()
    held.apply(
        [
            encode(1, 1, 3),
            encode(2, 2, 2),
            BindMedia(slot=5, media=1, start=2, count=3),
            BindMedia(slot=5, media=2, start=6, count=4),
            BindMedia(slot=3, media=2, start=0, count=4),
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
    held = store()
    held.apply([encode(1, 4, 8), BindMedia(slot=0, media=1, start=10, count=32)])
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


def test_what_a_plan_binds_is_of_that_plan() -> None:
    held = store()
    held.apply([encode(1, 1, 1), BindMedia(slot=0, media=1, start=0, count=1)])
    assert held.rows(prefill((0, 0, 1))) is not None
    held.apply([])
    assert held.rows(prefill((0, 0, 1))) is None
    held.apply([DropMedia(media=1)])
    assert not len(held)


def test_what_contradicts_the_store_is_an_error() -> None:
    held = store()
    held.apply([encode(1, 1, 1)])
    with pytest.raises(EngineDead, match="names image 2"):
        held.apply([BindMedia(slot=0, media=2, start=0, count=1)])
    with pytest.raises(EngineDead, match="names image 2"):
        held.apply([DropMedia(media=2)])
    with pytest.raises(EngineDead, match="cannot be encoded"):
        held.apply([encode(1, 1, 1)])
    with pytest.raises(EngineDead, match="other rows"):
        held.apply([BindMedia(slot=0, media=1, start=0, count=2)])
    held.clear()
    assert not len(held)
    with pytest.raises(EngineDead, match="cannot be encoded"):
        MediaStore(None, None, CPU).apply([encode(1, 1, 1)])


def items(*places: tuple[int, int, int]) -> list[MediaItem]:
    """Images at (start, rows, columns), in tokens."""
    return [
        MediaItem(key=b"", start=start, count=rows * columns, grid=(1, 2 * rows, 2 * columns))
        for start, rows, columns in places
    ]


@pytest.mark.parametrize(
    "places", [[], [(0, 2, 3)], [(4, 1, 5), (9, 3, 3)], [(1, 2, 2), (6, 4, 1), (12, 1, 1)]]
)
def test_positions_count_by_images_as_in_the_reference(places: list[tuple[int, int, int]]) -> None:
    spans = Spans(4, 3, CPU)
    spans.alloc(1, spans_of(items((0, 3, 3)), 2).ravel())
    mine = spans_of(items(*places), 2)
    spans.alloc(2, column(mine.ravel()))
    positions = np.arange(30)
    made = spans.rope_positions(torch.full((30,), 2), torch.from_numpy(positions))
    assert made.tolist() == rope_positions(mine, positions).tolist()
    for text in (0, 3):  # never allocated, and the spare slot
        alone = spans.rope_positions(torch.full((30,), text), torch.from_numpy(positions))
        assert alone.tolist() == [positions.tolist()] * 3


def test_a_slot_forgets_the_images_of_the_sequence_before() -> None:
    spans = Spans(2, 3, CPU)
    spans.alloc(0, spans_of(items((0, 2, 2), (5, 2, 2)), 2).ravel())
    spans.alloc(0, column([]))
    made = spans.rope_positions(torch.zeros(12, dtype=torch.int64), torch.arange(12))
    assert made.tolist() == [list(range(12))] * 3
    with pytest.raises(EngineDead, match="do not fit"):
        spans.alloc(0, spans_of(items((0, 1, 1), (1, 1, 1), (2, 1, 1), (3, 1, 1)), 2).ravel())
