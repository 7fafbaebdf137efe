"""Images of models with towers of transformers, with all features, also between groups, in float64."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.composition import groups, seeing
from tests.composition.references import plain_of, tokens_are_those_alone
from tests.composition.rig import MAX_LEN, VOCAB, run
from tests.composition.test_declared import EVERYTHING, OTHERS, Case
from tests.models.conftest import _randomize
from tests.models.test_whole_images import shapes
from tests.support.seen import Seen
from tests.support.slow import mostly_slow
from tests.support.vision_models import make_prompt
from tests.support.whole_image_models import CASES, FILES, PROCESSORS
from weft.bench.bench_tokenizer import write_tokenizer
from weft.config.families import load_spec


def _save(folder: Path, name: str) -> None:
    family, settings = CASES[name]
    text = {**settings["text_config"], "vocab_size": VOCAB, "max_position_embeddings": 192}
    if "vocab_size_per_layer_input" in text:
        text["vocab_size_per_layer_input"] = VOCAB
    config = getattr(transformers, f"{family}Config")(**{**settings, "text_config": text})
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    _randomize(model, 3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))
    for file, content in FILES.get(family, {}).items():
        (folder / file).write_text(json.dumps(content))
    write_tokenizer(folder, VOCAB, MAX_LEN)
    if more := FILES.get(family, {}).get("tokenizer_config.json"):
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **more}))


def _prompts(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return prompts of text and images. The last three share their first blocks."""
    spec = load_spec(str(folder))

    def seen(parts: list[Any], seed: int) -> Seen:
        return Seen(make_prompt(shapes(name, *parts), spec, seed))

    first = seen([21, (2, 3), 14], 1)
    turn = seen([18, (3, 3), 4, (1, 5), 3], 2)
    second = turn.then([7, 8, 9], seen([2, (2, 3), 3], 1))
    shown = [
        first,
        first.with_images_of(seen([21, (2, 3), 14], 11)),
        seen([(4, 5), 33], 3),
        seen([9, (2, 3), 1], 1),
        turn,
        second,
        second.then([1, 2], seen([2, (3, 2), 2], 8)),
    ]
    assert all(len(one.ids) <= 96 for one in shown), [len(one.ids) for one in shown]
    text: list[dict[str, Any]] = [{"prompt_token_ids": [4, 4, 8] * 7}]
    return text + [{"prompt_token_ids": one.ids, "media": list(one.media)} for one in shown]


@pytest.fixture
def folder(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkpoint of ``name``, whose prompts are those of this module."""
    _save(tmp_path, name)
    monkeypatch.setattr(seeing, "prompts", cache(lambda folder: _prompts(name, folder)))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("case", [EVERYTHING, {**OTHERS, "kv": "auto"}], ids=["everything", "others"])
def test_tokens_are_those_of_each_sequence_alone(name: str, case: Case, folder: Path) -> None:
    assert tokens_are_those_alone(folder, case).stats.image_hits > 0


@mostly_slow("encoders", [0, 1], [1])
@mostly_slow("name", list(CASES), ["gemma3"])
def test_prefill_decode_and_encode_groups(name: str, encoders: int, folder: Path) -> None:
    case = {**EVERYTHING, "blocks": "larger", "ranks": (1, 1), "overlap": False, "encoders": encoders}
    _moves(folder, case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "gemma4", "mistral3", "internvl", "llama4"])
def test_two_ranks_take_embeddings(name: str, folder: Path) -> None:
    """The ranks share the rows of embeddings, and compute steps in two micro-batches."""
    case = {**EVERYTHING, "blocks": "smaller", "ranks": (2, 1), "overlap": True, "encoders": 2, "chunk": 0}
    _moves(folder, case)


@pytest.mark.slow
@pytest.mark.parametrize("encoders", [0, 1])
@pytest.mark.parametrize("name", ["gemma4", "gemma4-inputs"])
def test_frames_of_videos_in_groups(
    name: str, encoders: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All items are frames, whose placeholder differs from that of images (InternVL: the same token)."""
    _film(folder)
    prompts = [_of_videos(folder, one) for one in _prompts(name, folder)]
    monkeypatch.setattr(seeing, "prompts", cache(lambda folder: prompts))
    case = {**EVERYTHING, "blocks": "larger", "ranks": (1, 1), "overlap": False, "encoders": encoders}
    _moves(folder, case)


def _film(folder: Path) -> None:
    """Write the settings of the video processor of Gemma 4."""
    settings = {"video_processor_type": "Gemma4VideoProcessor", "patch_size": 4, "pooling_kernel_size": 2}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))


def _of_videos(folder: Path, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return ``prompt`` with the placeholder of videos in place of that of images."""
    vision = load_spec(str(folder)).vision
    assert vision is not None
    image, video = vision.media.placeholder, vision.media.video
    assert video is not None
    assert video != image
    ids = [video if token == image else token for token in prompt["prompt_token_ids"]]
    return {**prompt, "prompt_token_ids": ids}


def _moves(folder: Path, case: Case) -> None:
    """Run a prefill, a decode and encode groups, and compare the tokens with those of sequences alone."""
    expected, _ = run(folder, plain_of(case), alone=True)
    made, seen = groups.run(folder, case, None)
    assert made.keys() == expected.keys()
    assert {key: one.tokens for key, one in made.items()} == {
        key: one.tokens for key, one in expected.items()
    }
    assert seen.decode.transfers is not None
    assert seen.decode.transfers.done > 0
    assert (sum(seen.encoded) > 0) == (case["encoders"] > 0)
    assert (seen.prefill.images_encoded > 0) == (case["encoders"] == 0)
