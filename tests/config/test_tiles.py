"""Tiles of InternVL and Llama 4: numbers, sizes, pixels and limits are those of the image processors."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)

from tests.support.pictures import data_url
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families import load_spec
from weft.config.media import MediaFacts
from weft.config.parts.tiles import TileFacts, tiling
from weft.config.parts.video_frames import VideoFacts
from weft.config.sections.media_section import MediaSection
from weft.config.sizing.media_limits import media_limits, most_tokens
from weft.config.sizing.memory import tower_bytes
from weft.config.spec import ModelSpec
from weft.media.decode import group_pixels, key_of
from weft.media.fetch import Fetcher
from weft.media.headers import ImageHeader, read_header
from weft.media.media_items import items_of
from weft.media.media_messages import Decode, DecodeFile, WorkerRules, packed, reply_of
from weft.media.media_worker import answer_to
from weft.media.pictures import Frame, Picture, Pictures, runs_of, work_of
from weft.models.vision.base import colour_table
from weft.text.image_tokens import expanded
from weft.text.images import ImagePart, VideoPart

Json = dict[str, Any]
SEPARATORS = ("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>")


RULES = WorkerRules(most_bytes=1 << 20, memory=1 << 30, seconds=5.0)


def _tokens(**ids: int) -> Json:
    return {"added_tokens_decoder": {str(number): {"content": text} for text, number in ids.items()}}


#: name -> files in the form of the publisher, of the smallest model of each kind. Composed, not copied: from
#: the configuration and the tokenizer of OpenGVLab/InternVL3-1B and the converter in transformers; from the
#: defaults of transformers and the special tokens in meta-llama/llama-models.
PUBLISHED: dict[str, dict[str, Json]] = {
    "internvl": {
        "config.json": {
            "architectures": ["InternVLForConditionalGeneration"],
            "downsample_ratio": 0.5,
            "image_seq_length": 256,
            "image_token_id": 151667,
            "model_type": "internvl",
            "projector_hidden_act": "gelu",
            "text_config": {
                "eos_token_id": 151645,
                "hidden_size": 896,
                "intermediate_size": 4864,
                "max_position_embeddings": 32768,
                "max_window_layers": 70,
                "model_type": "qwen2",
                "num_attention_heads": 14,
                "num_hidden_layers": 24,
                "num_key_value_heads": 2,
                "rms_norm_eps": 1e-06,
                "rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"},
                "rope_theta": 1000000.0,
                "sliding_window": None,
                "use_sliding_window": False,
                "vocab_size": 151674,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {
                "attention_bias": True,
                "hidden_act": "gelu",
                "hidden_size": 1024,
                "image_size": [448, 448],
                "intermediate_size": 4096,
                "layer_norm_eps": 1e-06,
                "model_type": "internvl_vision",
                "norm_type": "layer_norm",
                "num_attention_heads": 16,
                "num_channels": 3,
                "num_hidden_layers": 24,
                "patch_size": [14, 14],
                "use_absolute_position_embeddings": True,
                "use_mask_token": False,
                "use_mean_pooling": True,
                "use_qk_norm": False,
            },
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
        },
        "preprocessor_config.json": {
            "crop_size": None,
            "crop_to_patches": False,
            "data_format": "channels_first",
            "default_to_square": True,
            "device": None,
            "do_center_crop": None,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "image_std": [0.229, 0.224, 0.225],
            "max_patches": 12,
            "min_patches": 1,
            "processor_class": "InternVLProcessor",
            "resample": 3,
            "size": {"height": 448, "width": 448},
        },
        "tokenizer_config.json": _tokens(**{"<img>": 151665, "</img>": 151666}),
    },
    "llama4": {
        "config.json": {
            "architectures": ["Llama4ForConditionalGeneration"],
            "boi_token_index": 200080,
            "eoi_token_index": 200081,
            "image_token_index": 200092,
            "model_type": "llama4",
            "text_config": {
                "hidden_size": 5120,
                "model_type": "llama4_text",
                "num_hidden_layers": 2,
                "num_local_experts": 16,
                "vocab_size": 202048,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {
                "attention_dropout": 0.0,
                "hidden_act": "gelu",
                "hidden_size": 1408,
                "image_size": 336,
                "intermediate_size": 5632,
                "model_type": "llama4_vision_model",
                "multi_modal_projector_bias": False,
                "norm_eps": 1e-05,
                "num_attention_heads": 16,
                "num_channels": 3,
                "num_hidden_layers": 34,
                "patch_size": 14,
                "pixel_shuffle_ratio": 0.5,
                "projector_dropout": 0.0,
                "projector_input_dim": 4096,
                "projector_output_dim": 4096,
                "rope_theta": 10000,
                "vision_feature_select_strategy": "default",
                "vision_output_dim": 4096,
            },
        },
        "preprocessor_config.json": {
            "do_convert_rgb": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Llama4ImageProcessorFast",
            "image_std": [0.5, 0.5, 0.5],
            "max_patches": 16,
            "processor_class": "Llama4Processor",
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "resize_to_max_canvas": False,
            "size": {"height": 336, "width": 336},
        },
        "processor_config.json": {"patch_size": 14, "pixel_shuffle_ratio": 0.5},
        "tokenizer_config.json": _tokens(**dict(zip(SEPARATORS, (200084, 200085, 200090), strict=True))),
    },
}


def write(folder: Path, name: str, **changes: Json) -> ModelSpec:
    """Write the publisher's files, with ``changes`` by file (without suffix), and return the spec."""
    for file, content in PUBLISHED[name].items():
        (folder / file).write_text(json.dumps({**content, **changes.get(file.removesuffix(".json"), {})}))
    return load_spec(str(folder))


def media_of(spec: ModelSpec) -> MediaFacts:
    assert spec.vision is not None
    return spec.vision.media


@mostly_slow("name", list(PUBLISHED), ["internvl"])
def test_sizes_of_published_files(name: str, tmp_path: Path) -> None:
    from weft.models.vision.whole_images import image_skeleton

    spec = write(tmp_path, name)
    vision, media = spec.vision, media_of(spec)
    assert vision is not None
    parameters = sum(one.numel() for one in image_skeleton(vision).parameters())
    assert tower_bytes(vision, "bfloat16") == pytest.approx(2 * parameters, rel=0.005)
    tokens, views = {"internvl": (256, 13), "llama4": (144, 17)}[name]
    assert (most_tokens(media), media.most_views) == (tokens, views)
    # Several images of a prompt are bounded by the flag, whatever the number of their tiles.
    limits = media_limits(spec, "bfloat16", 8192, MediaSection(limit_mm_per_prompt=3))
    assert limits is not None
    assert (limits.most_items, limits.tokens_of((1, 24, 24))) == (3 * views, 144)
    ids = {"internvl": {151667, 151665, 151666}, "llama4": {200092, 200080, 200081, 200084, 200085, 200090}}
    assert set(media.texts) == ids[name]


@pytest.mark.parametrize(
    ("head", "outer", "tied"),
    [(True, {}, False), (False, {}, True), (False, {"tie_word_embeddings": False}, False)],
)
def test_a_head_of_its_own_is_not_tied(head: bool, outer: Json, tied: bool, tmp_path: Path) -> None:
    """Files of earlier releases of transformers leave out ``tie_word_embeddings`` = false."""
    names = ["model.language_model.embed_tokens.weight", *(["lm_head.weight"] if head else [])]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    assert write(tmp_path, "internvl", config=outer).tied == tied


def test_the_ratio_is_that_of_the_reference() -> None:
    rng = random.Random(1)
    for least, most in ((1, 12), (1, 40), (3, 6)):
        facts = TileFacts(rule="ratio", least=least, most=most)
        for _ in range(150):
            height, width = rng.randint(1, 3000), rng.randint(1, 3000)
            columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), least, most)
            assert tiling(facts, 448, height, width)[:2] == (rows, columns)


#: (height, width, side, most, grow) -> rows, columns, size: computed by ``Llama4ImageProcessor``.
CANVASES = {
    (336, 336, 336, 16, False): (1, 1, (336, 336)),
    (1, 1, 336, 16, False): (1, 1, (336, 336)),
    (1, 20000, 336, 16, False): (1, 16, (1, 5376)),
    (318, 185, 336, 16, False): (1, 1, (336, 195)),
    (593, 121, 336, 16, False): (2, 1, (593, 121)),
    (823, 1126, 336, 16, False): (3, 4, (823, 1126)),
    (137, 41, 336, 16, True): (7, 2, (2245, 672)),
    (212, 1478, 336, 16, True): (2, 8, (385, 2688)),
    (455, 1066, 336, 16, True): (3, 5, (717, 1680)),
}


def _reference_canvas(height: int, width: int, side: int, most: int, grow: bool) -> tuple[Any, ...]:
    """Return rows, columns and size, computed by the functions of ``Llama4ImageProcessor``."""
    from transformers.image_utils import SizeDict

    code: Any = pytest.importorskip("transformers.models.llama4.image_processing_llama4")
    found = code.find_supported_resolutions.__wrapped__(most, SizeDict(height=side, width=side))
    canvas = code.get_best_fit((height, width), torch.tensor(found), resize_to_max_canvas=grow)
    room = canvas if grow else (min(max(height, side), canvas[0]), min(max(width, side), canvas[1]))
    size = code.get_max_res_without_distortion((height, width), room)
    rows, columns = int(canvas[0]) // side, int(canvas[1]) // side
    return rows, columns, (max(int(size[0]), 1), max(int(size[1]), 1))


def test_the_canvas_is_that_of_the_reference() -> None:
    for (height, width, side, most, grow), expected in CANVASES.items():
        assert tiling(TileFacts(rule="canvas", most=most, grow=grow), side, height, width) == expected


@pytest.mark.slow
def test_random_canvases_are_those_of_the_reference() -> None:
    """With torchvision, which transformers needs for this image processor."""
    pytest.importorskip("torchvision")
    rng = random.Random(2)
    for number in range(400):
        height, width = rng.randint(1, 4000), rng.randint(1, 4000)
        for side, most, grow in ((336, 16, False), (336, 16, True), (8, 5, False), (12, 1, False)):
            facts = TileFacts(rule="canvas", most=most, grow=grow)
            expected = _reference_canvas(height, width, side, most, grow)
            assert tiling(facts, side, height, width) == expected, number


def png(height: int, width: int, seed: int = 0) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


def fitted(pictures: Pictures, file: bytes, detail: str = "auto") -> list[Picture]:
    return pictures.fitted(Frame(where="x", header=read_header(file), data=memoryview(file)), detail)


def coloured(media: MediaFacts, file: bytes, found: list[Picture]) -> torch.Tensor:
    """Return the pixels of all items as the tower sees them: [items, 3, side, side]."""
    raw = group_pixels([(file, read_header(file))], [one.target for one in found])
    table = colour_table(media, torch.float32, torch.device("cpu"))
    made = []
    for one, data in zip(found, raw, strict=True):
        pixels = torch.from_numpy(
            np.frombuffer(data, np.uint8).reshape(*one.target.shape, 3).astype(np.int64)
        )
        made.append(torch.stack([table[c][pixels[..., c]] for c in range(3)]))
    return torch.stack(made)


def small(folder: Path, name: str, side: int = 56) -> MediaFacts:
    """Return the facts of a model with tiles of ``side`` pixels."""
    size = {"size": {"height": side, "width": side}}
    vision = {**PUBLISHED[name]["config.json"]["vision_config"], "image_size": side}
    config = {"vision_config": vision, "image_seq_length": (side // 28) ** 2}
    return media_of(write(folder, name, config=config, preprocessor_config=size))


SIZES = [(1, 1), (37, 61), (130, 130), (8, 700)]


def test_pixels_of_internvl_are_those_of_the_reference(tmp_path: Path) -> None:
    media = small(tmp_path, "internvl")
    config = json.loads((tmp_path / "preprocessor_config.json").read_text())
    processor = GotOcr2ImageProcessorPil(**{**config, "crop_to_patches": True})
    pictures = Pictures(media, MediaSection())
    for seed, (height, width) in enumerate(SIZES):
        file = png(height, width, seed)
        found = fitted(pictures, file)
        theirs = processor(Image.open(io.BytesIO(file)), return_tensors="pt")
        assert len(found) == int(theirs["num_patches"][0])
        assert torch.allclose(coloured(media, file, found), theirs["pixel_values"], atol=1e-5)


def llama4_pixels(file: bytes, media: MediaFacts) -> torch.Tensor:
    """Return the pixel values of ``Llama4ImageProcessor``, [items, 3, side, side], resized by Pillow.

    The reference's resizing of torchvision differs by at most one level of a colour.
    """
    assert media.tiles is not None
    image, side = Image.open(io.BytesIO(file)), media.longest
    cut = tiling(media.tiles, side, image.height, image.width)
    bilinear = Image.Resampling.BILINEAR
    canvas = torch.zeros(3, cut.rows * side, cut.columns * side)
    resized = np.asarray(image.resize(cut.size[::-1], bilinear))
    canvas[:, : cut.size[0], : cut.size[1]] = torch.from_numpy(resized.copy()).permute(2, 0, 1)
    tiles = canvas.view(3, cut.rows, side, cut.columns, side).permute(1, 3, 0, 2, 4).flatten(0, 1)
    if len(tiles) > 1:
        whole = torch.from_numpy(np.asarray(image.resize((side, side), bilinear)).copy()).permute(2, 0, 1)
        tiles = torch.cat([tiles, whole[None]])
    scaled = tiles.to(torch.bfloat16) * (1 / 255)
    return (
        (scaled - torch.tensor(0.5, dtype=torch.bfloat16)) / torch.tensor(0.5, dtype=torch.bfloat16)
    ).float()


def test_pixels_of_llama4_are_those_of_the_reference(tmp_path: Path) -> None:
    media = small(tmp_path, "llama4")
    pictures = Pictures(media, MediaSection())
    for seed, (height, width) in enumerate(SIZES):
        file = png(height, width, seed)
        found = fitted(pictures, file)
        assert torch.equal(coloured(media, file, found), llama4_pixels(file, media))


def test_equal_tiles_have_one_key(tmp_path: Path) -> None:
    """The white tiles of a page are encoded once."""
    pictures = Pictures(small(tmp_path, "internvl"), MediaSection())
    file = io.BytesIO()
    page = Image.new("RGB", (224, 56), "white")
    page.putpixel((60, 5), (0, 0, 0))
    page.save(file, "PNG")
    found = fitted(pictures, file.getvalue())
    assert [one.number for one in found] == [0, 1, 2, 3, 4]
    assert len({one.target.part for one in found}) == 5
    targets = [one.target for one in found]
    pixels = group_pixels([(file.getvalue(), read_header(file.getvalue()))], targets)
    keys = [key_of(data, target) for data, target in zip(pixels, targets, strict=True)]
    assert keys[0] == keys[2] == keys[3]
    assert len(set(keys)) == 3


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_worker_makes_all_tiles_of_one_file(name: str, tmp_path: Path) -> None:
    """One task decodes the file once. The tokens of the prompt are known before."""
    media = small(tmp_path, name)
    files = [png(60, 130), png(20, 20)]
    found = [one for file in files for one in fitted(Pictures(media, MediaSection()), file)]
    ids, starts = expanded([7, media.placeholder, 8, media.placeholder], media, found)
    assert len(ids) == 4 + sum(one.more for one in found)
    placeholders = [n for n, token in enumerate(ids) if token == media.placeholder]
    assert placeholders == [
        n for at, one in zip(starts, found, strict=True) for n in range(at, at + one.count)
    ]
    run, alone = runs_of(found)
    assert (len(run), len(alone)) == (3 if name == "internvl" else 7, 1)
    file = DecodeFile(header=read_header(files[0]), size=len(files[0]))
    task = Decode(files=(file,), targets=tuple(one.target for one in run), into=(None,) * len(run))
    done, rest = reply_of(b"".join(answer_to(packed(task) + files[0], Fetcher((), 0, 0), RULES)))
    items = items_of(run, [None] * len(run), done, rest)
    assert [bytes(one.pixels) for one in items] == group_pixels([(files[0], file.header)], task.targets)
    assert [one.key for one in items] == [
        key_of(i.pixels, one.target) for i, one in zip(items, run, strict=True)
    ]


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_a_small_version_is_one_tile(name: str, tmp_path: Path) -> None:
    media = small(tmp_path, name)
    (one,) = fitted(Pictures(media, MediaSection()), png(200, 61), "low")
    assert (one.number, one.count) == (0, 4)
    assert one.front == {"internvl": (), "llama4": (200090,)}[name]


def header(height: int, width: int) -> Frame:
    return Frame(where="x", header=ImageHeader(format="PNG", width=width, height=height))


def test_the_work_for_small_images_counts(tmp_path: Path) -> None:
    """A file of a few bytes can become 13 tiles. Limits of prompts and shares of clients count these."""
    media = media_of(write(tmp_path, "internvl"))
    found = Pictures(media, MediaSection()).fitted(header(1, 100))
    assert len(found) == 13
    assert work_of(found) == 448 * (12 * 448 + 448)
    assert work_of(Pictures(media, MediaSection()).fitted(header(4000, 3000))) == 4000 * 3000
    limited = Pictures(media, MediaSection(max_request_pixels=4 << 20))
    small = [ImagePart(data_url(png(1, 100)), "x")]
    assert len(limited.measured(small, {})) == 13
    with pytest.raises(InvalidRequest, match="--max-request-pixels"):
        limited.measured(small * 2, {})


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_images_of_extreme_shape_are_refused(name: str, tmp_path: Path) -> None:
    """Between its two passes a resize would need gigabytes."""
    pictures = Pictures(media_of(write(tmp_path, name)), MediaSection())
    assert len(pictures.fitted(header(100_000, 300))) > 12
    with pytest.raises(InvalidRequest, match="has 1 x 200000 pixels, a shape too long"):
        pictures.fitted(header(200_000, 1))


def test_frames_of_videos_have_the_limits_of_images(tmp_path: Path) -> None:
    """A frame becomes one tile, of any shape and size."""
    media = media_of(write(tmp_path, "internvl"))
    videos = msgspec.structs.replace(media, video=media.placeholder, frames=VideoFacts(rule="middles"))
    pictures = Pictures(videos, MediaSection())
    assert len(pictures.groups([header(100_000, 300)] * 2, "x")) == 2
    with pytest.raises(InvalidRequest, match="has 1 x 200000 pixels, a shape too long") as caught:
        pictures.groups([header(200_000, 1)] * 2, "x")
    assert caught.value.error_code == "image_too_large"
    # A frame of one pixel is work of one tile.
    limited = Pictures(videos, MediaSection(max_request_pixels=4 * 448 * 448))
    film = VideoPart((data_url(png(1, 1)),) * 2, "x")
    assert len(limited.measured([film] * 2, {})) == 4
    with pytest.raises(InvalidRequest, match="--max-request-pixels"):
        limited.measured([film] * 3, {})


@pytest.mark.parametrize(
    ("name", "file", "change", "refusal"),
    [
        ("internvl", "config", {"image_seq_length": 255}, "image_seq_length must be 256"),
        ("internvl", "config", {"downsample_ratio": 0.3}, "downsample_ratio 0.3 does not divide 448 x 448"),
        ("internvl", "config", {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported"),
        ("internvl", "preprocessor_config", {"size": {"height": 448, "width": 336}}, "size must have"),
        ("internvl", "preprocessor_config", {"max_patches": 65}, "max_patches must be at most 64"),
        ("internvl", "tokenizer_config", {"added_tokens_decoder": {}}, "tokens <img> and </img>"),
        ("llama4", "preprocessor_config", {"size": {"height": 448, "width": 448}}, "size must have .*: 336"),
        ("llama4", "processor_config", {"patch_size": 28}, "patch_size must be 14"),
        ("llama4", "tokenizer_config", {"added_tokens_decoder": {}}, "tile_x_separator"),
    ],
)
def test_other_settings_are_refused(name: str, file: str, change: Json, refusal: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=refusal):
        write(tmp_path, name, **{file: change})


@pytest.mark.parametrize("name", ["intermediate_size", "vision_output_dim", "projector_input_dim"])
def test_sizes_of_llama4_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    vision = {**PUBLISHED["llama4"]["config.json"]["vision_config"], name: 1024}
    with pytest.raises(ConfigError, match=f"{name} must be"):
        write(tmp_path, "llama4", config={"vision_config": vision})


@pytest.mark.parametrize("trust", [False, True])
def test_the_form_with_code_is_refused_by_name(trust: bool, tmp_path: Path) -> None:
    config = {"architectures": ["InternVLChatModel"], "auto_map": {"AutoModel": "modeling.Model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'InternVLChatModel' runs with code.*InternVL3-8B-hf"):
        load_spec(str(tmp_path), trust_remote_code=trust)
