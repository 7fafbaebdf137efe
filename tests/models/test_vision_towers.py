"""Towers against their transformers implementations, and their input patches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2VLImageProcessor

from tests.support.vision_models import CASES, random_image
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.config.families.image_processors import patches_facts
from weft.config.media import MediaFacts
from weft.models.loader import load_model
from weft.models.vision import Embedding
from weft.models.vision.base import colour_table, patches

CPU = torch.device("cpu")
Tensor = torch.Tensor


def _media(checkpoint: Any) -> MediaFacts:
    vision = load_spec(checkpoint.folder).vision
    assert vision is not None
    return vision.media


@pytest.mark.parametrize("size", [(8, 8), (40, 24), (8, 64)])
def test_patches_are_those_of_the_reference(size: tuple[int, int], seeing: Any) -> None:
    checkpoint = seeing("qwen3-vl")
    image = random_image(*size, seed=3)
    processor = Qwen2VLImageProcessor.from_pretrained(checkpoint.folder, do_resize=False)
    expected = processor(image[0].numpy(), return_tensors="pt", input_data_format="channels_last")
    media = _media(checkpoint)
    made = patches(image, media, colour_table(media, torch.float32, CPU))
    assert torch.equal(made, expected["pixel_values"])
    grid = (1, size[0] // media.patch, size[1] // media.patch)
    assert tuple(expected["image_grid_thw"][0]) == grid
    assert len(made) == grid[1] * grid[2]


def test_resized_images_are_those_of_the_reference(seeing: Any) -> None:
    """From an image of any size: Pillow's filter, sizes of ``grid_of``."""
    from PIL import Image

    checkpoint = seeing("qwen3-vl")
    media = _media(checkpoint)
    processor = Qwen2VLImageProcessor.from_pretrained(checkpoint.folder)
    for seed, (height, width) in enumerate([(37, 61), (9, 200), (500, 300)]):
        source = Image.fromarray(random_image(height, width, seed)[0].numpy())
        fit = media.grid_of(height, width)
        resized = np.asarray(source.resize((fit.size[1], fit.size[0]), Image.Resampling(media.resample)))
        made = patches(torch.from_numpy(resized.copy())[None], media, colour_table(media, torch.float32, CPU))
        expected = processor(source, return_tensors="pt")
        assert torch.equal(made, expected["pixel_values"])
        assert tuple(expected["image_grid_thw"][0]) == fit.grid


def test_patches_row_by_row(tmp_path: Path) -> None:
    """Kind ``patches``: the reference's formula, which needs torchvision, written out."""
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"patch_size": 4, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]})
    )
    media = patches_facts(tmp_path, patch=4, merge=2, placeholder=1)
    image = random_image(16, 8, seed=1)
    mean = torch.tensor([0.5, 0.4, 0.3]) * (1.0 / (1 / 255))
    std = torch.tensor([0.5, 0.6, 0.7]) * (1.0 / (1 / 255))
    pixels = (image[0].permute(2, 0, 1).float() - mean[:, None, None]) / std[:, None, None]
    expected = pixels.view(3, 4, 4, 2, 4).permute(1, 3, 0, 2, 4).reshape(8, -1)
    assert torch.equal(patches(image, media, colour_table(media, torch.float32, CPU)), expected)


@torch.no_grad()
def _expected(reference: Any, media: MediaFacts, image: Tensor) -> tuple[Tensor, list[Tensor]]:
    pixels = patches(image, media, colour_table(media, torch.float32, CPU)).double()
    frames = -(-image.shape[0] // media.temporal)
    grid = torch.tensor([[frames, image.shape[1] // media.patch, image.shape[2] // media.patch]])
    if media.kind == "patches":
        pixels = pixels.view(len(pixels), 3, media.patch, media.patch)
        made = reference.model.vision_tower(pixels, grid_thw=grid)
        return reference.model.mm_projector(made.pooler_output).squeeze(1), []
    made = reference.model.visual(pixels, grid_thw=grid)
    return made.pooler_output, list(getattr(made, "deepstack_features", None) or [])


def _close(found: Tensor, expected: Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize(
    ("size", "frames"), [((8, 8), 1), ((40, 24), 1), ((16, 72), 1), ((24, 16), 2), ((16, 16), 4)]
)
def test_float64(name: str, size: tuple[int, int], frames: int, seeing: Any) -> None:
    """Frequencies and position weights are float32 in the reference for every dtype."""
    checkpoint = seeing(name)
    model = checkpoint.load(torch.float64)
    image = random_image(*size, seed=5, frames=frames)
    with torch.inference_mode():
        found = model.vision.embed(image)
    main, levels = _expected(checkpoint.reference_in_float64(), _media(checkpoint), image)
    _close(found.main, main, 1e-5)
    assert (found.levels is None) == (not levels)
    if levels:
        _close(found.levels, torch.stack(levels), 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", ["qwen3-vl", "kimi-k25"])
def test_narrower_types(name: str, dtype: torch.dtype, tolerance: float, seeing: Any) -> None:
    checkpoint = seeing(name)
    model = checkpoint.load(dtype)
    image = random_image(40, 24, seed=6)
    with torch.inference_mode():
        found = model.vision.embed(image)
    assert found.main.dtype == dtype
    main, _ = _expected(checkpoint.reference_in_float64(), _media(checkpoint), image)
    assert (found.main.double() - main).abs().mean() <= tolerance * main.abs().mean()


def test_what_is_no_image(seeing: Any) -> None:
    for name in ("qwen3-vl", "kimi-k25"):
        tower = seeing(name).load().vision
        with pytest.raises(ValueError, match="no whole tokens"):
            tower.embed(random_image(8, 12, seed=0))
        with pytest.raises(ValueError, match="uint8"):
            tower.embed(torch.zeros(1, 8, 8, 3))
    with pytest.raises(ValueError, match="5 frames"):
        seeing("kimi-k25").load().vision.embed(random_image(8, 8, seed=0, frames=5))


def _same(one: Embedding, other: Embedding) -> None:
    assert torch.equal(one.main, other.main)
    assert (one.levels is None) == (other.levels is None)
    if one.levels is not None and other.levels is not None:
        assert torch.equal(one.levels, other.levels)


@pytest.mark.parametrize("name", ["qwen3-vl", "kimi-k25"])
def test_the_same_bits_every_time(name: str, seeing: Any) -> None:
    tower = seeing(name).load().vision
    image = random_image(24, 40, seed=8)
    with torch.inference_mode():
        first = tower.embed(image)
        tower.embed(random_image(64, 8, seed=9))
        _same(tower.embed(image.clone()), first)


def _batch(name: str) -> list[Tensor]:
    """Return images of several sizes and numbers of frames, some alike."""
    sizes = [
        ((40, 24), 1),
        ((8, 8), 1),
        ((24, 40), 2),
        ((40, 24), 1),
        ((16, 72), 1),
        ((16, 16), 4),
        ((8, 8), 1),
    ]
    return [random_image(*size, seed=n, frames=frames) for n, (size, frames) in enumerate(sizes)]


@pytest.mark.requirement("D3")
@pytest.mark.parametrize("name", list(CASES))
def test_a_batch_is_its_images_one_by_one(name: str, seeing: Any) -> None:
    tower = seeing(name).load(torch.float64).vision
    images = _batch(name)
    with torch.inference_mode():
        found = tower.embed_batch(images)
        alone = [tower.embed(image) for image in images]
        assert tower.embed_batch([]) == []
    for made, expected in zip(found, alone, strict=True):
        _close(made.main, expected.main, 1e-12)
        assert (made.levels is None) == (expected.levels is None)
        if made.levels is not None and expected.levels is not None:
            _close(made.levels, expected.levels, 1e-12)


@pytest.mark.requirement("D3")
@pytest.mark.parametrize("name", list(CASES))
def test_a_batch_is_that_of_the_reference(name: str, seeing: Any) -> None:
    checkpoint = seeing(name)
    tower = checkpoint.load(torch.float64).vision
    images = _batch(name)
    with torch.inference_mode():
        found = tower.embed_batch(images)
    for made, image in zip(found, images, strict=True):
        main, levels = _expected(checkpoint.reference_in_float64(), _media(checkpoint), image)
        _close(made.main, main, 1e-5)
        if levels:
            assert made.levels is not None
            _close(made.levels, torch.stack(levels), 1e-5)


@pytest.mark.parametrize("name", ["qwen3-vl", "kimi-k25"])
def test_attention_sees_one_image_of_a_batch(name: str, seeing: Any) -> None:
    """Another image of the same size beside an image changes only last bits."""
    tower = seeing(name).load(torch.float64).vision
    image, one, other = (random_image(24, 40, seed=seed) for seed in (1, 2, 3))
    with torch.inference_mode():
        beside_one, beside_other = tower.embed_batch([image, one]), tower.embed_batch([image, other])
    _close(beside_one[0].main, beside_other[0].main, 1e-12)
    assert (beside_one[1].main - beside_other[1].main).abs().max() > 1e-3


def test_one_wrong_image_of_a_batch_is_found(seeing: Any) -> None:
    tower = seeing("qwen3-vl").load().vision
    with pytest.raises(ValueError, match="no whole tokens"):
        tower.embed_batch([random_image(8, 8, seed=0), random_image(8, 12, seed=0)])


@pytest.mark.parametrize("name", list(CASES))
def test_text_alone(name: str, seeing: Any) -> None:
    """With ``language_model_only`` no tower is built, and neither its weights nor image files are
    required.
    """
    folder = seeing(name).folder
    spec = load_spec(folder, language_model_only=True)
    assert spec.vision is None
    model = load_model(folder, spec, torch.float32, CPU, progress=False, pack=False)
    assert model.vision is None
    assert not [n for n, _ in model.named_parameters() if n.startswith("vision")]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"out_hidden_size": 47}, "out_hidden_size is 47, but the text model's hidden_size 48"),
        ({"deepstack_visual_indexes": [0, 3]}, "not all among 3 layers"),
        ({"deepstack_visual_indexes": [1, 0]}, "ascending"),
        ({"num_heads": 3}, "hidden_size 32 is not a multiple of 4 times the 3 heads"),
        ({"patch_size": [4, 5]}, "patch_size must have equal sides"),
        ({"patch_size": 8}, "patch_size is 4, but vision_config"),
        ({"in_channels": 4}, "in_channels = 4 is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_towers_that_are_refused(changes: dict[str, Any], problem: str, seeing: Any, tmp_path: Path) -> None:
    source = Path(seeing("qwen3-vl").folder)
    config = json.loads((source / "config.json").read_text())
    config["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text((source / "preprocessor_config.json").read_text())
    with pytest.raises(ConfigError, match=problem):
        load_spec(str(tmp_path))
    assert load_spec(str(tmp_path), language_model_only=True).vision is None
