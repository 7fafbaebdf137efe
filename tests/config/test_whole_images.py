"""Images of Gemma 3, Gemma 4 and Mistral Small 3.x: sizes, pixels and settings of the processors."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)
from transformers.models.pixtral.image_processing_pil_pixtral import (
    PixtralImageProcessorPil,
    get_resize_output_image_size,
)

from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.families import load_spec
from weft.config.media import MOST_ASPECT, MediaFacts
from weft.config.sections.media_section import MediaSection
from weft.config.sizing.media_limits import ahead_groups, most_tokens
from weft.config.sizing.memory import encoding_bytes, tower_bytes
from weft.config.spec import ModelSpec
from weft.media.decode import pixels_of
from weft.media.headers import read_header
from weft.media.pictures import Frame, Pictures
from weft.models.vision.base import colour_table

Json = dict[str, Any]
_SIGLIP: Json = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
#: name -> files in the form of the publisher, of the smallest model of each kind.
PUBLISHED: dict[str, dict[str, Json]] = {
    "gemma3": {
        "config.json": {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 255999,
            "eoi_token_index": 256000,
            "eos_token_id": [1, 106],
            "image_token_index": 262144,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 256,
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "torch_dtype": "bfloat16",
            "vision_config": _SIGLIP,
        },
        "preprocessor_config.json": {
            "do_convert_rgb": None,
            "do_normalize": True,
            "do_pan_and_scan": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_processor_type": "Gemma3ImageProcessor",
            "image_seq_length": 256,
            "image_std": [0.5, 0.5, 0.5],
            "processor_class": "Gemma3Processor",
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
    },
    "gemma4": {
        "config.json": {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "audio_config": None,
            "audio_token_id": 258881,
            "boi_token_id": 255999,
            "dtype": "bfloat16",
            "eoi_token_id": 258882,
            "image_token_id": 258880,
            "model_type": "gemma4",
            "text_config": {
                "model_type": "gemma4_text",
                "hidden_size": 5376,
                "num_hidden_layers": 12,
                "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 2,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 256,
                "global_head_dim": 512,
                "num_global_key_value_heads": 4,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "intermediate_size": 21504,
                "use_bidirectional_attention": "vision",
                "vocab_size": 262144,
                "max_position_embeddings": 262144,
            },
            "video_token_id": 258884,
            "vision_config": {
                "head_dim": 72,
                "global_head_dim": 72,
                "default_output_length": 280,
                "hidden_activation": "gelu_pytorch_tanh",
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "model_type": "gemma4_vision",
                "num_attention_heads": 16,
                "num_hidden_layers": 27,
                "num_key_value_heads": 16,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "position_embedding_size": 10240,
                "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
                "standardize": True,
                "use_clipped_linears": False,
            },
            "vision_soft_tokens_per_image": 280,
        },
        "processor_config.json": {
            "image_processor": {
                "do_convert_rgb": True,
                "do_normalize": False,
                "do_rescale": True,
                "do_resize": True,
                "image_mean": [0.0, 0.0, 0.0],
                "image_processor_type": "Gemma4ImageProcessor",
                "image_std": [1.0, 1.0, 1.0],
                "max_soft_tokens": 280,
                "patch_size": 16,
                "pooling_kernel_size": 3,
                "resample": 3,
            }
        },
    },
    "mistral3": {
        "config.json": {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "text_config": {
                "head_dim": 128,
                "hidden_act": "silu",
                "hidden_size": 5120,
                "intermediate_size": 32768,
                "max_position_embeddings": 131072,
                "model_type": "mistral",
                "num_attention_heads": 32,
                "num_hidden_layers": 40,
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-05,
                "rope_theta": 1000000000.0,
                "sliding_window": None,
                "vocab_size": 131072,
            },
            "torch_dtype": "bfloat16",
            "vision_config": {
                "attention_dropout": 0.0,
                "head_dim": 64,
                "hidden_act": "silu",
                "hidden_size": 1024,
                "image_size": 1540,
                "initializer_range": 0.02,
                "intermediate_size": 4096,
                "model_type": "pixtral",
                "num_attention_heads": 16,
                "num_channels": 3,
                "num_hidden_layers": 24,
                "patch_size": 14,
                "rope_theta": 10000.0,
            },
            "vision_feature_layer": -1,
        },
        "preprocessor_config.json": {
            "crop_size": None,
            "do_center_crop": None,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_pad": None,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "PixtralImageProcessorFast",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "patch_size": {"height": 14, "width": 14},
            "processor_class": "PixtralProcessor",
            "resample": 3,
            "size": {"longest_edge": 1540},
        },
        "processor_config.json": {
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
            "image_token": "[IMG]",
            "patch_size": 14,
            "processor_class": "PixtralProcessor",
            "spatial_merge_size": 2,
        },
        "tekken.json": {
            "special_tokens": [
                {"rank": 10, "token_str": "[IMG]", "is_control": True},
                {"rank": 12, "token_str": "[IMG_BREAK]", "is_control": True},
                {"rank": 13, "token_str": "[IMG_END]", "is_control": True},
            ]
        },
    },
}
SIZES = [(1, 1), (1, 150), (900, 7), (27, 29), (896, 896), (1540, 40), (1080, 1920), (4000, 3000), (199, 1)]


def write(folder: Path, name: str, **changes: Json) -> ModelSpec:
    """Write the publisher's files, with ``changes`` by file (without suffix), and return the spec."""
    for file, content in PUBLISHED[name].items():
        (folder / file).write_text(json.dumps({**content, **changes.get(file.removesuffix(".json"), {})}))
    return load_spec(str(folder))


def media_of(folder: Path, name: str) -> MediaFacts:
    vision = write(folder, name).vision
    assert vision is not None
    return vision.media


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_sizes_of_published_files(name: str, tmp_path: Path) -> None:
    from weft.models.vision.whole_images import image_skeleton

    spec = write(tmp_path, name)
    vision = spec.vision
    assert vision is not None
    parameters = sum(one.numel() for one in image_skeleton(vision).parameters())
    assert tower_bytes(vision, "bfloat16") == pytest.approx(2 * parameters, rel=0.005)
    media = vision.media
    tokens = {"gemma3": 256, "gemma4": 280, "mistral3": 55 * 56}[name]
    assert most_tokens(media) == tokens
    assert media.most_patches == {"gemma3": 4096, "gemma4": 2520, "mistral3": 110 * 110}[name]
    assert encoding_bytes(vision, "bfloat16") > media.most_patches * 2 * vision.intermediate
    ids = (media.placeholder, media.start, media.end, media.row_end)
    assert (
        ids
        == {
            "gemma3": (262144, 255999, 256000, None),
            "gemma4": (258880, 255999, 258882, None),
            "mistral3": (10, None, 13, 12),
        }[name]
    )
    windows = tuple(number for number, cache in enumerate(spec.caches) if cache.kind == "window")
    assert ahead_groups(spec) == {"gemma3": (0, 1), "gemma4": windows, "mistral3": ()}[name]


def _random_sizes(seed: int) -> list[tuple[int, int]]:
    rng = random.Random(seed)
    made = [(rng.randint(1, 3000), rng.randint(1, 3000)) for _ in range(60)]
    return [(h, w) for h, w in made if max(h, w) <= MOST_ASPECT * min(h, w)]


def test_sizes_are_those_of_the_reference(tmp_path: Path) -> None:
    for name in ("gemma4", "mistral3"):
        folder = tmp_path / name
        folder.mkdir()
        media = media_of(folder, name)
        for height, width in [*SIZES, *_random_sizes(1)]:
            fit = media.grid_of(height, width)
            if name == "mistral3":
                image = np.broadcast_to(np.uint8(0), (3, height, width))
                theirs = get_resize_output_image_size(image, (1540, 1540), (28, 28))
                rows, columns = theirs[0] // 28, theirs[1] // 28
                assert fit.tokens == rows * (columns + 1)
            else:
                theirs = get_aspect_ratio_preserving_size(height, width, 16, 2520, 3)
                assert fit.tokens == theirs[0] * theirs[1] // 48**2 <= 280
            assert fit.size == fit.padded == theirs
            assert fit.grid == (1, theirs[0] // media.patch, theirs[1] // media.patch)
    gemma3 = media_of(tmp_path, "gemma3")
    assert {gemma3.grid_of(*size) for size in SIZES} == {gemma3.grid_of(1, 5000)}
    assert gemma3.grid_of(3, 2).tokens == 256


@pytest.mark.parametrize("name", ["gemma4", "mistral3"])
def test_extreme_aspect_ratios_are_refused(name: str, tmp_path: Path) -> None:
    media = media_of(tmp_path, name)
    with pytest.raises(InvalidRequest, match="longer side may be at most 200 times"):
        media.grid_of(1, 201)
    with pytest.raises(InvalidRequest, match="is empty"):
        media.grid_of(0, 5)


def _file(kind: str, height: int, width: int) -> bytes:
    """Return a PNG (colours, one channel of 8 or 16 bits, opaque colours with transparency, or a palette), or
    a turned JPEG."""
    noise = np.random.default_rng(height).integers(0, 256, (height, width, 4), np.uint8)
    image = {
        "RGB": lambda: Image.fromarray(noise[..., :3].copy()),
        "L": lambda: Image.fromarray(noise[..., 0].copy()),
        "RGBA": lambda: Image.fromarray(np.concatenate([noise[..., :3], 0 * noise[..., :1] + 255], axis=2)),
        "P": lambda: Image.fromarray(noise[..., :3].copy()).quantize(16),
        "I;16": lambda: Image.fromarray(noise[..., 0].astype(np.uint16) * 3),
        "turned": lambda: Image.fromarray(noise[..., :3].copy()),
    }[kind]()
    file = io.BytesIO()
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 6
        image.save(file, "JPEG", exif=exif)
    else:
        image.save(file, "PNG")
    return file.getvalue()


@mostly_slow("kind", ["RGB", "L", "RGBA", "P", "I;16", "turned"], ["turned"])
@pytest.mark.parametrize("name", list(PUBLISHED))
def test_pixels_are_those_of_the_reference(name: str, kind: str, tmp_path: Path) -> None:
    """From a file: decoded and resized as by a media worker, then coloured as by the tower."""
    small = {
        "gemma3": {"config": {"vision_config": {**_SIGLIP, "image_size": 56}, "mm_tokens_per_image": 4}},
        "gemma4": {},
        "mistral3": {},
    }[name]
    sizes = [(1, 1), (37, 61), (90, 8)]
    processor: Any
    if name == "gemma3":
        small["preprocessor_config"] = {"size": {"height": 56, "width": 56}}
        processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    elif name == "gemma4":
        image = {**PUBLISHED[name]["processor_config.json"]["image_processor"], "max_soft_tokens": 70}
        small["processor_config"] = {"image_processor": image}
        processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    else:
        small["preprocessor_config"] = {"size": {"longest_edge": 84}}
        processor = PixtralImageProcessorPil(
            size={"longest_edge": 84}, patch_size={"height": 28, "width": 28}
        )
    vision = write(tmp_path, name, **small).vision
    assert vision is not None
    media = vision.media
    pictures = Pictures(media, MediaSection())
    table = colour_table(media, torch.float32, torch.device("cpu"))
    for height, width in sizes:
        file = _file(kind, height, width)
        header = read_header(file)
        target = pictures.fitted(Frame(where="x", header=header, data=memoryview(file)))[0].target
        raw = np.frombuffer(pixels_of(file, header, target), np.uint8).reshape(*target.canvas, 3)
        made = torch.stack([table[c][torch.from_numpy(raw[..., c].astype(np.int64))] for c in range(3)])
        upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
        theirs = processor(upright.convert("RGB"), return_tensors="pt")
        expected = theirs["pixel_values"][0]
        if name == "gemma4":
            rows, columns = target.height // 16, target.width // 16
            cut = expected[: rows * columns].view(rows, columns, 16, 16, 3)
            expected = cut.permute(4, 0, 2, 1, 3).reshape(3, target.height, target.width)
            assert int(theirs["num_soft_tokens_per_image"][0]) == rows * columns // 9
        assert made.shape == expected.shape
        assert torch.allclose(made, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_low_detail_is_smaller(name: str, tmp_path: Path) -> None:
    media = media_of(tmp_path, name)
    pictures = Pictures(media, MediaSection())
    file = _file("RGB", 800, 1000)
    frame = Frame(where="x", header=read_header(file), data=memoryview(file))
    low, high = (pictures.fitted(frame, detail)[0].count for detail in ("low", "auto"))
    assert low == high if name == "gemma3" else low < high / 2


@pytest.mark.parametrize(
    ("name", "file", "changes", "problem"),
    [
        ("gemma3", "preprocessor_config", {"do_pan_and_scan": True}, "do_pan_and_scan is not supported"),
        ("gemma3", "preprocessor_config", {"size": {"height": 448, "width": 896}}, "height and width: 896"),
        ("gemma3", "config", {"mm_tokens_per_image": 255}, "no square that divides 64 x 64 patches"),
        ("mistral3", "config", {"vision_feature_layer": -2}, "vision_feature_layer = -2 is not supported"),
        ("mistral3", "processor_config", {"spatial_merge_size": 1}, "is 1, but config.json says 2"),
        (
            "mistral3",
            "tekken",
            {"special_tokens": []},
            r"no file of the tokenizer has the tokens \[IMG_BREAK\]",
        ),
        (
            "gemma4",
            "processor_config",
            {"image_processor": {"image_processor_type": "SiglipImageProcessor"}},
            "'SiglipImageProcessor' is not supported",
        ),
    ],
)
def test_settings_that_are_refused(name: str, file: str, changes: Json, problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        write(tmp_path, name, **{file: changes})
    assert load_spec(str(tmp_path), language_model_only=True).vision is None
