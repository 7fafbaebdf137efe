"""Videos of Qwen2.5-VL through ``LLM``: files and lists of frames, alone and beside images.

Ids are those of the reference's processor, and greedy tokens in float64 those of the reference.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.pictures import data_url, image_file
from tests.support.seen import SeeingModels, Seen
from tests.support.text_folders import IMAGE_TEMPLATE, write_small_tokenizer
from tests.support.vision_models import END, PLACEHOLDER, START, VIDEO, Prompt, config_for, processor_of
from weft import LLM, SamplingParams
from weft.common.errors import InvalidRequest
from weft.config.families import load_spec
from weft.config.media import MediaFacts
from weft.config.sections.media_section import MediaSection
from weft.media.pictures import Pictures
from weft.text.chat import ChatFormat
from weft.text.image_tokens import expanded, image_rules
from weft.text.tokenizer import Tokenizer
from weft.types.media_item import MediaItem

try:
    import av
except ImportError:
    av = None

NAME = "qwen2-5-vl"
TOKENS = {
    "<|image_pad|>": PLACEHOLDER,
    "<|video_pad|>": VIDEO,
    "<|vision_start|>": START,
    "<|vision_end|>": END,
}
HIDDEN = (PLACEHOLDER, VIDEO)
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logit_bias=dict.fromkeys(HIDDEN, -100))
SIZE = (26, 18)
FRAMES = [image_file(SIZE, seed=number) for number in range(9)]


class Written:
    """A prompt as the reference reads it: text, then its images and videos."""

    def __init__(self, media: MediaFacts) -> None:
        self._media = media
        self.ids: list[int] = []
        self._images: list[torch.Tensor] = []
        self._items: list[MediaItem] = []
        self._clips: list[int] = []
        self._seconds: list[float] = []

    def text(self, ids: list[int]) -> None:
        self.ids += ids

    def image(self, file: bytes) -> None:
        self._show([file], PLACEHOLDER, self._media.grid_of(SIZE[1], SIZE[0]))

    def video(self, files: list[bytes], seconds: float) -> None:
        """``seconds``: from group to group."""
        assert self._media.frames is not None
        fit = self._media.video_grid_of(self._media.frames, len(files), SIZE[1], SIZE[0])
        self._show(files, VIDEO, fit)
        self._clips.append(-(-len(files) // 2))
        self._seconds.append(seconds)

    def _show(self, files: list[bytes], token: int, fit: Any) -> None:
        self.ids.append(START)
        for first in range(0, len(files), 2):
            frames = [_pixels(one, fit.size) for one in files[first : first + 2]]
            self._images.append(torch.from_numpy(np.stack(frames)))
            item = MediaItem(key=b"", start=len(self.ids), count=fit.tokens, grid=fit.grid)
            self._items.append(item)
            self.ids += [token] * fit.tokens
        self.ids.append(END)

    def seen(self) -> Seen:
        return Seen(Prompt(self.ids, self._images, self._items, self._clips, self._seconds))


def _pixels(file: bytes, size: tuple[int, int]) -> np.ndarray:
    picture = Image.open(io.BytesIO(file)).convert("RGB")
    return np.asarray(picture.resize((size[1], size[0]), Image.Resampling.BICUBIC))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    made = SeeingModels(tmp_path_factory.mktemp("joined"))
    write_small_tokenizer(Path(made.folder(NAME)), TOKENS, IMAGE_TEMPLATE)
    return made


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


def _decoded(file: bytes, numbers: list[int]) -> list[bytes]:
    with av.open(io.BytesIO(file)) as container:
        every = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return [_png(every[number]) for number in numbers]


def _frames(first: int, end: int, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [data_url(one) for one in FRAMES[first:end]], **more}


def _cases(file: bytes) -> list[tuple[list[Any], Any]]:
    """Return (parts of a message, function that writes the parts as the reference reads them)."""

    def several(made: Written) -> None:
        made.image(FRAMES[8])
        made.video(FRAMES[:5], 2 / 4.0)
        made.video(FRAMES[4:7], 1.0)

    one = {"type": "image_url", "image_url": {"url": data_url(FRAMES[8])}}
    cases: list[tuple[list[Any], Any]] = [
        ([one, _frames(0, 5, fps=4), _frames(4, 7)], several),
        ([_frames(0, 5, fps=4)], lambda made: made.video(FRAMES[:5], 2 / 4.0)),
        ([_frames(0, 5, fps=1)], lambda made: made.video(FRAMES[:5], 2.0)),
        # Seconds from group to group are those of the first frames.
        ([_frames(0, 4, timestamps=[1, 2, 4, 4.5])], lambda made: made.video(FRAMES[:4], 3.0)),
    ]
    if file:
        part = {"type": "video_url", "video_url": {"url": data_url(file, "video/mp4")}}
        # 20 frames at 6 frames per second: 6 frames at 2 frames per second, or 10 to 4 frames by number.
        by_rate = [number * 20 // 6 for number in range(6)]
        by_number = [number * 20 // 4 for number in range(4)]
        cases += [
            ([part], lambda made: made.video(_decoded(file, by_rate), 2 / (6 / 20 * 6))),
            (
                [{**part, "num_frames": 5}],
                lambda made: made.video(_decoded(file, by_number), 2 / (4 / 20 * 6)),
            ),
        ]
    return cases


def _film() -> bytes:
    if av is None:
        return b""
    from tests.support.films import film

    return film(20, size=SIZE)


def test_groups_follow_each_other(tmp_path: Path) -> None:
    """Between the template's tokens each group has only its placeholders; the lags tell the time."""
    (tmp_path / "config.json").write_text(json.dumps(config_for(NAME)))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor_of("Qwen2_5_VL")))
    write_small_tokenizer(tmp_path, TOKENS, IMAGE_TEMPLATE)
    vision = load_spec(str(tmp_path)).vision
    assert vision is not None
    rules, hidden = image_rules(vision.media, 8)
    tokenizer = Tokenizer.load(tmp_path, hidden)
    content = [{"type": "text", "text": "ab<|video_pad|>"}, *_cases(b"")[0][0]]
    made = ChatFormat(tokenizer, images=rules).encode([{"role": "user", "content": content}])
    pictures = Pictures(vision.media, MediaSection()).measured(made.shown, {})
    ids, starts = expanded(made.ids, vision.media, pictures)
    due = Written(vision.media)
    # The user's own text of the token stays text.
    due.text([100, *tokenizer.encode("user\nab<|video_pad|>")])
    assert VIDEO not in due.ids
    _cases(b"")[0][1](due)
    due.text([101, *tokenizer.encode("\n"), 100, *tokenizer.encode("assistant\n")])
    assert ids == due.ids
    assert starts == [item.start for item in due.seen().prompt.items]
    assert [one.lag for one in pictures] == [None, None, 1, 3, None, 3], "3 positions per second"


@pytest.mark.slow
def test_ids_and_tokens_are_the_reference_s(models: SeeingModels) -> None:
    folder = models.folder(NAME)
    spec = load_spec(str(folder))
    assert spec.vision is not None
    media = spec.vision.media
    text = Tokenizer.load(Path(folder), media.placeholders).encode
    said = []
    with LLM(
        str(folder),
        dtype="float64",
        device="cpu",
        kv_cache_memory="32M",
        block_size=4,
        max_num_batched_tokens=24,
        max_model_len=256,
        max_num_seqs=4,
    ) as llm:
        for parts, write in _cases(_film()):
            content = [*parts, {"type": "text", "text": "ab"}]
            (made,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
            due = Written(media)
            due.text([100, *text("user\n")])
            write(due)
            due.text([*text("ab"), 101, *text("\n"), 100, *text("assistant\n")])
            assert made.prompt_token_ids == due.ids
            expected = models.greedy(NAME, due.seen(), 5, HIDDEN)
            assert list(made.outputs[0].token_ids) == expected
            said.append(tuple(expected))
        assert len(set(said)) > len(said) // 2, "the model says the same to every video"
        few = [{"role": "user", "content": [_frames(0, 1)]}]
        with pytest.raises(InvalidRequest, match="at least 2 frames"):
            llm.chat(few, GREEDY, use_tqdm=False)
