"""Exact tokens with videos: frame groups are images except in the prompt; the reference has whole videos."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from tests.e0.rig import make_engine, run, submit
from tests.e0.test_images import SEEDED, Images
from tests.support.seen import Seen
from tests.support.slow import mostly_slow
from tests.support.vision_models import PLACEHOLDER, VIDEO, Clip
from weft.config.sections.all import MediaSection
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=6, logit_bias=((PLACEHOLDER, -100.0), (VIDEO, -100.0)))
JOINED = "qwen2-5-vl"
"""Frame groups without text between, which share rope positions."""
NAMES = ["qwen3-vl", JOINED, "qwen2-vl", "qwen3-5-vision", "qwen3-5-moe-vision"]


class Videos(Images):
    """Prompts with videos, some with several videos and images."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.prompts = cache(self._videos)

    def _videos(self, name: str) -> list[Seen]:
        seen = self.models.seen
        first = seen(name, [5, Clip(4, 2, 3), 4], 1)
        other = first.with_images_of(seen(name, [5, Clip(4, 2, 3), 4], 11))
        return [
            first,
            other,  # the same tokens, other frames
            seen(name, [3, Clip(5, 2, 2), 2, (3, 3), 1, Clip(2, 3, 1), 6], 2),
            seen(name, [Clip(7, 1, 2, fps=1.0), 3], 3),
            first.then([7, 8, 9], seen(name, [2, Clip(2, 2, 2), 3], 5)),
            seen(name, [17], 4),
        ]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Videos:
    return Videos(tmp_path_factory.mktemp("videos"))


@mostly_slow("name", NAMES, [JOINED])
def test_tokens_are_the_reference_s(name: str, videos: Videos) -> None:
    for number, seen in enumerate(videos.prompts(name)):
        expected = videos.models.greedy(name, seen, GREEDY.max_tokens, (PLACEHOLDER, VIDEO))
        assert videos.answer(name, number, 0, GREEDY).tokens == expected, number
    assert videos.answer(name, 0, 0, GREEDY).tokens != videos.answer(name, 1, 0, GREEDY).tokens


@mostly_slow(("depth", "chunk", "tight"), [(1, 1, True), (2, 5, False), (2, 7, True)], [(2, 7, True)])
@mostly_slow("name", NAMES, [NAMES[0], JOINED])
def test_chunks_and_hits(name: str, depth: int, chunk: int, tight: bool, videos: Videos) -> None:
    """In two rounds; the second round has cached prefixes and embeddings."""
    media = videos.tight(name) if tight else MediaSection()
    engine, _ = make_engine(videos.models.folder(name), depth=depth, chunk=chunk, media=media)
    for first in (0, 100):
        batch = videos.batch(name, SEEDED, first)
        answers = run(engine, [[one] for one in batch] if first else [batch])
        videos.check(name, answers, SEEDED, first)
    stats = engine.stats()
    engine.close()
    assert answers[100].num_cached > 0
    assert stats.image_hits > 0


@mostly_slow("name", ["qwen3-vl", JOINED], ["qwen3-vl"])
def test_a_video_that_begins_alike_shares_what_is_alike(name: str, videos: Videos) -> None:
    """Frame groups are found by their frames: a longer video encodes only the new groups."""
    longer = videos.models.seen(name, [5, Clip(6, 2, 3), 4], 1)
    (short, *_) = videos.prompts(name)
    engine, _ = make_engine(videos.models.folder(name))
    run(engine, [[submit(1, short.ids, GREEDY, request=1, media=short.media)]])
    assert engine.stats().images_encoded == 2
    found = run(engine, [[submit(2, longer.ids, GREEDY, request=2, media=longer.media)]])[2]
    assert engine.stats().images_encoded == 3
    engine.close()
    assert found.num_cached > longer.media[1].start
    assert found.tokens == videos.models.greedy(name, longer, GREEDY.max_tokens, (PLACEHOLDER, VIDEO))


def test_another_rate_is_another_prefix(videos: Videos) -> None:
    """Joined groups have rope positions by time: equal frames share embeddings, but no KV entries."""
    one, other = (videos.models.seen(JOINED, [5, Clip(6, 2, 3, fps), 4], 1) for fps in (2.0, 0.25))
    assert one.ids == other.ids
    engine, _ = make_engine(videos.models.folder(JOINED))
    answers = []
    for number, prompt in enumerate((one, other, one), start=1):
        asked = submit(number, prompt.ids, SEEDED, request=1, media=prompt.media)
        answers.append(run(engine, [[asked]])[number])
    assert engine.stats().images_encoded == 3
    engine.close()
    first, second, third = answers
    assert first.tokens == third.tokens != second.tokens
    # Only the first group has equal positions at every rate.
    assert second.num_cached <= one.media[1].start
    assert third.num_cached > one.media[2].start


@mostly_slow("name", NAMES, NAMES[:1])
def test_the_preempted_begin_again(name: str, videos: Videos) -> None:
    engine, _ = make_engine(
        videos.models.folder(name),
        depth=2,
        chunk=5,
        blocks=16 if name in (JOINED, "qwen2-vl") else 20,  # without text between groups, prompts are shorter
        max_num_seqs=4,
        media=videos.tight(name),
    )
    filler = submit(999, [3] * 30, TokenParams(temperature=0.0, max_tokens=60), request=999, priority=-1)
    answers = run(engine, [[filler], *([one] for one in videos.batch(name, GREEDY))])
    stats = engine.stats()
    engine.close()
    videos.check(name, answers, GREEDY)
    assert stats.preemptions > 0
