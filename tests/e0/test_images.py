"""Exact tokens with images in float64, for any chunks and any batch."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import MAX_LEN, Answer, make_engine, replaying, run, spec_of, submit
from tests.support.expert_groups import on_layout
from tests.support.pairwise import sampled
from tests.support.seen import SeeingModels, Seen
from tests.support.slow import mostly_slow
from tests.support.vision_models import PLACEHOLDER
from weft.config.sections.all import MediaSection, SpeculationSection
from weft.config.sizing.media_limits import media_limits, most_tokens
from weft.runner import drafting
from weft.runner.graphs import graphs
from weft.types.layout import Layout
from weft.types.messages import Submit
from weft.types.plan import BindMedia, Encode
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=6, logit_bias=((PLACEHOLDER, -100.0),))
"""The reference searches an image for every placeholder token, even for generated tokens."""
SEEDED = TokenParams(temperature=0.8, top_p=0.95, max_tokens=6, repetition_penalty=1.1)
NAMES = ["qwen3-vl", "qwen3-5-moe-vision", "kimi-k25", "qwen2-5-vl", "qwen2-vl"]


class Images:
    """Prompts of each model, and the answers of an engine that runs one sequence at a time in one chunk."""

    def __init__(self, root: Path) -> None:
        self.models = SeeingModels(root)
        self.prompts = cache(self._prompts)
        self.answer = cache(self._answer)

    def _prompts(self, name: str) -> list[Seen]:
        seen = self.models.seen
        first = seen(name, [5, (2, 3), 4], 1)
        other = first.with_images_of(seen(name, [5, (2, 3), 4], 11))
        return [
            first,
            other,  # the same tokens, another image
            seen(name, [3, (3, 3), 2, (1, 4), 6], 2),
            seen(name, [(5, 6), 3], 3),
            seen(name, [17], 4),
            first.then([7, 8, 9], seen(name, [2, (2, 2), 3], 5)),
            other.then([7, 8, 9], seen(name, [2, (2, 2), 3], 5)),
            seen(name, [1, (1, 1), 1, (3, 3), 2], 6),
            seen(name, [9, (2, 3), 1], 1),  # the first image after another text
        ]

    def tight(self, name: str) -> MediaSection:
        """Return limits for the largest image only, with one image in a step."""
        spec = spec_of(self.models.folder(name))
        limits = media_limits(spec, "float64", MAX_LEN, MediaSection())
        assert limits is not None
        assert spec.vision is not None
        block = limits.block_rows * limits.row_bytes
        least = limits.blocks_of(most_tokens(spec.vision.media)) * block
        return MediaSection(mm_cache_bytes=str(least), max_encode_patches=1)

    def _answer(self, name: str, number: int, choice: int, params: TokenParams) -> Answer:
        engine, _ = make_engine(self.models.folder(name), caching=False, max_num_seqs=1)
        answers = run(engine, [[self.submit(name, 1, number, params, choice)]])
        engine.close()
        return answers[1]

    def submit(
        self, name: str, sequence: int, number: int, params: TokenParams, choice: int = 0, **more: Any
    ) -> Submit:
        seen = self.prompts(name)[number]
        return submit(sequence, seen.ids, params, request=number, choice=choice, media=seen.media, **more)

    def batch(self, name: str, params: TokenParams, first: int = 0) -> list[Submit]:
        return [self.submit(name, first + n, n, params) for n in range(len(self.prompts(name)))]

    def check(self, name: str, answers: dict[int, Answer], params: TokenParams, first: int = 0) -> None:
        for number in range(len(self.prompts(name))):
            expected = self.answer(name, number, 0, params)
            assert answers[first + number].ends == expected.ends
            assert answers[first + number].tokens == expected.tokens, number


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("images"))


@mostly_slow("name", NAMES, NAMES[:1])
def test_tokens_are_the_reference_s(name: str, images: Images) -> None:
    for number, seen in enumerate(images.prompts(name)):
        expected = images.models.greedy(name, seen, GREEDY.max_tokens)
        assert images.answer(name, number, 0, GREEDY).tokens == expected, number


@sampled(
    {
        "sampling": ["greedy", "seeded"],
        "how": [(1, 0, False), (1, 1, True), (2, 5, False), (2, 7, True)],
        "name": NAMES,
    },
    slow=True,
)
def test_chunks_and_hits(name: str, how: tuple[int, int, bool], sampling: str, images: Images) -> None:
    """In two rounds; the second round has cached prefixes and embeddings.

    ``how``: steps in flight, the size of chunks, and True for little space for embeddings.
    """
    depth, chunk, tight = how
    params = GREEDY if sampling == "greedy" else SEEDED
    media = images.tight(name) if tight else MediaSection()
    engine, runner = make_engine(
        images.models.folder(name), depth=depth, chunk=chunk, media=media, graphs=replaying(0)
    )
    for first in (0, 100):
        batch = images.batch(name, params, first)
        answers = run(engine, [[one] for one in batch] if first else [batch])
        images.check(name, answers, params, first)
        assert answers[first + 1].num_cached < len(images.prompts(name)[1].ids) - 4 or first
    stats = engine.stats()
    engine.close()
    assert answers[100].num_cached > 0
    assert answers[100].num_cached == answers[101].num_cached
    assert stats.image_hits > 0
    ops = [op for plan in runner.plans for op in plan.ops]
    encoded = sum(isinstance(op, Encode) for op in ops)
    assert encoded == stats.images_encoded >= 7
    distinct = {item.key for one in images.prompts(name) for item in one.media}
    assert (encoded > len(distinct)) == tight
    if chunk:
        binds = [(op.slot, op.start, op.count) for op in ops if isinstance(op, BindMedia)]
        assert len(binds) > encoded
    if depth == 2:
        assert runner.deepest == 2


@pytest.mark.requirement("D28")
def test_the_same_tokens_with_other_images_share_what_is_before_them(images: Images) -> None:
    name = "qwen3-5-moe-vision"
    engine, _ = make_engine(images.models.folder(name))
    one, other = (images.submit(name, n, n, GREEDY) for n in (0, 1))
    first = run(engine, [[one]])[0]
    second = run(engine, [[other]])[1]
    again = run(engine, [[images.submit(name, 2, 0, GREEDY)]])[2]
    engine.close()
    assert one.prompt_ids == other.prompt_ids
    assert (second.num_cached, again.num_cached) == (0, 16)  # the image begins in the first block
    assert first.tokens == again.tokens != second.tokens


@mostly_slow("name", NAMES, NAMES[:1])
def test_the_preempted_begin_again(name: str, images: Images) -> None:
    check_preempted(name, images, blocks=16)


def check_preempted(name: str, images: Images, blocks: int) -> None:
    """Check the tokens of preempted sequences, with a pool of ``blocks`` blocks."""
    engine, _ = make_engine(
        images.models.folder(name), depth=2, chunk=5, blocks=blocks, max_num_seqs=4, media=images.tight(name)
    )
    filler = submit(999, [3] * 30, TokenParams(temperature=0.0, max_tokens=60), request=999, priority=-1)
    answers = run(engine, [[filler], *([one] for one in images.batch(name, GREEDY))])
    stats = engine.stats()
    engine.close()
    images.check(name, answers, GREEDY)
    assert stats.preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_share_the_prompt(caching: bool, images: Images) -> None:
    name = "qwen3-vl"
    engine, _ = make_engine(images.models.folder(name), depth=2, caching=caching)
    group = [images.submit(name, 10 + choice, 2, SEEDED, choice) for choice in range(3)]
    answers = run(engine, [group])
    stats = engine.stats()
    engine.close()
    for choice in range(3):
        assert answers[10 + choice].tokens == images.answer(name, 2, choice, SEEDED).tokens
    assert stats.images_encoded == 2
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 1


def test_prompt_logprobs(images: Images) -> None:
    """Prompt logprobs cover all positions, including images, for any chunks."""
    name = "qwen3-vl"
    params = TokenParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    expected = images.answer(name, 2, 0, params)
    engine, _ = make_engine(images.models.folder(name), depth=2, chunk=4, media=images.tight(name))
    answers = run(engine, [[images.submit(name, 1, 2, params)]])
    engine.close()
    assert [ids for ids, _, _ in answers[1].prompt_logprobs] == [
        ids for ids, _, _ in expected.prompt_logprobs
    ]
    assert len(expected.prompt_logprobs) == len(images.prompts(name)[2].ids) - 1


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-moe-vision"])
def test_drafts_by_ngrams(name: str, images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "WORTH_CAPTURING", 1)
    monkeypatch.setattr(drafting, "WORTH_CAPTURING", 1)
    speculation = SpeculationSection(
        speculative_method="ngram", num_speculative_tokens=2, speculative_adaptive=False, ngram_min_length=1
    )
    engine, _ = make_engine(
        images.models.folder(name), depth=2, chunk=7, speculation=speculation, graphs=replaying(2)
    )
    answers = run(engine, [images.batch(name, GREEDY)])
    stats = engine.stats()
    engine.close()
    images.check(name, answers, GREEDY)
    assert sum(stats.drafts)


def test_embeddings_see_images(images: Images) -> None:
    name = "qwen3-vl"
    made = []
    for chunk in (0, 5):
        engine, _ = make_engine(images.models.folder(name), chunk=chunk)
        one = TokenParams(max_tokens=1)
        group = [
            images.submit(name, 10 * n + place, n, one, pooling=pooling)
            for n in range(2)
            for place, pooling in enumerate(["last", "mean"])
        ]
        answers = run(engine, [[one] for one in group])
        made.append([answer.embedding for answer in answers.values()])
        engine.close()
    assert made[0] == made[1]
    assert len(set(made[0])) == 4


class Broken:
    """A tower whose first embedding is not finite."""

    def __init__(self, tower: Any) -> None:
        self._tower = tower
        self.left = 1

    def embed(self, image: torch.Tensor) -> Any:
        made = self._tower.embed(image)
        self.left -= 1
        return replace(made, main=made.main * float("nan")) if self.left >= 0 else made


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-moe-vision"])
def test_an_image_that_cannot_be_encoded_fails_its_own_request(name: str, images: Images) -> None:
    """The next request does not find the broken embedding."""
    engine, runner = make_engine(images.models.folder(name), chunk=8, caching=False)
    runner._media._tower = Broken(runner._media._tower)
    batch = [images.submit(name, n, n, GREEDY) for n in (0, 2, 4)]
    answers = run(engine, [batch])
    again = run(engine, [[images.submit(name, 10, 0, GREEDY)]])[10]
    stats = engine.stats()
    engine.close()
    assert answers[0].ends == ["error"]
    assert answers[0].error.code == "non_finite_logits"
    for number in (2, 4):
        assert answers[number].tokens == images.answer(name, number, 0, GREEDY).tokens
    assert again.tokens == images.answer(name, 0, 0, GREEDY).tokens
    assert stats.images_encoded == 4


@pytest.mark.requirement("D24")
@mostly_slow("overlap", ["off", "all"], ["all"])
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(tensor=2), "qwen3-vl"),
        (Layout(tensor=2), "qwen3-5-moe-vision"),
        (Layout(data=2, expert=True), "qwen3-vl-moe"),
    ],
    ids=["tp2", "tp2-hybrid", "dp2ep2"],
)
def test_over_ranks(layout: Layout, name: str, overlap: str, images: Images) -> None:
    """An image is cut by chunks and by micro-batches."""
    turns = [[one] for one in images.batch(name, GREEDY)]
    arrivals = [turns] if layout.data == 1 else [turns[::2], turns[1::2]]
    replicas = on_layout(
        layout, images.models.folder(name), arrivals, overlap=overlap, depth=2, chunk=16, max_num_seqs=12
    )
    answers = {number: one for replica in replicas for number, one in replica.answers.items()}
    images.check(name, answers, GREEDY)
    if overlap == "all":
        assert sum(replica.overlapped for replica in replicas)
