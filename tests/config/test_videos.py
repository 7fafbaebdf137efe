"""Sizes and patches of frames equal the reference's video processor, for all layouts of its file.

The processor needs torchvision for colours and resizing. The tests replace both by the same formula and by
Pillow, frame by frame.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import video_processing_utils as base
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families.image_processors import area_facts
from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts
from weft.models.vision.base import colour_table, patches

_IMAGES: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 1024, "longest_edge": 1 << 24},
    "patch_size": 16,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}
_VIDEOS: dict[str, Any] = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4096, "longest_edge": 25165824},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def _facts(folder: Path, patch: int = 16, images: Any = _IMAGES, videos: Any = _VIDEOS) -> MediaFacts:
    (folder / "preprocessor_config.json").write_text(json.dumps({**images, "patch_size": patch}))
    if videos is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({**videos, "patch_size": patch}))
    return area_facts(folder, patch=patch, temporal=2, merge=2, placeholder=7, video=8)


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("bounds", [(4096, 25165824), (131072, 786432), (256, 40000)])
def test_grids_are_those_of_the_reference(tmp_path: Path, bounds: tuple[int, int], capped: bool) -> None:
    size = {"shortest_edge": bounds[0], "longest_edge": bounds[1]}
    more = {"cap_pixels_per_frame": True, "max_video_tokens": 300} if capped else {}
    facts = _facts(tmp_path, videos={**_VIDEOS, "size": size, **more})
    assert facts.frames is not None
    processor = Qwen3VLVideoProcessor(size=size, **more)
    source = random.Random(5)
    refused = 0
    for _ in range(3000):
        frames = source.choice([2, 3, 4, 5, 7, 16, 61, 768])
        height, width = source.randint(1, 1500), source.randint(1, 1500)
        try:
            expected = processor.get_num_of_video_patches(frames, height, width)
        except ValueError:
            refused += 1
            with pytest.raises(InvalidRequest, match="too long"):
                facts.video_grid_of(facts.frames, frames, height, width)
            continue
        fit = facts.video_grid_of(facts.frames, frames, height, width)
        assert fit.grid[0] == 1
        assert fit.size == fit.padded == (fit.grid[1] * 16, fit.grid[2] * 16)
        assert -(-frames // 2) * fit.grid[1] * fit.grid[2] == expected, (frames, height, width)
        assert fit.tokens * 4 == fit.grid[1] * fit.grid[2]
    assert refused < 100


def test_chosen_frames_are_those_of_the_reference(tmp_path: Path) -> None:
    facts = _facts(tmp_path, videos={**_VIDEOS, "min_frames": 5, "max_frames": 60}).frames
    default = _facts(tmp_path).frames
    assert facts is not None
    assert default is not None
    source = random.Random(6)
    for number in range(3000):
        video, more = (facts, {"min_frames": 5, "max_frames": 60}) if number % 2 else (default, {})
        processor = Qwen3VLVideoProcessor(**more)
        total = source.choice([1, 2, 3, 7, 100, source.randint(1, 40000)])
        rate = source.choice([24, 25, 30, 30000 / 1001, source.uniform(0.1, 240)])
        data = VideoMetadata(total_num_frames=total, fps=rate)
        fps = source.choice([None, 1, 0.3, 4, source.uniform(0.01, 60)])
        expected = processor.sample_frames(data, fps=fps).tolist()
        assert video.chosen(total, rate, 768, fps=fps) == expected, (total, rate, fps)
        count = source.randint(2, 800)
        processor.fps = None
        expected = processor.sample_frames(data, num_frames=count).tolist()
        assert video.chosen(total, rate, 768, count=count) == expected, (total, count)
    # A lower limit of the server acts as the processor's own.
    few = Qwen3VLVideoProcessor(max_frames=20).sample_frames(VideoMetadata(total_num_frames=9999, fps=25))
    assert default.chosen(9999, 25, 20) == few.tolist()


def test_a_frame_without_pixels(tmp_path: Path) -> None:
    facts = _facts(tmp_path)
    assert facts.frames is not None
    with pytest.raises(InvalidRequest, match="is empty"):
        facts.video_grid_of(facts.frames, 2, 0, 9)


class _Processor(Qwen3VLVideoProcessor):
    """The reference's processor without torchvision."""

    def convert_to_rgb(self, video: torch.Tensor) -> torch.Tensor:
        return video

    def normalize(self, image: torch.Tensor, mean: Any, std: Any, **more: Any) -> torch.Tensor:
        shape = (-1, 1, 1)
        return (image - torch.as_tensor(mean).view(shape)) / torch.as_tensor(std).view(shape)


def _resized(self: Any, image: torch.Tensor, size: Any, resample: Any, **more: Any) -> torch.Tensor:
    frames = []
    for frame in image.flatten(0, 1):
        picture = Image.fromarray(frame.permute(1, 2, 0).numpy())
        frames.append(np.asarray(picture.resize((size.width, size.height), Image.Resampling(resample))))
    made = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    return made.view(*image.shape[:2], *made.shape[1:])


@pytest.mark.parametrize("frames", [2, 3, 6])
@pytest.mark.parametrize("size", [(30, 44), (90, 61), (5, 4)])
def test_patches_are_those_of_the_reference(
    frames: int, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = {"shortest_edge": 512, "longest_edge": 12000}
    facts = _facts(tmp_path, patch=4, videos={**_VIDEOS, "size": bounds})
    monkeypatch.setattr(base.BaseVideoProcessor, "resize", _resized)
    processor = _Processor(
        size=bounds, patch_size=4, image_mean=facts.mean, image_std=facts.std, cap_pixels_per_frame=False
    )
    # The reference merges two multiplications, so its patches differ by rounding.
    source = torch.randint(0, 256, (frames, 3, *size), dtype=torch.uint8)
    data = VideoMetadata(total_num_frames=frames, fps=2, frames_indices=list(range(frames)))
    made = processor([source], do_sample_frames=False, video_metadata=[data], return_tensors="pt")
    assert facts.frames is not None
    fit = facts.video_grid_of(facts.frames, frames, *size)
    assert made["video_grid_thw"].tolist() == [[-(-frames // 2), *fit.grid[1:]]]
    sized = _resized(None, source[None], SimpleNamespace(height=fit.size[0], width=fit.size[1]), 3)[0]
    colours = colour_table(facts, torch.float32, torch.device("cpu"))
    groups = [sized[first : first + 2].permute(0, 2, 3, 1) for first in range(0, frames, 2)]
    ours = torch.cat([patches(group, facts, colours) for group in groups])
    assert torch.allclose(ours, made["pixel_values_videos"], rtol=0, atol=2e-6)


def test_pillow_resizes_as_the_reference_s_library_does() -> None:
    """torchvision uses the same filter for 8-bit frames, with another rounding."""
    places = torch.meshgrid(torch.arange(90), torch.arange(61), indexing="ij")
    source = torch.stack([128 + 100 * torch.sin(places[0] / 7 + places[1] / 9 + n) for n in range(3)])
    source = source.to(torch.uint8).unsqueeze(0)
    for size in ((32, 64), (128, 96), (88, 60)):
        ours = _resized(None, source[None], SimpleNamespace(height=size[0], width=size[1]), 3)[0]
        theirs = torch.nn.functional.interpolate(source, size, mode="bicubic", antialias=True)
        apart = (ours.int() - theirs.int()).abs()
        assert apart.max() <= 2
        assert apart.float().mean() < 0.2


def test_layouts_of_the_file(tmp_path: Path) -> None:
    own = _facts(tmp_path).frames
    assert own == VideoFacts(min_pixels=4096, max_pixels=25165824)
    videos = {**_VIDEOS, "fps": 4, "cap_pixels_per_frame": True}
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_processor": _IMAGES, "video_processor": videos})
    )
    nested = _facts(tmp_path).frames
    assert nested == VideoFacts(min_pixels=4096, max_pixels=25165824, fps=4.0, frame_tokens=768), "it wins"
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "video_preprocessor_config.json").unlink()
    like_images = _facts(tmp_path, videos=None).frames
    assert like_images == VideoFacts(min_pixels=1024, max_pixels=1 << 24)
    plain = {key: value for key, value in _IMAGES.items() if not key.startswith("image_")}
    assert _facts(tmp_path, images=plain, videos=None).frames is None, "its colours would be others"
    assert _facts(tmp_path, images={**plain, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, videos=None)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"video_processor_type": "Qwen2VLVideoProcessor"}, "not supported"),
        ({"temporal_patch_size": 4}, "temporal_patch_size is 4"),
        ({"image_std": [0.5, 0.5, 0.5]}, "image_std must be the same as for images"),
        ({"size": {"shortest_edge": 4096}}, "longest_edge"),
        ({"size": {"shortest_edge": 16, "longest_edge": 1024}}, "less than one token"),
        ({"do_normalize": False}, "do_normalize must be true"),
        ({"fps": "fast"}, "fps"),
    ],
)
def test_what_is_not_supported(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        _facts(tmp_path, videos={**_VIDEOS, **changes})
    assert "video_preprocessor_config.json: " in caught.value.message
