"""Videos of Qwen2-VL and Qwen2.5-VL: sizes, chosen frames and rope positions of the reference."""

from __future__ import annotations

import json
import random
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.video_utils import VideoMetadata

from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families.image_processors import area_facts
from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts
from weft.config.resolved import MediaLimits
from weft.runner.images.image_store import EmbeddingSpans
from weft.scheduler.images.media_book import check_media
from weft.types.media_item import MediaItem, rope_positions, spans_of


def _module() -> Any:
    """Return the module of the reference's processor, which needs torchvision for colours and sizes alone."""
    names = ["torchvision", "torchvision.transforms", "torchvision.transforms.v2"]
    stubs = {name: ModuleType(name) for name in [*names, f"{names[-1]}.functional"]}
    with patch.dict(sys.modules, stubs):
        return import_module("transformers.models.qwen2_vl.video_processing_qwen2_vl")


_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
}
_VIDEOS: dict[str, Any] = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14}


def _facts(folder: Path, videos: dict[str, Any] | None = None, pace: int = 2) -> MediaFacts:
    (folder / "preprocessor_config.json").write_text(json.dumps(_IMAGES))
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**_VIDEOS, **videos}))
    return area_facts(folder, patch=14, temporal=2, merge=2, pace=pace, placeholder=7, video=8)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"min_pixels": 4000, "max_pixels": 90000},
        {"size": {"shortest_edge": 100352, "longest_edge": 602112}},
        {"cap_pixels_per_frame": True, "max_video_tokens": 900},
    ],
)
def test_sizes_are_those_of_the_reference(settings: dict[str, Any], tmp_path: Path) -> None:
    facts = _facts(tmp_path, settings)
    assert facts.frames is not None
    module = _module()
    processor = module.Qwen2VLVideoProcessor(**settings)
    least, most = processor.size.shortest_edge, processor.size.longest_edge
    source = random.Random(5)
    refused = 0
    for _ in range(1000):
        frames = source.choice([2, 3, 4, 5, 7, 16, 61, 768])
        height, width = source.randint(1, 1500), source.randint(1, 1500)
        bound = most
        if processor.cap_pixels_per_frame:  # the formula of the reference's ``resize``
            total = int(processor.max_video_tokens * 28 * 28 * 0.9)
            bound = max(min(most, total * 2 // frames), int(least * 1.05))
        try:
            expected = module.smart_resize(height, width, 28, least, bound)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidRequest, match="too long"):
                facts.video_grid_of(facts.frames, frames, height, width)
            continue
        fit = facts.video_grid_of(facts.frames, frames, height, width)
        assert fit.size == fit.padded == expected, (frames, height, width)
        assert fit.grid == (1, expected[0] // 14, expected[1] // 14)
        if not processor.cap_pixels_per_frame:
            due = processor.get_num_of_video_patches(frames, height, width, {})
            assert -(-frames // 2) * fit.tokens * 4 == due
    assert refused < 50


def test_a_large_frame_is_part_of_the_plans_of_memory(tmp_path: Path) -> None:
    facts = _facts(tmp_path, {"max_pixels": 2 * 12845056})
    assert facts.most_area == 2 * 12845056
    assert facts.most_patches == 2 * 12845056 // 14**2


@mostly_slow("most", [10000, 40000], [10000])
def test_chosen_frames_are_those_of_the_reference(most: int, tmp_path: Path) -> None:
    """The reference rounds to float32: in files of more than 10,000 frames some are neighbours."""
    bounds = {"min_frames": 5, "max_frames": 60}
    processor_of = _module().Qwen2VLVideoProcessor
    each = [(_facts(tmp_path, {}).frames, {}), (_facts(tmp_path, bounds).frames, bounds)]
    source = random.Random(6)
    apart = 0
    for number in range(1000):
        video, more = each[number % 2]
        assert video is not None
        processor = processor_of(**more)
        total = source.choice([2, 3, 7, 100, source.randint(2, most)])
        rate = source.choice([24, 25, 30, 30000 / 1001, source.uniform(0.1, 240)])
        data = VideoMetadata(total_num_frames=total, fps=rate)
        fps = source.choice([2.0, 1, 0.3, 4, source.uniform(0.01, 60)])
        made = video.chosen(total, rate, 768, fps=fps)
        due = processor.sample_frames(data, fps=fps).tolist()
        count = source.randint(2, min(total, 800))
        exactly = video.chosen(total, rate, 800, count=count) if round(count / 2) * 2 <= total else []
        named = processor.sample_frames(data, num_frames=count).tolist() if exactly else []
        for ours, theirs in ((made, due), (exactly, named)):
            # Rounding gives the reference a frame behind the file in some cases.
            theirs = [one for one in theirs if one < total]
            assert len(ours) == len(theirs), (total, rate, fps, count)
            assert max((abs(a - b) for a, b in zip(ours, theirs, strict=True)), default=0) <= 1
            apart += ours != theirs
    assert apart == 0 if most <= 10000 else apart < 60
    # A lower limit of the server acts as the processor's own.
    default = each[0][0]
    assert default is not None
    few = processor_of(max_frames=20).sample_frames(VideoMetadata(total_num_frames=9999, fps=25), fps=2)
    assert default.chosen(9999, 25, 20) == few.tolist()
    assert default.chosen(9999, 25, 768) == default.chosen(9999, 25, 768, fps=2.0), "the default rate"


def test_more_frames_than_a_file_has_are_refused(tmp_path: Path) -> None:
    video = _facts(tmp_path, {}).frames
    assert video is not None
    assert video.chosen(4, 25.0, 16, count=5) == [0, 1, 2, 3], "5 rounds to 4"
    with pytest.raises(InvalidRequest, match="num_frames is 6, and the video has only 5 frames"):
        video.chosen(5, 25.0, 16, count=6)
    with pytest.raises(InvalidRequest, match="num_frames is 7, rounded to 8, and the video has only 7"):
        video.chosen(7, 25.0, 16, count=7)


def test_settings_of_images_are_those_of_videos_too(tmp_path: Path) -> None:
    """Most published checkpoints have one file."""
    video = _facts(tmp_path).frames
    assert video is not None
    assert (video.min_pixels, video.max_pixels, video.fps) == (3136, 12845056, 2.0)
    assert video.joined
    assert (video.min_frames, video.max_frames, video.multiple) == (4, 768, 2)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"video_processor_type": "Qwen3VLVideoProcessor"}, "'Qwen3VLVideoProcessor' is not supported"),
        ({"temporal_patch_size": 4}, "temporal_patch_size is 4"),
        ({"image_std": [0.5, 0.5, 0.5]}, "image_std must be the same as for images"),
        ({"num_frames": 8}, "num_frames is not supported: set fps instead"),
        ({"size": {"shortest_edge": 4096}}, "longest_edge"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        _facts(tmp_path, changes)


# ---- rope positions


def test_timestamps_of_a_rate_count_as_the_rate() -> None:
    """Differences of decimal seconds lie just below whole positions: 0.7 - 0.2 < 0.5."""
    video = VideoFacts(text="", pace=2)
    due = video.lags(8, 2, fps=4.0)
    assert due == [None, *range(1, 8)]
    for first in range(40):
        times = [(10 * first + 25 * number) / 100 for number in range(16)]
        assert video.lags(8, 2, times=times) == due, first


def _prompt(
    source: random.Random, video: VideoFacts, *, long: bool
) -> tuple[list[int], list[Any], list[Any]]:
    """Return (token types: 0 text, 1 image, 2 video; items; (grid, seconds) of each image or video)."""
    types = [0] * source.randint(0, 5)
    items: list[MediaItem] = []
    given = []
    for _ in range(source.randint(1, 5)):
        rows, columns = source.randint(1, 6), source.randint(1, 6)
        groups, fps = 1, 2.0
        is_video = source.random() < 0.7
        if is_video:
            fps = source.choice([2.0, 1.0, 24.0, 29.97, source.uniform(0.5, 60)])
            groups = source.randint(2, 9)
            # ``long``: positions of the last group may lie behind the longer side of a frame.
            while not long and (video.lags(groups, 2, fps)[-1] or 0) >= max(rows, columns):
                groups -= 1
        for lag in video.lags(groups, 2, fps) if is_video else [None]:
            count = rows * columns
            items.append(
                MediaItem(key=b"", start=len(types), count=count, grid=(1, 2 * rows, 2 * columns), lag=lag)
            )
            types += [1 + is_video] * count
        given.append(((groups, 2 * rows, 2 * columns), 2 / fps, is_video))
        types += [0] * source.randint(1, 6)
    return [*types, 0], items, given


def _reference(name: str, types: list[int], given: list[Any], pace: int) -> tuple[torch.Tensor, int]:
    """Return rope positions of the reference, and the shift of generated tokens."""
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=pace)
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    kind: Any = Qwen2_5_VLModel if name == "qwen2_5_vl" else Qwen2VLModel
    model.get_vision_position_ids = lambda *args, **more: kind.get_vision_position_ids(model, *args, **more)
    images = [grid for grid, _, is_video in given if not is_video]
    videos = [grid for grid, _, is_video in given if is_video]
    seconds = [each for _, each, is_video in given if is_video]
    more = {"second_per_grid_ts": torch.tensor(seconds)} if name == "qwen2_5_vl" else {}
    want, delta = kind.get_rope_index(
        model,
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor(videos) if videos else None,
        **more,
    )
    return want[:, 0], int(delta)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("name", "pace"), [("qwen2_vl", 0), ("qwen2_5_vl", 2), ("qwen2_5_vl", 25)])
def test_rope_positions_are_those_of_the_reference(name: str, pace: int, seed: int) -> None:
    """Several videos and images; steps compute the same on the device."""
    video = VideoFacts(text="", pace=pace)
    types, items, given = _prompt(random.Random(seed), video, long=False)
    want, delta = _reference(name, types, given, pace)
    spans = spans_of(items, 2)
    got = rope_positions(spans, np.arange(len(types)))
    assert got.tolist() == want.tolist()
    ahead = np.array([len(types) + 9])
    assert rope_positions(spans, ahead).tolist() == [[len(types) + 9 + delta]] * 3, "generated tokens"
    table = EmbeddingSpans(2, 48, torch.device("cpu"))
    table.alloc(1, spans.ravel())
    at = torch.arange(len(types) + 10)
    found = table.rope_positions(torch.ones_like(at), at)
    assert found[:, : len(types)].tolist() == want.tolist()
    assert found[:, -1].tolist() == rope_positions(spans, ahead)[:, 0].tolist()


@pytest.mark.parametrize("seed", range(10))
def test_text_continues_behind_the_last_group(seed: int) -> None:
    """Behind a long video the reference repeats positions of the video. The publisher's rule continues behind
    the largest position so far. Inside images and videos both rules are equal."""
    video = VideoFacts(text="", pace=2)
    types, items, given = _prompt(random.Random(seed), video, long=True)
    want, _ = _reference("qwen2_5_vl", types, given, 2)
    got = rope_positions(spans_of(items, 2), np.arange(len(types)))
    largest, shift = -1, 0
    for at, kind in enumerate(types):
        if kind == 0:
            assert got[:, at].tolist() == [largest + 1] * 3
        if at == 0 or kind != types[at - 1]:
            shift = int(got[1, at] - want[1, at])
            assert shift >= 0
        assert got[:, at].tolist() == (want[:, at] + shift).tolist()
        largest = max(largest, int(got[:, at].max()))


def test_times_give_lags() -> None:
    video = VideoFacts(text="", pace=2)
    assert video.lags(3, 2, fps=2.0) == [None, 2, 4]
    assert video.lags(3, 2) == [None, 2, 4], "the default rate"
    assert video.lags(4, 2, fps=7.5) == [None, 0, 1, 1]
    assert video.lags(3, 2, times=[1, 1.5, 3, 4, 9.9]) == [None, 4, 17]
    assert VideoFacts(text="").lags(3, 2, fps=9.0) == [None, 1, 2]
    assert VideoFacts().lags(3, 2, fps=9.0) == [None] * 3


def _group(start: int, lag: int | None, columns: int = 4) -> MediaItem:
    return MediaItem(
        key=bytes(16), start=start, count=columns, grid=(1, 4, columns), pixels=bytes(12 * columns), lag=lag
    )


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ([_group(0, 1)], "does not follow"),
        ([_group(0, None), _group(5, 1)], "does not follow"),
        ([_group(0, None), _group(4, 1, 8)], "does not follow"),
        ([_group(0, None), _group(4, -1)], "not in order"),
        ([_group(0, None), _group(4, 3), _group(8, 2)], "not in order"),
        ([_group(0, None), _group(4, 1 << 40)], "too far apart in time"),
        ([_group(0, None), _group(4, 0), _group(8, 5), _group(12, None), _group(16, 1)], ""),
    ],
)
def test_lags_are_checked(items: list[MediaItem], problem: str) -> None:
    limits = MediaLimits(
        merge=2,
        patch=1,
        frames=2,
        row_bytes=8,
        cache_bytes=1 << 20,
        most_items=8,
        sections=True,
        encode_patches=99,
    )
    if not problem:
        check_media(tuple(items), 64, limits, computes=True)
        return
    with pytest.raises(InvalidRequest, match=problem):
        check_media(tuple(items), 64, limits, computes=True)
