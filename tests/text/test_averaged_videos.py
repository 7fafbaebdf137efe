"""Videos of Kimi K2.5 through ``LLM``: the tower averages the frames of a group.

Ids are those of the reference's processor, and greedy tokens in float64 those of the reference.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Fast
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor
from transformers.video_utils import VideoMetadata

from tests.models.conftest import _randomize
from tests.support.pictures import data_url, image_file
from tests.support.vision_models import CASES, processor_of, publish
from tests.text.test_image_tokens import LOOP
from tests.text.test_joined_videos import _decoded, _film, _pixels
from weft import LLM, SamplingParams
from weft.bench.bench_tokenizer import write_tokenizer
from weft.common.errors import InvalidRequest
from weft.config.families import load_spec
from weft.config.media import MediaFacts
from weft.config.sections.media_section import MediaSection
from weft.media.pictures import Pictures
from weft.models.vision.base import colour_table, patches
from weft.text.chat import ChatFormat
from weft.text.image_tokens import expanded, image_rules
from weft.text.tokenizer import Tokenizer

VIDEO = "<|kimi_k25_video_placeholder|>"
"""The template's text for a video. The tokenizer has no such token, as the published one."""
PAD = "<|media_pad|>"
IMAGE = f"<|media_begin|>image<|media_content|>{PAD}<|media_end|>"
TOKENS = (PAD, "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<turn>")
SIZE = (26, 18)
FRAMES = [image_file(SIZE, seed=number) for number in range(9)]


def write_texts(folder: Path) -> Any:
    """Write all files of a model except the weights. Return the configuration, in float64."""
    write_tokenizer(folder, 400, 512)
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TOKENS])
    fast.save(str(folder / "tokenizer.json"))
    added = Tokenizer.load(folder).added
    family, settings = CASES["kimi-k25"]
    ids = {
        "image_token_id": added[PAD],
        "vision_start_token_id": added["<|media_begin|>"],
        "vision_end_token_id": added["<|media_end|>"],
        # Beyond the vocabulary, as in the published configuration.
        "video_token_id": 420,
    }
    text = {**settings["text_config"], "vocab_size": 416, "dtype": "float64"}
    config = transformers.Kimi_K25Config(**{**settings, **ids, "text_config": text})
    config.save_pretrained(folder)
    made = json.loads((folder / "config.json").read_text())
    made["architectures"] = ["Kimi_K25ForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(made))
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_of(family)))
    shown = "part.type == 'image' %%}%s", "part.type == 'image' %%}%s{%% elif part.type == 'video' %%}VIDEO"
    loop = LOOP.replace(*shown).replace("VIDEO", VIDEO)
    (folder / "chat_template.jinja").write_text(loop % IMAGE)
    return config


def write_folder(folder: Path) -> Any:
    """Write a model in float64. Return the reference."""
    config = write_texts(folder)
    model = transformers.Kimi_K25ForConditionalGeneration(config).double().eval()
    _randomize(model, 4)
    model.config._experts_implementation = "eager"
    written = json.loads((folder / "config.json").read_text())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(written))
    publish(folder)
    return model


def _video(first: int, end: int, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [data_url(one) for one in FRAMES[first:end]], **more}


def _text_of(media: MediaFacts, times: list[float]) -> str:
    """Return the text of a video of frames at ``times`` from the reference's processor."""
    assert media.frames is not None
    fit = media.video_grid_of(media.frames, len(times), SIZE[1], SIZE[0])
    processor: Any = object.__new__(Kimi_K25Processor)
    # The publisher's code writes the token of images for a video, too.
    processor.video_token = PAD
    processor.video_processor = type("Sizes", (), {"merge_size": 2, "temporal_patch_size": 4})
    groups = [min(4, len(times) - first) for first in range(0, len(times), 4)]
    metadata = VideoMetadata(total_num_frames=len(times), fps=1.0, frames_indices=times)
    inputs = {
        "num_chunks_per_video": [len(groups)],
        "video_grid_thw": torch.tensor([[group, *fit.grid[1:]] for group in groups]),
        "video_metadata": [metadata],
    }
    return str(processor.replace_video_token(inputs, 0))


def test_text_of_a_video_beside_an_image(tmp_path: Path) -> None:
    write_texts(tmp_path)
    vision = load_spec(str(tmp_path)).vision
    assert vision is not None
    media = vision.media
    rules, hidden = image_rules(media, 8)
    tokenizer = Tokenizer.load(tmp_path, hidden)
    chat = ChatFormat(tokenizer, images=rules)
    image = {"type": "image_url", "image_url": {"url": data_url(FRAMES[0])}}
    times = [0.0, 1.5, 3661.75, 3662.0, 90000.9996]
    content = [image, {"type": "text", "text": f"What{VIDEO}"}, _video(0, 5, timestamps=times)]
    made = chat.encode([{"role": "user", "content": [*content, _video(5, 6)]}])
    pictures = Pictures(media, MediaSection()).measured(made.shown, {})
    assert [one.grid[0] for one in pictures] == [1, 4, 1, 1]
    assert [len(one.frames) for one in pictures] == [1, 4, 1, 1]
    ids, starts = expanded(made.ids, media, pictures)
    fast = Fast.from_file(str(tmp_path / "tokenizer.json"))
    shown = IMAGE.replace(PAD, PAD * pictures[0].count)
    typed = tokenizer.encode(VIDEO)
    assert media.placeholder not in typed
    due = fast.encode(f"<turn>user\n{shown}What", add_special_tokens=False).ids + typed
    video = _text_of(media, times) + _text_of(media, [0.0])
    due += fast.encode(video, add_special_tokens=False).ids
    assert ids[: len(due)] == due
    assert "00:00:00.000" in video
    assert "01:00:00.999" in video, "hours start again after a day"
    assert [ids[start] for start in starts] == [media.placeholder] * 4
    # Without a video the text of the user stays text, too, also across parts.
    parts = [{"type": "text", "text": VIDEO[:9]}, {"type": "text", "text": VIDEO[9:]}]
    plain = chat.encode([{"role": "user", "content": parts}])
    assert VIDEO in tokenizer.decode(plain.ids)


def _cases(file: bytes) -> list[tuple[list[Any], list[tuple[list[bytes], list[float]]]]]:
    """Return (parts of a message, (frames, times) of each video)."""
    both = [(FRAMES[:5], [0, 0.25, 0.5, 0.75, 1.0]), (FRAMES[4:5], [0.0])]
    cases: list[tuple[list[Any], list[tuple[list[bytes], list[float]]]]] = [
        ([_video(0, 5, fps=4), _video(4, 5)], both),
        ([_video(0, 9, fps=4)], [(FRAMES, [number / 4 for number in range(9)])]),
        ([_video(0, 3)], [(FRAMES[:3], [0.0, 0.5, 1.0])]),
    ]
    if file:
        part = {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}
        # 20 frames at 6 frames per second: round(6.67) frames at 2 frames per second.
        numbers = np.linspace(0, 19, 7).round().astype(int).tolist()
        cases.append(([part], [(_decoded(file, numbers), [number / 6 for number in numbers])]))
    return cases


@torch.no_grad()
def _greedy(model: Any, ids: list[int], groups: list[torch.Tensor], media: MediaFacts) -> list[int]:
    """Return the reference's greedy tokens. Rows of the tower are placed here, group by group:
    ``transformers`` 5.23 fails for groups of several frames, because it splits the rows by the number of all
    patches, and joins groups of different lengths."""
    colours = colour_table(media, torch.float32, torch.device("cpu"))
    each = []
    for group in groups:
        pixels = patches(group, media, colours).double().view(-1, 3, media.patch, media.patch)
        grid = torch.tensor([[len(group), group.shape[1] // media.patch, group.shape[2] // media.patch]])
        pooled = model.model.vision_tower(pixels, grid_thw=grid).pooler_output
        each.append(model.model.mm_projector(pooled).squeeze(1))
    rows = torch.cat(each)
    made = list(ids)
    for _ in range(4):
        given = torch.tensor([made])
        embedded = model.get_input_embeddings()(given)
        embedded[given == media.placeholder] = rows.double()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0, -1]
        logits[media.placeholder] = -torch.inf
        top = logits.topk(2).values
        assert top[0] - top[1] > 1e-6, "a tie: choose another seed"
        made.append(int(logits.argmax()))
    return made[len(ids) :]


@pytest.mark.slow
def test_ids_and_tokens_are_the_reference_s(tmp_path: Path) -> None:
    """A longer video shares its first groups with a shorter video."""
    model = write_folder(tmp_path)
    spec = load_spec(str(tmp_path))
    assert spec.vision is not None
    media = spec.vision.media
    assert media.frames is not None
    encode = partial(Fast.from_file(str(tmp_path / "tokenizer.json")).encode, add_special_tokens=False)
    greedy = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, logit_bias={media.placeholder: -100}
    )
    said = []
    with LLM(
        str(tmp_path),
        dtype="float64",
        device="cpu",
        kv_cache_memory="64M",
        block_size=8,
        max_num_batched_tokens=24,
        max_model_len=512,
        max_num_seqs=4,
    ) as llm:
        for parts, videos in _cases(_film()):
            content = [*parts, {"type": "text", "text": "ab"}]
            (made,) = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)
            text = "".join(_text_of(media, times) for _, times in videos)
            due = encode(f"<turn>user\n{text}ab").ids
            prompt = made.prompt_token_ids
            assert prompt is not None
            assert prompt[: len(due)] == due
            groups = []
            for files, _ in videos:
                size = media.video_grid_of(media.frames, len(files), SIZE[1], SIZE[0])
                padded = np.zeros((len(files), *size.padded, 3), np.uint8)
                padded[:, : size.size[0], : size.size[1]] = [_pixels(one, size.size) for one in files]
                groups += [torch.from_numpy(padded[at : at + 4]) for at in range(0, len(files), 4)]
            expected = _greedy(model, list(prompt), groups, media)
            assert list(made.outputs[0].token_ids) == expected
            said.append(tuple(expected))
        assert len(set(said)) > 1, "the model says the same to every video"
        with pytest.raises(InvalidRequest, match=r"the limit is 16"):
            llm.chat([{"role": "user", "content": [_video(0, 9)] * 6}], greedy, use_tqdm=False)
