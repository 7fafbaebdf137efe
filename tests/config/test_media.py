"""Sizes, grids and counts of images equal the reference's image processors, for all layouts of files."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families import load_spec
from weft.config.families.image_processors import area_facts, patches_facts
from weft.config.media import MediaFacts
from weft.types.media_item import MediaItem, rope_positions, spans_of

_QWEN: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def _facts(folder: Path, file: str = "preprocessor_config.json", **changes: Any) -> MediaFacts:
    config = {k: v for k, v in {**_QWEN, **changes}.items() if v is not ...}
    (folder / file).write_text(json.dumps(config))
    return area_facts(folder, patch=16, temporal=2, merge=2, placeholder=7)


def _kimi(folder: Path, **config: Any) -> MediaFacts:
    (folder / "preprocessor_config.json").write_text(json.dumps(config))
    return patches_facts(folder, patch=14, merge=2, placeholder=7)


def _sizes(count: int) -> list[tuple[int, int]]:
    """Heights and widths: small, large, long, and around multiples of a patch."""
    source = random.Random(17)
    sizes = []
    for _ in range(count):
        height = round(math.exp(source.uniform(0, 9)))
        if source.random() < 0.3:
            height = max(1, height // 32 * 32 + source.choice([-1, 0, 1, 16]))
        aspect = math.exp(source.uniform(-5.2, 5.2))
        sizes.append((height, max(1, round(height * aspect))))
    return sizes


@pytest.mark.parametrize("bounds", [(65536, 16777216), (3136, 1003520), (256, 40000), (1024, 1024)])
def test_grids_are_those_of_the_reference(tmp_path: Path, bounds: tuple[int, int]) -> None:
    facts = _facts(tmp_path, size={"shortest_edge": bounds[0], "longest_edge": bounds[1]})
    reference = Qwen2VLImageProcessor.from_pretrained(tmp_path)
    for height, width in _sizes(3000):
        if max(height, width) > 200 * min(height, width):
            with pytest.raises(InvalidRequest, match="too long"):
                facts.grid_of(height, width)
            continue
        fit = facts.grid_of(height, width)
        assert fit.size == fit.padded
        assert fit.size == (fit.grid[1] * 16, fit.grid[2] * 16)
        patches = reference.get_number_of_image_patches(height, width)
        assert (math.prod(fit.grid), fit.tokens * 4) == (patches, patches), (height, width)


def test_resized_as_the_reference_does(tmp_path: Path) -> None:
    facts = _facts(tmp_path, size={"shortest_edge": 1024, "longest_edge": 40000})
    reference = Qwen2VLImageProcessor.from_pretrained(tmp_path)
    for height, width in [(5, 4), (33, 47), (48, 80), (300, 200), (7, 900)]:
        made = reference(np.zeros((height, width, 3), np.uint8), return_tensors="np")
        assert tuple(made["image_grid_thw"][0]) == facts.grid_of(height, width).grid


def _navit_resize() -> Callable[..., Any]:
    """Return the reference's function without an import of its module, which needs torchvision."""
    found = importlib.util.find_spec("transformers")
    assert found is not None
    assert found.submodule_search_locations
    path = Path(found.submodule_search_locations[0]) / "models/kimi_k25/image_processing_kimi_k25.py"
    tree = ast.parse(path.read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "navit_resize")
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([function], []), str(path), "exec"), names)
    result: Callable[..., Any] = names["navit_resize"]
    return result


@pytest.mark.parametrize(("most", "side"), [(16384, 512), (64, 512), (4096, 20), (16, 3)])
def test_padded_grids_are_those_of_the_reference(tmp_path: Path, most: int, side: int) -> None:
    facts = _kimi(tmp_path, max_patches=most, size={"max_height": side, "max_width": side})
    reference = _navit_resize()
    for height, width in _sizes(3000):
        fit = facts.grid_of(height, width)
        size, padded = reference(height, width, 14, 2, most, side)
        assert (fit.size, fit.padded) == (size, padded), (height, width)
        assert fit.grid == (1, padded[0] // 14, padded[1] // 14)
        assert fit.tokens == padded[0] * padded[1] // 28**2


def test_layouts_of_the_file(tmp_path: Path) -> None:
    plain = _facts(tmp_path)
    assert (plain.patch, plain.temporal, plain.merge, plain.placeholder) == (16, 2, 2, 7)
    assert (plain.min_pixels, plain.max_pixels, plain.resample) == (65536, 16777216, 3)
    assert (plain.mean, plain.std, plain.rescale) == ((0.5,) * 3, (0.5,) * 3, 1 / 255)
    assert _facts(tmp_path, image_mean=..., image_std=...).mean[0] == 0.48145466
    old = _facts(tmp_path, min_pixels=3136, max_pixels=602112)
    assert (old.min_pixels, old.max_pixels) == (3136, 602112), "these win, as in the reference"
    (tmp_path / "preprocessor_config.json").unlink()
    new = {"image_processor": _QWEN, "video_processor": {"fps": 2}, "processor_class": "Qwen3VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(new))
    whole = area_facts(tmp_path, patch=16, temporal=2, merge=2, placeholder=7)
    assert whole == msgspec.structs.replace(plain, frames=whole.frames), "of videos see test_videos.py"


def test_the_file_of_a_checkpoint_with_code(tmp_path: Path) -> None:
    published = {
        "in_patch_limit": 4096,
        "patch_size": 14,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 500,
        "in_patch_limit_each_frame": 4096,
        "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
    }
    facts = _kimi(tmp_path, media_proc_cfg=published)
    assert (facts.max_patches, facts.max_side, facts.mean) == (4096, 500, (0.5,) * 3)
    with pytest.raises(ConfigError, match="fixed_output_tokens"):
        _kimi(tmp_path, media_proc_cfg={**published, "fixed_output_tokens": 64})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"patch_size": 14}, "patch_size is 14, but vision_config of config.json says 16"),
        ({"patch_size": ...}, "patch_size is 14, but"),
        ({"temporal_patch_size": 1}, "temporal_patch_size"),
        ({"merge_size": 4}, "merge_size"),
        ({"image_processor_type": "CLIPImageProcessor"}, "'CLIPImageProcessor' is not supported"),
        ({"do_resize": False}, "do_resize must be true"),
        ({"do_normalize": False}, "do_normalize must be true"),
        ({"do_center_crop": True}, "do_center_crop is not supported"),
        ({"size": {"height": 4, "width": 4}}, "size must have a shortest_edge"),
        ({"size": [1, 2]}, "size must be an object"),
        ({"size": {"shortest_edge": 9, "longest_edge": 8}}, "size must have"),
        ({"size": {"shortest_edge": 9, "longest_edge": 80}}, "less than one token"),
        ({"image_mean": [1, 2]}, "image_mean must be a list of three"),
        ({"image_std": [1, 0, 1]}, "image_std must be a list of three"),
        ({"resample": 9}, "resample must be at most 5"),
        ({"rescale_factor": "x"}, "rescale_factor must be a number"),
    ],
)
def test_what_would_change_pixels_is_refused(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        _facts(tmp_path, **changes)
    assert "preprocessor_config.json: " in caught.value.message


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no preprocessor_config.json.*--language-model-only"):
        area_facts(tmp_path, patch=16, temporal=2, merge=2, placeholder=7)


def test_an_image_without_pixels(tmp_path: Path) -> None:
    for facts in (_facts(tmp_path), _kimi(tmp_path)):
        with pytest.raises(InvalidRequest, match="is empty"):
            facts.grid_of(0, 4)


def _items(source: random.Random) -> tuple[list[int], list[MediaItem]]:
    """Return (token types of a prompt: 0 text, 1 image; its images)."""
    types = [0] * source.randint(0, 5)
    items = []
    for _ in range(source.randint(0, 5)):
        grid = (1, 2 * source.randint(1, 6), 2 * source.randint(1, 6))
        count = grid[1] * grid[2] // 4
        items.append(MediaItem(key=b"", start=len(types), count=count, grid=grid))
        types += [1] * count + [0] * source.randint(1, 6)
    return [*types, 0], items


@pytest.mark.parametrize("seed", range(20))
def test_rope_positions_are_those_of_the_reference(seed: int) -> None:
    types, items = _items(random.Random(seed))
    model: Any = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    model.get_vision_position_ids = lambda *given, **more: Qwen3VLModel.get_vision_position_ids(
        model, *given, **more
    )
    want, delta = Qwen3VLModel.get_rope_index(
        model,
        torch.zeros(1, len(types), dtype=torch.int64),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=torch.tensor([item.grid for item in items]) if items else None,
    )
    spans = spans_of(items, 2)
    assert (spans.dtype, spans.shape) == (np.int32, (len(items), 6))
    got = rope_positions(spans, np.arange(len(types)))
    assert got.tolist() == want[:, 0].tolist()
    ahead = rope_positions(spans, np.array([len(types) + 9]))
    assert ahead.tolist() == [[len(types) + 9 + int(delta)]] * 3, "generated tokens"
    some = np.array(random.Random(seed).sample(range(len(types)), len(types) // 2), dtype=np.int64)
    assert rope_positions(spans, some).tolist() == got[:, some].tolist(), "each by itself"


def test_images_in_order() -> None:
    items = [MediaItem(key=b"", start=start, count=4, grid=(1, 4, 4)) for start in (3, 6)]
    with pytest.raises(ValueError, match="overlap"):
        spans_of(items, 2)


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"mrope_section": [1, 2]}, "mrope_section"),
        ({"mrope_interleaved": False}, "mrope_interleaved must be true"),
        ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
    ],
)
def test_ropes_that_are_refused(tmp_path: Path, rope: dict[str, Any], problem: str) -> None:
    text = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 8}
    config: dict[str, Any] = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {**text, "num_attention_heads": 32, "rope_parameters": {"rope_theta": 1e4, **rope}},
        "vision_config": {},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem):
        load_spec(str(tmp_path), language_model_only=True)
