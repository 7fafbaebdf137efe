"""Videos of Kimi K2.5: sizes, chosen frames and settings of the reference, and checked items."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.config.test_media import _navit_resize, _sizes
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families.image_processors import patches_facts
from weft.config.media import MediaFacts
from weft.config.resolved import MediaLimits
from weft.config.sizing.media_limits import most_tokens
from weft.scheduler.images.media_book import check_media, patches_of
from weft.types.media_item import MediaItem

PUBLISHED: dict[str, Any] = {
    "in_patch_limit": 16384,
    "patch_size": 14,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2,
    "fixed_output_tokens": None,
    "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096,
    "in_patch_limit_video": None,
    "sample_fps": 2.0,
    "max_num_frames_each_video": None,
    "temporal_merge_kernel_size": 4,
    "timestamp_mode": "hh:mm:ss.fff",
}
"""The settings of the publisher's processor."""


def _facts(folder: Path, videos: dict[str, Any] | None = None, **changes: Any) -> MediaFacts:
    config = {key: value for key, value in {**PUBLISHED, **changes}.items() if value is not ...}
    (folder / "preprocessor_config.json").write_text(json.dumps({"media_proc_cfg": config}))
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return patches_facts(folder, patch=14, merge=2, placeholder=7)


@pytest.mark.parametrize(
    ("most", "limit"), [(4096, 4096), (64, 64), (None, 16384), (..., 4096)], ids=lambda value: str(value)
)
def test_sizes_are_those_of_the_reference(most: Any, limit: int, tmp_path: Path) -> None:
    """The limit of a frame does not depend on the number of frames."""
    facts = _facts(tmp_path, in_patch_limit_each_frame=most)
    assert facts.frames is not None
    assert facts.frames.max_patches == limit
    reference = _navit_resize()
    for number, (height, width) in enumerate(_sizes(300)):
        fit = facts.video_grid_of(facts.frames, number + 1, height, width)
        size, padded = reference(height, width, 14, 2, limit, 512)
        assert (fit.size, fit.padded) == (size, padded), (height, width)
        assert fit.tokens == padded[0] * padded[1] // 28**2


def test_a_group_is_part_of_the_plans_of_memory(tmp_path: Path) -> None:
    assert _facts(tmp_path).most_patches == 16384
    larger = _facts(tmp_path, in_patch_limit_each_frame=20000)
    assert larger.most_patches == 4 * 20000
    assert most_tokens(larger) > most_tokens(_facts(tmp_path))
    assert (larger.group, larger.temporal) == (4, 1)


def test_chosen_frames_are_those_of_the_publisher(tmp_path: Path) -> None:
    """The formula of ``split_video_chunks`` in the publisher's processor."""
    source = random.Random(6)
    for fps in (2.0, 1.0, 0.3):
        video = _facts(tmp_path, sample_fps=fps).frames
        assert video is not None
        for _ in range(500):
            total = source.choice([1, 2, 3, 7, 75, source.randint(1, 20000)])
            rate = source.choice([1, 24, 25, 30, 60, 30000 / 1001, source.uniform(0.1, 240)])
            wanted = max(round(total * min(fps, rate) / rate), 1)
            due = np.linspace(0, total - 1, wanted).round().astype(int).tolist()
            assert video.chosen(total, rate, 1 << 16) == due, (total, rate)
            few = np.linspace(0, total - 1, min(wanted, 8)).round().astype(int).tolist()
            assert video.chosen(total, rate, 8) == few, "the limit of the server"


def test_separate_settings_of_videos(tmp_path: Path) -> None:
    made = _facts(tmp_path, {"video_processor_type": "Kimi_K25VideoProcessor", "fps": 4, "max_patches": 900})
    video = made.frames
    assert video is not None
    assert (video.fps, video.max_patches, video.averaged, made.video) == (4.0, 900, 4, made.placeholder)
    with pytest.raises(ConfigError, match="image_mean must be the same as for images"):
        _facts(tmp_path, {"image_mean": [0.1, 0.5, 0.5]})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"timestamp_mode": "mm:ss"}, "timestamp_mode must be hh:mm:ss.fff"),
        ({"in_patch_limit_video": 9}, "in_patch_limit_video is not supported"),
        ({"temporal_merge_kernel_size": 5}, "temporal_patch_size"),
    ],
)
def test_settings_that_are_for_images_alone(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    facts = _facts(tmp_path, **changes)
    assert facts.frames is None
    assert problem in facts.no_videos


def test_an_item_has_the_tokens_of_one_frame() -> None:
    limits = MediaLimits(
        patch=4, merge=2, frames=4, averaged=True, row_bytes=8, cache_bytes=1 << 20, encode_patches=64,
        most_items=4,
    )  # fmt: skip

    def check(frames: int, count: int, pixels: int) -> MediaItem:
        grid = (frames, 4, 2)
        item = MediaItem(key=b"k" * 16, start=1, count=count, grid=grid, pixels=bytes(pixels * 16 * 8 * 3))
        check_media((item,), 8, limits, computes=True)
        return item

    assert [patches_of(check(frames, 2, frames)) for frames in (1, 3, 4)] == [8, 24, 32]
    for frames, count, pixels, problem in (
        (4, 8, 4, "does not match its tokens"),
        (5, 2, 5, "does not match its tokens"),
        (1, 2, 4, "do not match its grid"),
        (4, 2, 1, "do not match its grid"),
    ):
        with pytest.raises(InvalidRequest, match=problem):
            check(frames, count, pixels)
