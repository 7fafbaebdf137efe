"""A plan in a rank of an encode group, with a real tower and transfers that record calls."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.seen import SeeingModels
from tests.support.slowness import deadline
from tests.support.vision_models import random_image
from weft.common.errors import EngineDead, ErrorInfo
from weft.config.families import load_spec
from weft.config.resolved import KVConfig
from weft.config.sections.all import MediaSection
from weft.config.sizing.media_limits import media_limits
from weft.models.tower import TowerAlone, load_tower
from weft.models.vision import Embedding
from weft.runner.encode_runner import EncodeRunner
from weft.runner.exports import RankTransfers
from weft.runner.images.image_store import pool_shape
from weft.types.plan import AllocSlot, Encode, MoveMedia, SendMedia, SlotUpdate, StepPlan
from weft.types.sampling import TokenParams
from weft.types.transfer import Endpoint, TransferKey

Tensor = torch.Tensor
CPU = torch.device("cpu")
KEYS = [TransferKey(number, 0, 1) for number in range(8)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("towers"))


class Notes:
    """A ``Transfer`` that only records calls."""

    def __init__(self) -> None:
        self.grown: dict[TransferKey, bytes] = {}
        self.computed_: dict[TransferKey, tuple[tuple[int, ...], int, int]] = {}
        self.failed: dict[TransferKey, ErrorInfo] = {}
        self.closed = False

    def grow(self, key: TransferKey, blocks: Any) -> None:
        (one,) = blocks
        self.grown[key] = one.ids

    def computed(self, key: TransferKey, layers: tuple[int, ...], begin: int, end: int) -> None:
        assert key in self.grown
        self.computed_[key] = (layers, begin, end)

    def fail(self, key: TransferKey, error: ErrorInfo) -> None:
        self.failed[key] = error

    def close(self) -> None:
        self.closed = True


class Watched:
    """A tower that counts calls and fails for images with chosen first bytes."""

    def __init__(self, tower: Any, bad: frozenset[int] = frozenset(), never_together: bool = False) -> None:
        self.tower, self.bad, self.never_together = tower, bad, never_together
        self.calls: list[int] = []
        self.short = False

    def _look(self, images: list[Tensor]) -> None:
        self.calls.append(len(images))
        if any(int(image.flatten()[0]) in self.bad for image in images):
            raise ValueError("planted")

    def embed(self, image: Tensor) -> Embedding:
        self._look([image])
        made: Embedding = self.tower.embed(image)
        return Embedding(main=made.main[1:], levels=None) if self.short else made

    def embed_batch(self, images: list[Tensor]) -> list[Embedding]:
        self._look(images)
        if self.never_together:
            raise RuntimeError("planted")
        made: list[Embedding] = self.tower.embed_batch(images)
        return made


class Rig:
    """One rank with a pool of 6 blocks, and 4 blocks in host memory."""

    def __init__(self, models: SeeingModels, name: str, **more: Any) -> None:
        folder = models.folder(name)
        spec = load_spec(str(folder))
        row = media_limits(spec, "float64", 64, MediaSection())
        assert row is not None
        section = MediaSection(
            mm_cache_bytes=str(6 * 64 * row.row_bytes), mm_host_cache_bytes=str(4 * 64 * row.row_bytes)
        )
        limits = media_limits(spec, "float64", 64, section)
        assert limits is not None
        assert (limits.blocks, limits.host_blocks) == (6, 4)
        self.patch = limits.patch
        self.model: TowerAlone = load_tower(str(folder), spec, torch.float64, CPU, progress=False)
        self.tower = Watched(
            self.model.vision, more.pop("bad", frozenset()), more.pop("never_together", False)
        )
        self.notes = Notes()
        self.pool = torch.full(pool_shape(limits), torch.nan, dtype=torch.float64)
        transfers: Any = RankTransfers(
            transfer=self.notes,  # type: ignore[arg-type]
            reports=None,  # type: ignore[arg-type]
            endpoint=Endpoint("loopback", "", 0),
            memory=[[self.pool]],
            close=self.notes.close,
        )
        kv = KVConfig(
            pools=(), block_size=64, enable_prefix_caching=False, max_model_len=64, num_slots=0, media=limits
        )
        self.runner = EncodeRunner(
            self.tower, kv, dtype=torch.float64, device=CPU, varying=("linear",), transfers=transfers, **more
        )
        self.step = 0

    def image(self, first: int, height: int = 24, width: int = 40) -> Tensor:
        image = random_image(height, width, seed=first)
        image.view(-1)[0] = first
        return image

    def encode(self, image: Tensor, *blocks: int, count: int | None = None) -> Encode:
        rows, columns = image.shape[1] // self.patch, image.shape[2] // self.patch
        return Encode(
            blocks=packed(*blocks),
            count=count or rows * columns // 4,
            grid=(1, rows, columns),
            pixels=image.numpy().tobytes(),
        )

    def run(self, *ops: SlotUpdate) -> float:
        """Run a plan. Return the seconds of encoding."""
        handle = self.runner.forward(StepPlan(step=self.step, ops=ops))
        self.runner.sample(handle)
        result = self.runner.read(handle)
        assert result.step == self.step
        assert len(result.rows) == len(result.tokens) == 0
        assert self.runner.done(handle)
        self.step += 1
        return handle.encode_seconds

    def expected(self, image: Tensor) -> Tensor:
        """Return [levels, rows, width] of one image."""
        with torch.inference_mode():
            made = self.model.vision.embed(image)
        return made.main[None] if made.levels is None else torch.cat([made.main[None], made.levels])

    def check(self, image: Tensor, *blocks: int, exact: bool = False) -> None:
        expected = self.expected(image)
        rows = self.pool[:, list(blocks)].flatten(1, 2)[:, : expected.shape[1]]
        if exact:
            assert torch.equal(rows, expected)
        assert (rows - expected).abs().max() <= 1e-12 * expected.abs().max()


def packed(*blocks: int) -> bytes:
    return np.array(blocks, np.int32).tobytes()


def send(key: TransferKey, count: int, *blocks: int) -> SendMedia:
    return SendMedia(key=key, blocks=packed(*blocks), count=count)


@pytest.fixture
def rigs(models: SeeingModels) -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def one(name: str = "qwen3-vl", **more: Any) -> Rig:
        made.append(Rig(models, name, **more))
        return made[-1]

    yield one
    for rig in made:
        rig.runner.close()
        assert rig.notes.closed


@pytest.mark.requirement("D3", "D4")
@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-vision", "kimi-k25"])
def test_a_plan_is_one_call_of_the_tower(rigs: Callable[..., Rig], name: str) -> None:
    """Rows are split by the count of each image, columns by level."""
    rig = rigs(name)
    images = [rig.image(1), rig.image(2, 8, 8), rig.image(3, 40, 24)]
    seconds = rig.run(
        rig.encode(images[0], 2),
        send(KEYS[0], 15, 2),
        rig.encode(images[1], 5),
        rig.encode(images[2], 1),
        send(KEYS[1], 15, 1),
    )
    assert rig.tower.calls == [3]
    assert seconds > 0
    for image, block in zip(images, (2, 5, 1), strict=True):
        rig.check(image, block)
    levels = tuple(range(len(rig.pool)))
    assert rig.notes.computed_ == {KEYS[0]: (levels, 0, 15), KEYS[1]: (levels, 0, 15)}
    assert rig.notes.grown[KEYS[1]] == packed(1)
    assert rig.run(send(KEYS[2], 15, 2)) == 0.0


def test_deterministic_groups_encode_one_by_one(rigs: Callable[..., Rig]) -> None:
    rig = rigs(together=False)
    images = [rig.image(1), rig.image(2), rig.image(3, 8, 8)]
    rig.run(*(rig.encode(image, 1 + number) for number, image in enumerate(images)))
    assert rig.tower.calls == [1, 1, 1]
    assert rig.runner.varying == ()
    for number, image in enumerate(images):
        rig.check(image, 1 + number, exact=True)
    assert rigs().runner.varying == ("linear", "images encoded together")


@pytest.mark.requirement("D5")
@pytest.mark.parametrize("bad", [{2}, {1, 3}, {1, 2, 3}, set()])
def test_a_batch_that_fails_is_encoded_one_by_one(rigs: Callable[..., Rig], bad: set[int]) -> None:
    """Images that fail alone fail their transfers. The other images are sent."""
    rig = rigs(bad=frozenset(bad), never_together=True)
    images = {number: rig.image(number) for number in (1, 2, 3)}
    ops: list[SlotUpdate] = []
    for number, image in images.items():
        ops += [rig.encode(image, number), send(KEYS[number], 15, number)]
    rig.run(*ops)
    assert rig.tower.calls == [3, 1, 1, 1]
    assert rig.notes.failed.keys() == {KEYS[number] for number in bad}
    assert {error.code for error in rig.notes.failed.values()} <= {"image_failed"}
    assert rig.notes.computed_.keys() == {KEYS[number] for number in images.keys() - bad}
    for number in images.keys() - bad:
        rig.check(images[number], number)


def test_a_failed_image_is_never_sent(rigs: Callable[..., Rig]) -> None:
    """A failed image is not sent after a move to host memory and back. Another image in the same blocks
    is."""
    rig = rigs(bad=frozenset({2}))
    rig.run(rig.encode(rig.image(2), 4))
    rig.run(send(KEYS[0], 15, 4))
    rig.run(MoveMedia(blocks=packed(4), host=packed(2), up=False), rig.encode(rig.image(1), 4))
    rig.run(send(KEYS[1], 15, 4), MoveMedia(blocks=packed(6), host=packed(2), up=True))
    rig.run(send(KEYS[2], 15, 6))
    assert rig.notes.failed.keys() == {KEYS[0], KEYS[2]}
    assert rig.notes.computed_.keys() == {KEYS[1]}


@pytest.mark.requirement("D4")
def test_rows_that_are_not_those_of_the_prompt(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.run(rig.encode(rig.image(1), 1, count=14), rig.encode(rig.image(2), 2))
    rig.run(send(KEYS[0], 14, 1), send(KEYS[1], 15, 2))
    assert "15 rows in the tower, and 14 in the prompt" in rig.notes.failed[KEYS[0]].message
    assert rig.notes.computed_.keys() == {KEYS[1]}


def test_tiers(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    image = rig.image(7)
    rig.run(rig.encode(image, 1))
    rig.run(MoveMedia(blocks=packed(1), host=packed(3), up=False), rig.encode(rig.image(8), 1))
    rig.run(MoveMedia(blocks=packed(5), host=packed(3), up=True))
    rig.check(image, 5)
    rig.check(rig.image(8), 1)


def test_a_failed_image_is_forgotten_with_its_blocks(rigs: Callable[..., Rig]) -> None:
    """The failure is also forgotten when other images divide the blocks differently."""
    rig = rigs(bad=frozenset({2}))
    rig.run(rig.encode(rig.image(2), 4, 5), rig.encode(rig.image(2), 6))
    assert len(rig.runner._spoiled) == 2
    rig.run(rig.encode(rig.image(1), 5), rig.encode(rig.image(3), 4, 3))
    assert list(rig.runner._spoiled) == [(False, packed(6))]
    rig.run(rig.encode(rig.image(1), 6))
    assert not rig.runner._spoiled


def test_plans_that_cannot_be_right(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    rig.run()
    rig.step = 7
    with pytest.raises(EngineDead, match="step 7 follows step 0"):
        rig.run()
    with pytest.raises(EngineDead, match="an earlier step failed"):
        rig.run()
    rig.runner.reset()
    rig.run()
    slot = AllocSlot(
        slot=0,
        gen=1,
        choice=0,
        seed=0,
        params=TokenParams(),
        num_prompt=1,
        num_cached=0,
        token_ids=np.zeros(1, np.int32),
    )
    with pytest.raises(EngineDead, match="AllocSlot, which is not supported"):
        rig.run(slot)


@pytest.mark.requirement("D2")
def test_a_launch_does_not_wait_for_the_tower(rigs: Callable[..., Rig]) -> None:
    """The end of a step rings the wake-up descriptor."""
    rig = rigs()
    go = threading.Event()
    look = rig.tower._look

    def slow(images: list[Tensor]) -> None:
        assert go.wait(deadline(30))
        look(images)

    rig.tower._look = slow  # type: ignore[method-assign]
    handle = rig.runner.forward(StepPlan(step=0, ops=(rig.encode(rig.image(1), 1),)))
    assert not rig.runner.done(handle)
    assert select.select([rig.runner.wakeup.descriptor], [], [], 0.0)[0] == []
    go.set()
    assert select.select([rig.runner.wakeup.descriptor], [], [], 30.0)[0]
    assert rig.runner.done(handle)
    rig.runner.wakeup.clear()
    assert select.select([rig.runner.wakeup.descriptor], [], [], 0.0)[0] == []
    rig.runner.read(handle)


@pytest.mark.requirement("D2")
def test_a_step_that_hangs_is_late(rigs: Callable[..., Rig]) -> None:
    """No caller waits for a hung step; the next check finds the failure. A step behind a slow step is not
    late."""
    rig = rigs(step_timeout=deadline(60.0))
    go = threading.Semaphore(0)
    look = rig.tower._look

    def slow(images: list[Tensor]) -> None:
        assert go.acquire(timeout=deadline(60.0))
        look(images)

    rig.tower._look = slow  # type: ignore[method-assign]
    first = rig.runner.forward(StepPlan(step=0, ops=(rig.encode(rig.image(1), 1),)))
    second = rig.runner.forward(StepPlan(step=1, ops=(rig.encode(rig.image(2), 2),)))
    go.release()
    rig.runner.read(first)
    assert not rig.runner.done(second)
    rig.runner._timeout = 0.2
    assert rig.runner._due(second) == rig.runner._ended + 0.2 > second.launched + 0.2
    until = time.monotonic() + deadline(30.0)
    while not rig.runner.done(second) and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(EngineDead, match="in time"):
        rig.runner.read(second)
    go.release()


def test_memory_of_others_is_the_pool(rigs: Callable[..., Rig]) -> None:
    rig = rigs()
    assert rig.runner.embeddings is not None
    assert rig.runner._store.pool is rig.pool
