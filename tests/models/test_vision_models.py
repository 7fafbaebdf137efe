"""Vision models against transformers: several images, any chunks, beside rows of text."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from tests.support.compared import distance, run_in_chunks
from tests.support.ranks import on_ranks
from tests.support.vision_models import CASES, PLACEHOLDER, Clip, Prompt, Seen, make_prompt, types_of
from weft.attention.base import StepInput
from weft.config.families import load_spec
from weft.config.sections.all import SchedulerSection
from weft.config.sizing.memory import activation_bytes, weight_bytes
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.types.layout import Layout
from weft.types.media_item import MediaItem

Tensor = torch.Tensor
TOLERANCE = 1e-4
#: Text, and images of so many rows and columns of tokens.
SEVERAL = (4, (3, 5), (1, 2), 3, (4, 1), 6)


@torch.no_grad()
def _expected(reference: Any, prompt: Prompt, ids: list[int], spec: Any, dtype: torch.dtype) -> Tensor:
    """Logits of all positions, computed in one piece; ``ids`` begin with the prompt's."""
    inputs = prompt.inputs(spec, dtype)
    if inputs and spec.family != "kimi_k25":
        inputs["mm_token_type_ids"] = types_of(ids, videos=bool(prompt.clips))
        inputs |= prompt.joined_positions(len(ids), spec)
    result: Tensor = reference(torch.tensor([ids]), use_cache=False, **inputs).logits[0]
    return result


@pytest.fixture(params=list(CASES))
def checkpoint(request: pytest.FixtureRequest, seeing: Any) -> Any:
    """Each of the tiny models in turn."""
    return seeing(request.param)


def test_whole_prompts_float32(checkpoint: Any, paged: Any) -> None:
    model = checkpoint.load()
    for seed, parts in enumerate([SEVERAL, ((2, 2), 1), (9,), (1, (6, 6), (1, 1), (1, 1), 1)]):
        prompt = make_prompt(parts, model.spec, seed)
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, len(prompt.ids))])
        theirs = _expected(checkpoint.reference, prompt, prompt.ids, model.spec, torch.float32)
        assert distance(sequence.logits, theirs) <= TOLERANCE


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"kimi-k25"}))
def test_videos_float32(name: str, seeing: Any, paged: Any) -> None:
    """Videos, one of an odd number of frames, beside images; in one piece, and in chunks."""
    checkpoint = seeing(name)
    model = checkpoint.load()
    for seed, parts in enumerate(
        [(3, Clip(2, 2, 3), 2), (Clip(5, 2, 2), 1, (3, 2), Clip(8, 1, 3, fps=3.0), 4)]
    ):
        prompt = make_prompt(parts, model.spec, 60 + seed)
        theirs = _expected(checkpoint.reference, prompt, prompt.ids, model.spec, torch.float32)
        for size in (len(prompt.ids), 7):
            harness = paged(model)
            sequence = harness.reading(prompt)
            for first in range(0, len(prompt.ids), size):
                harness.step([(sequence, min(size, len(prompt.ids) - first))])
            assert distance(sequence.logits, theirs) <= TOLERANCE


def test_images_matter(checkpoint: Any, paged: Any) -> None:
    """Other pixels, or the same ones elsewhere, give other logits."""
    model = checkpoint.load()
    one, other = (make_prompt((3, (2, 3), 4), model.spec, seed) for seed in (1, 1))
    other = replace(other, images=[255 - image for image in other.images])
    made = []
    for prompt in (one, other):
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, len(prompt.ids))])
        made.append(torch.stack(sequence.logits))
    assert torch.equal(made[0][:4], made[1][:4]), "text before the image does not see it"
    assert (made[0][-1] - made[1][-1]).abs().max() > 0.01 * made[0].abs().max()


def test_chunks_beside_text_float32(checkpoint: Any, paged: Any) -> None:
    """Several prompts run at once, one with text only; decode steps follow."""
    model = checkpoint.load()
    harness = paged(model)
    prompts = [
        make_prompt(parts, model.spec, 20 + i) for i, parts in enumerate([SEVERAL, (17,), ((5, 3), 2)])
    ]
    after = [[5, 6, 7, 8], [9, 10, 11], [12] * 6]
    sequences = []
    for prompt, more in zip(prompts, after, strict=True):
        sequence = harness.reading(prompt) if prompt.items else harness.sequence(prompt.ids)
        sequence.ids = prompt.ids + more
        sequences.append(sequence)
    run_in_chunks(harness, sequences, [len(prompt.ids) for prompt in prompts], seed=2, most=9)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        theirs = _expected(checkpoint.reference, prompt, sequence.ids, model.spec, torch.float32)
        assert distance(sequence.logits, theirs) <= TOLERANCE


def test_greedy_tokens_float64_in_turns(checkpoint: Any, paged: Any) -> None:
    """Two turns: images, an answer, then further images and a further answer."""
    reference = checkpoint.reference_in_float64()
    model = checkpoint.load(torch.float64)
    first = make_prompt((4, (3, 4), 3, (2, 5), 4), model.spec, 31)
    second = make_prompt((2, (1, 3), 3), model.spec, 41)
    harness = paged(model)
    sequence = harness.reading(first)
    harness.step([(sequence, 10)])
    harness.step([(sequence, len(first.ids) - 10)])
    prompt, expected = first, list(first.ids)
    for turn in (0, 1):
        for _ in range(8):
            top = sequence.logits[-1].topk(2).values
            assert top[0] - top[1] > 1e-4, "a tie: choose another seed"
            sequence.ids.append(int(sequence.logits[-1].argmax()))
            logits = _expected(reference, prompt, expected, model.spec, torch.float64)
            expected.append(int(logits[-1].argmax()))
            assert sequence.ids == expected
            assert expected[-1] != PLACEHOLDER, "the reference takes it for an image: choose another seed"
            harness.step([], [(sequence, 1)])
        if turn == 0:
            offset = len(expected)
            moved = [_moved(item, offset) for item in second.items]
            prompt = Prompt(expected + second.ids, first.images + second.images, first.items + moved)
            expected = list(prompt.ids)
            sequence.ids, sequence.seen = list(expected), Seen.of(prompt, model)
            harness.step([(sequence, 5)])
            harness.step([(sequence, len(second.ids) - 5)])
    assert len(set(expected)) > 12, "degenerate logits prove nothing"


def _moved(item: MediaItem, offset: int) -> MediaItem:
    return msgspec.structs.replace(item, start=item.start + offset)


def test_rows_do_not_depend_on_each_other(checkpoint: Any, paged: Any) -> None:
    model = checkpoint.load(torch.float64)
    harness = paged(model, seed=1)
    prompts = [make_prompt(parts, model.spec, 50 + i) for i, parts in enumerate([SEVERAL, (2, (3, 3), 5)])]
    sequences = [harness.reading(prompt) for prompt in prompts]
    run_in_chunks(harness, sequences, [len(prompt.ids) for prompt in prompts], seed=4, most=9)
    for sequence, prompt in zip(sequences, prompts, strict=True):
        alone = paged(model, block_size=5, seed=2)
        again = alone.reading(prompt)
        alone.step([(again, len(again.ids))])
        mine, theirs = torch.stack(sequence.logits), torch.stack(again.logits)
        assert torch.allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3-vl-levels", "qwen3-5-vision"])
def test_logits_of_some_rows(name: str, seeing: Any, paged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a few rows in any order, some within images: the last level is added to the right rows."""
    model = seeing(name).load(torch.float64)
    prompt = make_prompt(SEVERAL, model.spec, 60)
    harness = paged(model)
    whole = harness.reading(prompt)
    harness.step([(whole, len(prompt.ids))])
    expected = torch.stack(whole.logits)
    steps = model.steps
    asked = []

    def some(step: StepInput, *given: Any) -> Generator[Any, None, Tensor]:
        chosen = torch.randperm(len(step.ids), generator=torch.Generator().manual_seed(len(asked)))
        chosen = chosen[: len(chosen) // 3 + 1]
        asked.append(chosen)
        logits = yield from steps(replace(step, logits_index=chosen), *given)
        return logits.new_full((len(step.ids), logits.shape[1]), float("nan")).index_copy(0, chosen, logits)

    monkeypatch.setattr(model, "steps", some)
    again = paged(model)
    sequence = again.reading(prompt)
    for count in (7, 9, len(prompt.ids) - 16):
        again.step([(sequence, count)])
    found = torch.stack(sequence.logits)
    known = ~found[:, 0].isnan()
    assert known.sum() == sum(len(chosen) for chosen in asked) >= 12
    assert torch.allclose(found[known], expected[known], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-5-moe-vision"])
def test_text_has_the_same_bits(name: str, seeing: Any, paged: Any) -> None:
    """Text gives equal bits with one or three rope positions, and with or without a loaded tower."""
    checkpoint = seeing(name)
    ids = [(7 * i + 3) % 100 for i in range(40)]
    made = []
    spec = load_spec(checkpoint.folder, language_model_only=True)
    alone = load_model(checkpoint.folder, spec, torch.float32, torch.device("cpu"), progress=False)
    for model, three in ((checkpoint.load(), False), (checkpoint.load(), True), (alone, False)):
        harness = paged(model)
        sequence = harness.sequence(ids)
        if three:
            sequence.seen = Seen(make_prompt((3,), checkpoint.load().spec, 0).spans(model.spec), [])
        harness.step([(sequence, 30)])
        for _ in range(5):
            harness.step([], [(sequence, 2)])
        made.append(torch.stack(sequence.logits))
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "qwen3-5-vision", "kimi-k25"])
def test_every_rank_has_the_whole_tower(name: str, seeing: Any, paged: Any) -> None:
    checkpoint = seeing(name)
    spec = load_spec(checkpoint.folder)
    prompt = make_prompt(SEVERAL, spec, 70)

    def run(model: Model) -> tuple[Tensor, list[Tensor]]:
        harness = paged(model)
        sequence = harness.reading(prompt)
        harness.step([(sequence, 9)])
        harness.step([(sequence, len(prompt.ids) - 10)])
        harness.step([], [(sequence, 1)])
        tower = [weight for name, weight in model.named_parameters() if name.startswith("vision.")]
        return torch.stack(sequence.logits), tower

    expected, tower = run(checkpoint.load(torch.float64))
    found = on_ranks(Layout(tensor=2), lambda mesh: run(checkpoint.load(torch.float64, mesh=mesh)))
    for logits, held in found:
        assert torch.equal(logits, found[0][0]), "ranks have other bits"
        assert all(torch.equal(one, other) for one, other in zip(held, tower, strict=True))
        assert (logits - expected).abs().max() <= 1e-9 * expected.abs().max()


def _tower(model: Model) -> Iterator[tuple[str, Tensor]]:
    return ((name, weight) for name, weight in model.named_parameters() if name.startswith("vision."))


@pytest.mark.parametrize("name", list(CASES))
def test_the_size_of_the_weights_is_known_before_they_are_read(name: str, seeing: Any) -> None:
    model = seeing(name).read()
    real = sum(parameter.nbytes for parameter in model.parameters())
    assert weight_bytes(model.spec, "float32") == pytest.approx(real, rel=0.03)
    assert sum(weight.nbytes for _, weight in _tower(model)) > 0.1 * real


def test_room_for_the_largest_image(seeing: Any) -> None:
    """Planned memory includes more than the widest tensor of the encoding of the largest image."""
    scheduler = SchedulerSection()
    for name, patches in (("qwen3-vl", 200), ("kimi-k25", 200)):
        folder = seeing(name).folder
        sizes = [
            activation_bytes(load_spec(folder, language_model_only=only), "float32", scheduler)
            for only in (False, True)
        ]
        assert sizes[0] - sizes[1] > patches * 4 * 44


@pytest.mark.parametrize("name", ["qwen3-vl", "kimi-k25"])
def test_in_8_bits_the_tower_stays_as_it_is(name: str, seeing: Any) -> None:
    checkpoint = seeing(name)
    prompt = make_prompt(SEVERAL, load_spec(checkpoint.folder), 80)
    plain, narrow = checkpoint.load(), checkpoint.load(quantization="int8")
    for one, other in zip(prompt.embedded(plain.vision), prompt.embedded(narrow.vision), strict=True):
        assert torch.equal(one.main, other.main)


@pytest.mark.parametrize("name", ["qwen3-vl-moe", "kimi-k25"])
def test_random_weights(name: str, seeing: Any, paged: Any) -> None:
    model = seeing(name).load(torch.bfloat16, load_format="dummy")
    prompt = make_prompt(SEVERAL, model.spec, 90)
    harness = paged(model)
    sequence = harness.reading(prompt)
    harness.step([(sequence, len(prompt.ids))])
    assert torch.isfinite(torch.stack(sequence.logits)).all()
