"""Encode groups in a simulated cluster: detection of planted bugs in their transfers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from testing.cluster.cluster import Cluster, simulate_cluster
from testing.cluster.transfers import image_world
from tests.testing.test_cluster import found_within, log_of
from weft.kv.embeddings import Embedded, EmbeddingCache
from weft.scheduler.encode.encode_scheduler import EncodeScheduler
from weft.scheduler.images.image_transfers import ImageTransfers, SequenceImages
from weft.scheduler.images.media_book import MediaBook
from weft.scheduler.sequence import Sequence
from weft.types.messages import TokenEvent
from weft.types.plan import StepPlan, StepResult

FOUND_BY = {
    "an_embedding_is_let_go_when_it_may_leave": 0,
    "blocks_are_given_back_with_the_sequence": 33,
    "each_image_gets_blocks_when_there_are_some": 247,
    "a_step_takes_what_is_promised": 22,
    "what_is_coming_is_there": 22,
    "embeddings_survive_a_loss": 28,
}
"""Bug -> the schedule that detected the bug, which runs first."""


def test_schedules_without_images_do_not_depend_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = [seed for seed in range(20) if not Cluster(seed).transfers.images.there]
    before = [log_of(seed) for seed in seeds]
    monkeypatch.setattr(image_world, "ALONE", 0.0)
    monkeypatch.setattr(image_world, "BESIDE_PAIRS", 0.0)
    assert 0 < len(seeds) < 20
    assert [log_of(seed) for seed in seeds] == before


@pytest.mark.parametrize("seed", [32331, 41556, 51677])
def test_a_transfer_that_ends_with_a_sequence_that_is_given_back_lets_others_try_again(seed: int) -> None:
    """Planning returns a sequence while others wait for blocks of its transfers.

    The others continue after the transfers end and the requests are repeated.
    """
    simulate_cluster(seed)


# -- planted bugs


def an_embedding_is_let_go_when_it_may_leave(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a sender keeps an embedding until sending may start, not until it was received."""
    commit = EncodeScheduler.commit

    def lets_go(self: EncodeScheduler, plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        sent = self._in_flight[0][1]
        events = commit(self, plan, result, now)
        for transfer in sent:
            held, transfer.held = transfer.held, None
            if held is not None:
                self.cache.unpin(held)
        return events

    patch.setattr(EncodeScheduler, "commit", lets_go)


def blocks_are_given_back_with_the_sequence(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: writable blocks of a transfer are free when the sequence ends, before the transfer
    ends."""
    ended = ImageTransfers.ended

    def frees(self: ImageTransfers, sequence: Sequence, finish: str, error: Any = None) -> None:
        images = self._images.get(sequence.id)
        transfers = [] if images is None else list(images.transfers.values())
        ended(self, sequence, finish, error)
        for transfer in transfers:
            self.freed(transfer)

    patch.setattr(ImageTransfers, "ended", frees)


def each_image_gets_blocks_when_there_are_some(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: images of a sequence get blocks one by one, so that two sequences may block each other."""
    reserve = ImageTransfers._reserve

    def one_by_one(self: ImageTransfers, images: SequenceImages) -> bool:
        whole = dict(images.counts)
        try:
            for key, count in whole.items():
                images.counts = {key: count}
                if not reserve(self, images):
                    return False
        finally:
            images.counts = whole
        return True

    patch.setattr(ImageTransfers, "_reserve", one_by_one)


def a_step_takes_what_is_promised(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: an embedding that is still arriving counts as unused during eviction."""
    victims = EmbeddingCache.victims

    def with_promised(self: EmbeddingCache) -> list[Embedded]:
        coming = [held for held in self._held.values() if held.pins and not held.ready]
        for held in coming:
            held.pins -= 1
        return [*coming, *victims(self)]

    patch.setattr(EmbeddingCache, "victims", with_promised)


def what_is_coming_is_there(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: a prompt continues after the first of its images was received."""
    done = ImageTransfers.done

    def first(self: ImageTransfers, transfer: Any) -> None:
        done(self, transfer)
        images = transfer.images
        if images.transfers and self._images.get(images.sequence.id) is images:
            self.received.append(images.sequence)

    patch.setattr(ImageTransfers, "done", first)
    patch.setattr(MediaBook, "lost", lambda self, sequence, start: False)


def embeddings_survive_a_loss(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: new ranks are assumed to have the embeddings of lost ranks."""

    def forget_less(self: EmbeddingCache) -> None:
        self._ops.clear()
        for held in self._held.values():
            held.step = -1

    patch.setattr(EmbeddingCache, "clear", forget_less)


Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.requirement("D12", "D16", "F48")
@pytest.mark.parametrize(
    ("plant", "says"),
    [
        (an_embedding_is_let_go_when_it_may_leave, "is not its image's|nobody had changed"),
        (blocks_are_given_back_with_the_sequence, "a write of .* lands in blocks|which are promised"),
        (each_image_gets_blocks_when_there_are_some, "has not all of its blocks|late without a fault"),
        (a_step_takes_what_is_promised, "which are promised|unpinned that has no pin"),
        (what_is_coming_is_there, "nothing is planned|is not its image's"),
        (embeddings_survive_a_loss, "is not its image's"),
    ],
)
def test_a_planted_bug_is_found(plant: Plant, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found_within(plant, says, FOUND_BY[plant.__name__], monkeypatch)
