"""Exact tokens with images of models with towers of transformers, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e0.rig import MAX_LEN, make_engine, run, spec_of, submit
from tests.e0.test_images import GREEDY, Images, check_preempted
from tests.models.test_whole_images import shapes
from tests.support.expert_groups import on_layout
from tests.support.pairwise import sampled
from tests.support.seen import SeeingModels, Seen
from tests.support.slow import mostly_slow
from tests.support.whole_image_models import CASES
from weft.common.errors import ConfigError
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sections.all import MediaSection, SchedulerSection, SpeculationSection
from weft.config.sizing.media_limits import check_whole_images, media_limits
from weft.overlap.split import split
from weft.types.layout import Layout
from weft.types.plan import BindMedia, Segment, StepPlan, column
from weft.types.sampling import TokenParams

NAMES = list(CASES)


class WholeImages(Images):
    """Prompts with images of the sizes of each model."""

    def _prompts(self, name: str) -> list[Seen]:
        def seen(parts: Any, seed: int) -> Seen:
            return self.models.seen(name, shapes(name, *parts), seed)

        first = seen([5, (2, 3), 4], 1)
        return [
            first,
            first.with_images_of(seen([5, (2, 3), 4], 11)),  # the same tokens, another image
            seen([3, (3, 3), 2, (1, 4), 6], 2),
            seen([(4, 5), 3], 3),
            seen([17], 4),
            first.then([7, 8, 9], seen([2, (2, 2), 3], 5)),
            seen([1, (2, 3)], 6),  # an image ends the prompt, or its last tokens do
        ]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> WholeImages:
    return WholeImages(tmp_path_factory.mktemp("images"))


@mostly_slow("name", NAMES, ["mistral3"])
def test_tokens_are_the_reference_s(name: str, images: WholeImages) -> None:
    for number, seen in enumerate(images.prompts(name)):
        expected = images.models.greedy(name, seen, GREEDY.max_tokens)
        assert images.answer(name, number, 0, GREEDY).tokens == expected, number


@sampled(
    {"how": [(1, 0, False), (1, 1, True), (2, 5, False), (2, 7, True)], "name": NAMES},
    slow=True,
)
def test_chunks_and_hits(name: str, how: tuple[int, int, bool], images: WholeImages) -> None:
    """In two rounds; the second round has cached prefixes, some of which end within an image."""
    depth, chunk, tight = how
    media = images.tight(name) if tight else MediaSection()
    engine, runner = make_engine(images.models.folder(name), depth=depth, chunk=chunk, media=media)
    for first in (0, 100):
        batch = images.batch(name, GREEDY, first)
        answers = run(engine, [[one] for one in batch] if first else [batch])
        images.check(name, answers, GREEDY, first)
    engine.close()
    assert answers[100].num_cached > 0
    whole = engine.runner.kv.media.whole > 0
    binds = [(plan, op) for plan in runner.plans for op in plan.ops if isinstance(op, BindMedia)]
    cut = 0
    for plan, op in binds:
        row = plan.prefill.slot.tolist().index(op.slot)
        end = int(plan.prefill.start[row] + plan.prefill.count[row])
        cut += op.start < end < op.start + op.count
    assert not (whole and cut)
    if chunk in (1, 5) and not whole:
        assert cut
    inside = 0
    for number, answer in answers.items():
        items = images.prompts(name)[number - 100].media
        inside += any(i.start < answer.num_cached < i.start + i.count for i in items)
    assert inside, "no hit ends within an image"


@mostly_slow("name", ["gemma3", "mistral3", "ministral3", "internvl", "llama4"], ["gemma3"])
def test_the_preempted_begin_again(name: str, images: WholeImages) -> None:
    check_preempted(name, images, blocks=12)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 8])
def test_an_image_longer_than_the_longest_chunk(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission behind a prefix hit counts the blocks of a whole image, though chunks are short."""
    family, config = CASES["gemma3"]
    text = {**config["text_config"], "sliding_window": 24}
    monkeypatch.setitem(CASES, "wide", (family, {**config, "text_config": text, "mm_tokens_per_image": 36}))
    models = SeeingModels(tmp_path)
    first = models.seen("wide", [24], 1)
    seen = first.then([7, 8], models.seen("wide", [6, (6, 6), 3], 2))
    params = TokenParams(temperature=0.0, max_tokens=4)
    expected = models.greedy("wide", seen, 4)
    # Other sequences hold blocks, so memory is tight when the image begins.
    others = [submit(900 + i, [3 + i] * 20, GREEDY, request=900 + i) for i in range(3)]
    batch = [submit(50 + i, seen.ids, params, request=50 + i, media=seen.media) for i in range(3)]
    for blocks in (9, 12):  # the fewest blocks that ``check_whole_images`` accepts, and more
        engine, _ = make_engine(models.folder("wide"), chunk=chunk, window_blocks=blocks, max_num_seqs=6)
        run(engine, [[submit(1, first.ids, GREEDY, request=1)]])
        answers = run(engine, [others, *([one] for one in batch)])
        engine.close()
        assert [answers[50 + i].tokens for i in range(3)] == [expected] * 3


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_drafts_by_ngrams(name: str, images: WholeImages) -> None:
    speculation = SpeculationSection(
        speculative_method="ngram", num_speculative_tokens=2, speculative_adaptive=False, ngram_min_length=1
    )
    engine, _ = make_engine(images.models.folder(name), depth=2, chunk=7, speculation=speculation)
    answers = run(engine, [images.batch(name, GREEDY)])
    stats = engine.stats()
    engine.close()
    images.check(name, answers, GREEDY)
    assert sum(stats.drafts)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["off", "all"])
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "internvl", "llama4"])
def test_over_ranks(name: str, overlap: str, images: WholeImages) -> None:
    """An image may be divided by micro-batches only if chunks may cut."""
    turns = [[one] for one in images.batch(name, GREEDY)]
    (replica,) = on_layout(
        Layout(tensor=2),
        images.models.folder(name),
        [turns],
        overlap=overlap,
        depth=2,
        chunk=16,
        max_num_seqs=12,
    )
    images.check(name, replica.answers, GREEDY)
    if overlap == "all":
        assert replica.overlapped


def test_micro_batches_do_not_cut_an_image() -> None:
    ones = {name: column([0]) for name in ("gen", "sample", "next_k")}

    def plan(start: int, whole: bool) -> StepPlan:
        prefill = Segment(
            slot=column([3]), start=column([10]), count=column([80]), logits=column([1]), **ones
        )
        image = BindMedia(slot=3, start=start, count=30, blocks=b"", whole=whole)
        return StepPlan(step=0, ops=(image,), prefill=prefill)

    def cut(start: int, whole: bool) -> int:
        found = split(plan(start, whole))
        return 0 if found is None else found.cut

    assert cut(40, False) == 40
    assert cut(40, True) == 30  # in front of the image at 40 .. 69
    assert cut(22, True) == 42  # behind: 12 tokens in front are too few
    assert cut(50, True) == 40
    assert cut(20, True) == 40
    both = _wide(plan)
    assert split(both) is None


def _wide(plan: Any) -> StepPlan:
    """Return a plan whose image leaves no room for a cut."""
    made = plan(12, True)
    image = BindMedia(slot=3, start=12, count=76, blocks=b"", whole=True)
    return StepPlan(step=0, ops=(image,), prefill=made.prefill)


def test_a_step_has_room_for_an_image(images: WholeImages) -> None:
    spec = spec_of(images.models.folder("gemma3"))
    limits = media_limits(spec, "float64", MAX_LEN, MediaSection())
    assert limits is not None
    assert (limits.whole, limits.ahead) == (9, (0, 1))
    kv = KVConfig(
        pools=(), block_size=8, enable_prefix_caching=False, max_model_len=MAX_LEN, num_slots=4, media=limits
    )
    check_whole_images(limits, SchedulerSection(max_num_seqs=4, max_num_batched_tokens=13), kv)
    with pytest.raises(ConfigError, match=r"image of up to 9 tokens in one piece.* to at least 13"):
        check_whole_images(limits, SchedulerSection(max_num_seqs=4, max_num_batched_tokens=12), kv)
    window = next(cache for cache in spec.caches if cache.window)
    pool = PoolSpec(cache=window, block_size=8, num_blocks=2)  # a window of 6, an image of 9, and a block
    small = msgspec.structs.replace(kv, pools=(pool,))
    with pytest.raises(
        ConfigError, match=r"raise --kv-cache-memory, or --long-prefill-token-threshold to .* 9"
    ):
        check_whole_images(limits, SchedulerSection(max_num_seqs=4, max_num_batched_tokens=13), small)
    enough = msgspec.structs.replace(pool, num_blocks=3)
    check_whole_images(
        limits,
        SchedulerSection(max_num_seqs=4, max_num_batched_tokens=13),
        msgspec.structs.replace(kv, pools=(enough,)),
    )
