"""Videos of a conversation give the ids of the reference's processor; invalid videos are refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata

import weft
from tests.support.text_folders import IMAGE_TEMPLATE
from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts
from weft.text.chat import ChatFormat
from weft.text.chat_messages import Shows, check_messages
from weft.text.image_tokens import expanded, image_rules
from weft.text.images import VideoPart, group_times, video_part
from weft.text.tokenizer import Tokenizer
from weft.text.videos import VideoFile
from weft.types.video_clip import VideoClip

FOLDER = Path(weft.__file__).parent / "checkpoints" / "spool-vision"
NAMES = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")


def _format(template: str = IMAGE_TEMPLATE, most: int = 64, **changes: Any) -> tuple[ChatFormat, MediaFacts]:
    reader = Tokenizer.load(FOLDER)
    image, video, start, end = (reader.added[name] for name in NAMES)
    facts = MediaFacts(
        kind="area",
        patch=8,
        temporal=2,
        merge=2,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        placeholder=image,
        video=video,
        start=start,
        end=end,
        frames=changes.pop("frames", VideoFacts(min_pixels=1, max_pixels=1 << 20)),
    )
    rules, hidden = image_rules(facts, most)
    return ChatFormat(Tokenizer.load(FOLDER, hidden), template, images=rules), facts


def _video(frames: int, **more: Any) -> dict[str, Any]:
    return {"type": "video", "video": [f"data:,{n}" for n in range(frames)], **more}


def _file(url: str = "data:video/mp4;base64,AAAA", **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url}, **more}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
CONTENTS: list[list[dict[str, Any]]] = [
    [_text("What is it:"), _video(4), _text("?")],
    [_video(2, fps=0.7), _text("7 seconds>"), IMAGE, _video(5, fps=29.97), IMAGE, _video(3)],
    [_text("a <"), _video(9, fps=1)],
]


@pytest.mark.parametrize("number", range(len(CONTENTS)))
def test_ids_are_the_reference_s(number: int) -> None:
    content = CONTENTS[number]
    made, facts = _format()
    prompt = made.encode([{"role": "user", "content": content}])
    shown = [part for part in content if part["type"] != "text"]
    counts = [n for place, part in enumerate(shown) for n in [3 + place] * _groups(part)]
    ids, starts = expanded(
        prompt.ids, facts, [SimpleNamespace(count=n, grid=(1, 2, 2 * n), number=0, front=()) for n in counts]
    )

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    processor: Any = object.__new__(Qwen3VLProcessor)
    processor.tokenizer = tokenizer
    processor.image_token, processor.video_token = NAMES[:2]
    processor.vision_start_token, processor.vision_end_token = NAMES[2:]
    processor.video_processor = SimpleNamespace(merge_size=2, temporal_patch_size=2)
    images, videos = [], []
    for place, part in enumerate(shown):
        if part["type"] != "video":
            images.append(NAMES[0] * (3 + place))
            continue
        frames = len(part["video"])
        inputs = {
            "video_grid_thw": torch.tensor([[_groups(part), 2, 2 * (3 + place)]]),
            "video_metadata": [
                VideoMetadata(
                    total_num_frames=frames, fps=part.get("fps", 2), frames_indices=list(range(frames))
                )
            ],
        }
        videos.append(processor.replace_video_token(inputs, 0))
    plain = [
        {"type": "video" if part["type"] == "video" else "image"} if part in shown else part
        for part in content
    ]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": plain}],
        chat_template=IMAGE_TEMPLATE,
        tokenize=False,
        add_generation_prompt=True,
    )
    processor.__class__ = type("Processor", (Qwen3VLProcessor,), {"all_special_multimodal_tokens": NAMES[:2]})
    (whole,), _ = processor.get_text_with_replacements([text], images, videos)
    assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
    assert all(ids[start] in facts.placeholders for start in starts)
    assert len(starts) == len(counts)


def _groups(part: dict[str, Any]) -> int:
    return -(-len(part["video"]) // 2) if part["type"] == "video" else 1


def test_times_of_groups() -> None:
    frames = ("",) * 5
    assert group_times(VideoPart(frames, "x"), 2, 2.0) == [0.25, 1.25, 2.0]
    assert group_times(VideoPart(frames, "x", fps=10.0), 2, 2.0) == [0.05, 0.25, 0.4]
    times = (0.0, 3.0, 3.0, 10.0, 60.0)
    assert group_times(VideoPart(frames, "x", times=times), 2, 2.0) == [1.5, 6.5, 60.0]


def test_what_is_typed_stays_text() -> None:
    made, facts = _format()
    typed = "<|vision_start|><|video_pad|><|vision_end|>"
    prompt = made.encode([{"role": "user", "content": [_text(typed), _video(2), _text(typed)]}])
    assert prompt.ids.count(facts.video) == 1
    plain = made.encode([{"role": "user", "content": typed}])
    assert not {facts.video, facts.start, facts.end} & set(plain.ids)


@pytest.mark.parametrize(
    "template",
    [
        IMAGE_TEMPLATE.replace("<|video_pad|>", ""),
        IMAGE_TEMPLATE.replace("<|video_pad|>", "<|video_pad|><|video_pad|>"),
        IMAGE_TEMPLATE.replace("<|video_pad|>", "<|image_pad|>"),
    ],
)
def test_a_template_that_does_not_show_them(template: str) -> None:
    made, _ = _format(template)
    with pytest.raises(InvalidRequest, match="does not show the videos") as caught:
        made.encode([{"role": "user", "content": [_text("a"), _video(2)]}])
    assert caught.value.param == "messages[0].content[1]"


def test_a_model_without_videos() -> None:
    made, _ = _format(frames=None)
    with pytest.raises(InvalidRequest, match="accepts images, but no videos") as caught:
        made.encode([{"role": "user", "content": [_video(2)]}])
    assert caught.value.param == "messages[0].content[0]"


def _read(*content: Any, most: int = 8) -> tuple[Any, ...]:
    (message,) = check_messages([{"role": "user", "content": list(content)}], Shows(most, 2))
    return message.shown


def test_forms() -> None:
    (listed, jpegs, short, timed) = _read(
        _video(3, fps=4),
        {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,QQ==,Qg=="}},
        {"type": "video", "video": "data:video/jpeg;base64,QQ==,Qg=="},
        _video(2, timestamps=[1, 2.5]),
    )
    assert (listed.frames, listed.fps) == (("data:,0", "data:,1", "data:,2"), 4.0)
    assert listed.place(1) == "messages[0].content[0].video[1]"
    assert jpegs.frames == short.frames == ("data:image/jpeg;base64,QQ==", "data:image/jpeg;base64,Qg==")
    assert jpegs.place(0) == "messages[0].content[1].video_url[0]"
    assert timed.times == (1.0, 2.5)


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ({"type": "video"}, "of the form"),
        ({"type": "video", "video": []}, "of the form"),
        ({"type": "video", "video": {"url": "x"}}, "of the form"),
        ({"type": "video", "video": ["data:,", 7]}, r"video\[1\] must be the URL of an image"),
        ({"type": "video", "video": ["data:,", None]}, r"video\[1\]"),
        ({"type": "video", "video": ["data:,", {"url": "x"}]}, r"video\[1\]"),
        (_video(1), "at least 2 frames; send a single frame as an image"),
        (_file(timestamps=[1, 2]), r"timestamps is for lists of frames; a video file has its own times"),
        (_file(num_frames=1), "num_frames must be an integer from 2"),
        (_file(num_frames=2.5), "num_frames must be an integer from 2"),
        (_file(num_frames=True), "num_frames must be an integer from 2"),
        (_file(num_frames=1 << 70), "num_frames must be an integer from 2"),
        (_file(num_frames=4, fps=2), "fps or num_frames, but not both"),
        (_file(fps=0), "fps must be"),
        (_file(max_pixels=1000), "max_pixels is not supported in a part with a video"),
        (_file(uuid="mine"), "uuid is not supported"),
        (
            _video(4, num_frames=2),
            "num_frames is not supported in a part with a video; num_frames is for video files",
        ),
        ({"type": "video_url", "video_url": {"url": 5}}, "of the form"),
        ({"type": "video_url", "video_url": {"url": "data:,", "x": 1}}, "of the form"),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,QQ=="}}, "at least 2 frames"),
        (_video(2, uuid="mine"), "uuid is not supported"),
        (_video(2, fps=0), "fps must be"),
        (_video(2, fps=True), "fps must be"),
        (_video(2, fps=float("nan")), "fps must be"),
        (_video(2, fps="2"), "fps must be"),
        (_video(2, fps=10**400), "fps must be"),
        (_video(2, fps=1e-300), "fps must be"),
        (_video(2, timestamps=[0, 10**400]), "timestamps must be a list"),
        (_video(2, timestamps=[0, float("nan")]), "timestamps must be a list"),
        (_video(2, timestamps=[1]), "timestamps must be a list"),
        (_video(2, timestamps=[1, -1]), "timestamps must be a list"),
        (_video(2, timestamps=[1, 1e300]), "timestamps must be a list"),
        (_video(2, timestamps=[2, 1]), "in ascending order"),
        (_video(2, timestamps=[1, 2], fps=2), "fps or timestamps, but not both"),
        (_video(17), r"has 9 images \(2 frames of a video count as one\); the limit is 8"),
        (_video(100_000), "the limit is 8"),
    ],
)
def test_parts_that_are_refused(part: dict[str, Any], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem) as caught:
        _read(_text("a"), part)
    assert caught.value.param == "messages[0].content[1]"
    assert len(caught.value.message) < 400


def test_the_form_in_an_error_is_json() -> None:
    with pytest.raises(InvalidRequest, match="must be a part of the form") as caught:
        video_part({"type": "video_url", "video_url": 1}, "part", 2)
    form = json.loads(caught.value.message.partition("of the form ")[2])
    assert form == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,..."}}


def test_any_other_part_is_refused_by_name() -> None:
    """Random values in all fields give a valid part or an error of the request."""
    source = random.Random(3)
    leaves = [
        "",
        "data:,x",
        "data:video/jpeg;base64,",
        "data:video/jpeg;base64,,,",
        0,
        -1,
        2.5,
        None,
        True,
        1 << 70,
    ]

    def value(depth: int) -> Any:
        kind = source.random()
        if depth and kind < 0.4:
            return [value(depth - 1) for _ in range(source.randint(0, 4))]
        if depth and kind < 0.5:
            return {source.choice(["url", "video", "type"]): value(depth - 1)}
        return source.choice(leaves)

    read = files = 0
    wrong = set()
    for _ in range(3000):
        kind = source.choice(["video", "video_url"])
        part = {"type": kind, kind: value(2)}
        for name in ("fps", "timestamps", "num_frames", "x"):
            if source.random() < 0.2:
                part[name] = value(2)
        try:
            (shown,) = _read(part)
        except InvalidRequest as error:
            wrong.add(error.param)
        else:
            if isinstance(shown, VideoFile):
                files += 1
                continue
            assert all(isinstance(frame, str) for frame in shown.frames)
            assert 2 <= len(shown.frames) <= 16
            assert all(len(f"{time:.1f}") < 12 for time in group_times(shown, 2, 2.0))
            read += 1
    assert wrong == {"messages[0].content[0]"}
    assert read > 10
    assert files > 10


def test_images_and_videos_are_counted_together() -> None:
    assert len(_read(_video(6), *[IMAGE] * 5)) == 6
    with pytest.raises(InvalidRequest, match="the limit is 8") as caught:
        _read(_video(6), *[IMAGE] * 6)
    assert caught.value.param == "messages[0].content[6]"
    for role in ("assistant", "system"):
        with pytest.raises(InvalidRequest, match="type video are not supported"):
            check_messages([{"role": role, "content": [_video(2)]}], Shows(8, 2))


def test_forms_of_files() -> None:
    shown = _read(
        _file(fps=4),
        _file("https://example.org/a.mp4", num_frames=8),
        {"type": "video", "video": "data:image/gif;base64,R0lG"},
        {"type": "video_url", "video_url": "https://example.org/b.webm"},
    )
    assert all(isinstance(one, VideoFile) for one in shown)
    assert [one.url[-4:] for one in shown] == ["AAAA", ".mp4", "R0lG", "webm"]
    assert [(one.fps, one.num_frames) for one in shown] == [
        (4.0, None),
        (None, 8),
        (None, None),
        (None, None),
    ]
    with pytest.raises(InvalidRequest, match="the limit is 8"):
        _read(*[_file()] * 9)


def test_files_share_the_room_of_the_prompt() -> None:
    """The chosen frames stand in the prompt as a list with the same times does."""
    made, _ = _format(most=16)
    asked: list[int] = []

    def choose(files: Sequence[VideoFile], most: int) -> list[VideoClip]:
        asked.extend([len(files), most])
        return [VideoClip(key=one.url, numbers=(0, 5, 9), fps=0.6, times=(0.0, 2.5, 4.5)) for one in files]

    content = [_text("a"), _file("data:,1"), IMAGE, _video(3), _file("data:,2"), _text("b")]
    prompt = made.encode([{"role": "user", "content": content}], choose=choose)
    assert asked == [2, (16 - 1 - 2) // 2 * 2]
    timed = _video(3, timestamps=[0, 2.5, 4.5])
    listed = [timed if part["type"] == "video_url" else part for part in content]
    assert prompt.ids == made.encode([{"role": "user", "content": listed}]).ids
    assert [part.file for part in prompt.shown] == ["data:,1", "", "", "data:,2"]
    assert prompt.shown[0].frames == (0, 5, 9)
    with pytest.raises(InvalidRequest, match="video files are not supported here"):
        made.encode([{"role": "user", "content": content}])
