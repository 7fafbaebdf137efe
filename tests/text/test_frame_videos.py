"""Videos of InternVL and Gemma 4 through ``LLM``: each frame is an item behind its text.

Ids, chosen frames and greedy tokens in float64 are those of the reference.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers import PreTrainedTokenizerFast
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.video_utils import default_sample_indices_fn

from tests.config.test_tiles import png
from tests.models.conftest import _randomize
from tests.support.pictures import data_url
from tests.support.slow import mostly_slow
from tests.support.whole_image_models import CASES, PROCESSORS, inputs_of
from tests.text.test_image_tokens import LOOP
from weft import LLM, SamplingParams
from weft.bench.bench_tokenizer import write_tokenizer
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families import load_spec
from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts
from weft.config.sections.media_section import MediaSection
from weft.media.pictures import Pictures, runs_of
from weft.text.chat import ChatFormat
from weft.text.chat_messages import check_messages
from weft.text.image_tokens import expanded, image_rules
from weft.text.tokenizer import Tokenizer

#: name -> (tokens: template's image, placeholder, start, end, template's video, part of a frame)
KINDS = {
    "internvl": ("<IMG_CONTEXT>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>", "<IMG_CONTEXT>"),
    "gemma4": ("<|image|>", "<|image|>", "<|image>", "<image|>", "<|video|>", "<|video|>"),
}
VIDEOS: dict[str, dict[str, Any]] = {
    "internvl": {
        "video_processor_type": "InternVLVideoProcessor",
        "size": {"height": 24, "width": 24},
        "resample": 3,
        "num_frames": 4,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.5, 0.6, 0.7],
    },
    "gemma4": {
        "video_processor_type": "Gemma4VideoProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
        "num_frames": 4,
    },
}
SHOWN = (
    "part.type == 'image' %%}%s",
    "part.type == 'image' %%}%s{%% elif part.type == 'video' %%}VIDEO",
)
#: Behind the video in a template; the published template of InternVL ends the line.
BEHIND = {"internvl": "\n", "gemma4": ""}
SIZE = (30, 50)


def write_texts(folder: Path, name: str, case: str = "") -> Any:
    """Write all files of a model with videos except the weights. Return the configuration, in float64."""
    write_tokenizer(folder, 400, 512)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    special = [*dict.fromkeys(KINDS[name]), "<turn>"]
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    fast.save(str(folder / "tokenizer.json"))
    shown, placeholder, start, end, video, part = KINDS[name]
    added = Tokenizer.load(folder).added
    family, settings = CASES[case or name]
    ids: dict[str, Any] = {"image_token_id": added[placeholder], "video_token_id": added[part]}
    ids |= {"boi_token_id": added[start], "eoi_token_id": added[end]}
    known = {key: value for key, value in ids.items() if key in settings}
    text = {**settings["text_config"], "vocab_size": 416, "dtype": "float64"}
    if name == "gemma4":
        text["vocab_size_per_layer_input"] = 416
    config = getattr(transformers, f"{family}Config")(**{**settings, **known, "text_config": text})
    _save_config(config, family, folder)
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS[name]))
    loop = LOOP.replace(*SHOWN).replace("VIDEO", video + BEHIND[name])
    (folder / "chat_template.jinja").write_text(loop % (shown + BEHIND[name]))
    return config


def _save_config(config: Any, family: str, folder: Path) -> None:
    """Write config.json and the settings of the image processor."""
    config.save_pretrained(folder)
    made = json.loads((folder / "config.json").read_text())
    made["architectures"] = [f"{family}ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[family]))


def write_folder(folder: Path, name: str) -> None:
    """Write a model in float64 with videos, its tokenizer and its template."""
    case, name = name, name.removesuffix("-inputs")
    config = write_texts(folder, name, case)
    model = getattr(transformers, f"{CASES[case][0]}ForConditionalGeneration")(config).double()
    _randomize(model, 4 if case != name else 3)
    model.save_pretrained(folder)


def frames_of(seed: int, count: int) -> list[Image.Image]:
    return [Image.open(io.BytesIO(png(*SIZE, 100 * seed + number))) for number in range(count)]


def resized(frame: Image.Image, media: MediaFacts) -> torch.Tensor:
    """Return the pixels of a frame in the size of the reference: uint8 [1, height, width, 3]."""
    assert media.frames is not None
    height, width = media.video_grid_of(media.frames, 1, frame.height, frame.width).size
    made = frame.resize((width, height), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(made).copy()).unsqueeze(0)


def text_of(name: str, media: MediaFacts, times: list[float]) -> tuple[str, int]:
    """Return the text of a video from the reference's processor, and the number of tokens of a frame."""
    _, placeholder, start, end, _, part = KINDS[name]
    assert media.frames is not None
    count = media.video_grid_of(media.frames, 1, *SIZE).tokens
    if name == "internvl":
        processor: Any = object.__new__(InternVLProcessor)
        processor.image_token, processor.image_seq_length = placeholder, count
        processor.start_image_token, processor.end_image_token = start, end
        pixels = {"pixel_values_videos": [torch.zeros(len(times), 1)]}
        return str(processor.replace_video_token(pixels, 0)), count
    clock = [f"{int(time // 60):02d}:{int(time % 60):02d}" for time in times]
    return " ".join(f"{one} {start}{part * count}{end}" for one in clock), count


@torch.no_grad()
def greedy(model: Any, ids: list[int], inputs: dict[str, Any], most: int, hidden: list[int]) -> list[int]:
    """Return the reference's greedy tokens; ``hidden`` are never chosen."""
    made = list(ids)
    for _ in range(most):
        more = dict(inputs)
        if "video_position_ids" in inputs:
            types = torch.tensor([[2 if one == model.config.video_token_id else 0 for one in made]])
            more["mm_token_type_ids"] = types
        logits = model(torch.tensor([made]), use_cache=False, **more).logits[0, -1]
        logits[hidden] = -torch.inf
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-6, "a tie: choose another seed"
        made.append(int(logits.argmax()))
    return made[len(ids) :]


def reference_inputs(name: str, frames: list[Image.Image], spec: Any) -> dict[str, Any]:
    """Return the reference's inputs for the frames of a video."""
    media = spec.vision.media
    made = inputs_of([resized(one, media) for one in frames], spec, torch.float64)
    if name == "gemma4":
        return {
            "pixel_values_videos": made["pixel_values"],
            "video_position_ids": made["image_position_ids"],
            "num_frames_per_video": torch.tensor([len(frames)]),
        }
    return made


SETTINGS: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "kv_cache_memory": "64M",
    "block_size": 8,
    "max_num_batched_tokens": 96,
    "max_model_len": 512,
    "max_num_seqs": 4,
}


@pytest.mark.parametrize("name", KINDS)
def test_text_of_a_video_between_images(name: str, tmp_path: Path) -> None:
    """A frame of InternVL has the placeholder of an image, and the text around both is written once."""
    write_texts(tmp_path, name)
    vision = load_spec(str(tmp_path)).vision
    assert vision is not None
    media = vision.media
    rules, hidden = image_rules(media, 8)
    chat = ChatFormat(Tokenizer.load(tmp_path, hidden), images=rules)
    image = {"type": "image_url", "image_url": {"url": data_url(png(*SIZE, 1))}}
    film = {"type": "video", "video": [data_url(png(*SIZE, number)) for number in (2, 3)], "fps": 0.05}
    content = [image, {"type": "text", "text": f"What{KINDS[name][4]}"}, film, image]
    made = chat.encode([{"role": "user", "content": content}])
    pictures = Pictures(media, MediaSection()).measured(made.shown, {})
    ids, _ = expanded(made.ids, media, pictures)
    _, placeholder, start, end, *_ = KINDS[name]
    (run, *_) = runs_of(pictures)
    shown = start + placeholder * sum(one.count for one in run) + end + BEHIND[name]
    video, count = text_of(name, media, [0.0, 20.0])
    assert [one.count for one in pictures[len(run) : len(run) + 2]] == [count] * 2
    before, after = f"<turn>user\n{shown}What", f"{video}{BEHIND[name]}{shown}"
    # The user's own text of the token stays text.
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    first, last = (fast.encode(one, add_special_tokens=False).ids for one in (before, after))
    assert ids[: len(first)] == first
    assert ids[-len(last) :] == last
    assert not set(ids[len(first) : -len(last)]) & set(media.texts)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*KINDS, "gemma4-inputs"])
def test_ids_and_tokens_are_the_reference_s(name: str, tmp_path: Path) -> None:
    """Two videos with equal first frames: the second has a prefix hit, and hits of the embedding cache."""
    write_folder(tmp_path, name)
    name = name.removesuffix("-inputs")
    spec = load_spec(str(tmp_path))
    assert spec.vision is not None
    media = spec.vision.media
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, dtype=torch.float64
    ).eval()
    hidden = list(media.placeholders)
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logit_bias=dict.fromkeys(hidden, -100)
    )
    one, other = frames_of(1, 5), frames_of(2, 2)
    films = [one, [*one[:3], *other], [other[0], *one[:2]]]
    seen = []
    with LLM(str(tmp_path), **SETTINGS, limit_mm_per_prompt=8) as llm:
        for frames in films:
            video = {"type": "video", "video": frames, "fps": 0.05}
            content = [video, {"type": "text", "text": "What?"}]
            (made,) = llm.chat([{"role": "user", "content": content}], params, use_tqdm=False)
            text, _ = text_of(name, media, [number / 0.05 for number in range(len(frames))])
            ids = tokenizer.encode("<turn>user\n" + text + BEHIND[name] + "What?", add_special_tokens=False)
            assert made.prompt_token_ids == ids
            expected = greedy(model, ids, reference_inputs(name, frames, spec), 4, hidden)
            assert list(made.outputs[0].token_ids) == expected
            seen.append((tuple(expected), made.num_cached_tokens or 0))
    assert len({tokens for tokens, _ in seen}) == len(films), "the model says the same to every video"
    assert seen[1][1] > 20, "no prefix hit"


@mostly_slow("total", [1, 2, 3, 7, 10, 100, 1001, 40000], [10])
def test_chosen_frames_are_the_reference_s(total: int) -> None:
    """The processor of InternVL needs torchvision to be imported, so its formula stands here."""
    middles, starts = (
        VideoFacts(rule=rule, count=4, min_frames=1)  # type: ignore[arg-type]
        for rule in ("middles", "starts")
    )
    for count in (1, 2, 3, 4, 7, 32):
        if count > total:
            for facts in (middles, starts):
                with pytest.raises(
                    InvalidRequest, match=f"num_frames is {count}, and the video has only {total}"
                ):
                    facts.chosen(total, 25.0, 64, count=count)
            continue
        step = total / count
        assert (
            middles.chosen(total, 25.0, 64, count=count) == torch.arange(step / 2, total, step).int().tolist()
        )
        metadata: Any = SimpleNamespace(total_num_frames=total, fps=25.0)
        due = default_sample_indices_fn(metadata, num_frames=count).tolist()
        assert starts.chosen(total, 25.0, 64, count=count) == due
    # Without a number: that of the settings, within the file and the limit of the server.
    assert len(middles.chosen(total, 25.0, 64)) == min(4, total)
    assert len(middles.chosen(total, 25.0, 3)) == min(3, total)
    assert len(middles.chosen(total, 25.0, 64, fps=5.0)) == max(min(int(total / 25 * 5), total, 64), 1)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("internvl", {"size": {"height": 12, "width": 12}}, "size must have the size of a tile"),
        ("internvl", {"initial_shift": False}, "initial_shift must be true"),
        ("internvl", {"image_mean": [0.1, 0.4, 0.3]}, "image_mean must be the same as for images"),
        ("internvl", {"video_processor_type": "Other"}, "'Other' is not supported"),
        ("gemma4", {"patch_size": 8}, "patch_size is 8, but vision_config"),
        ("gemma4", {"do_sample_frames": False}, "do_sample_frames must be true"),
        ("gemma4", {"fps": 2}, "fps is not supported"),
    ],
)
def test_settings_that_are_refused(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    settings = _settings_of(tmp_path, name)
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({**VIDEOS[name], **changes}))
    with pytest.raises(ConfigError, match=problem):
        load_spec(str(settings))


@pytest.mark.parametrize("name", KINDS)
def test_a_folder_without_video_settings(name: str, tmp_path: Path) -> None:
    vision = load_spec(str(_settings_of(tmp_path, name))).vision
    assert vision is not None
    rules, _ = image_rules(vision.media, 4)
    assert rules is not None
    with pytest.raises(InvalidRequest, match="but no videos: the checkpoint has no supported settings"):
        check_messages([{"role": "user", "content": [{"type": "video", "video": ["data:,1"]}]}], rules.shows)


def _settings_of(folder: Path, name: str) -> Path:
    """Write the settings of a model, without weights and without a video processor."""
    family, settings = CASES[name]
    _save_config(getattr(transformers, f"{family}Config")(**settings), family, folder)
    added = {
        str(number): {"content": text} for number, text in ((122, "<img>"), (123, "</img>"), (127, "<video>"))
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder
