"""Towers with the modules of transformers: published forms of checkpoints, settings and refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2VLImageProcessor

from tests.support.vision_models import make_prompt, random_image
from weft.common.errors import ConfigError
from weft.config.families import load_spec, towers
from weft.config.families.facts import Facts
from weft.config.families.vision import read_tower
from weft.config.sizing.memory import tower_bytes, weight_bytes
from weft.config.spec import ModelSpec
from weft.models.loader import load_model
from weft.models.tower import load_tower
from weft.models.vision.base import colour_table, patches
from weft.models.vision.published import skeleton

CPU = torch.device("cpu")
NAME = "qwen2-5-vl"
#: config.json of a model with 7 billion parameters, in the form of the publisher.
SEVEN: dict[str, Any] = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
    "image_token_id": 151655,
    "video_token_id": 151656,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "hidden_act": "silu",
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "in_chans": 3,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "tokens_per_second": 2,
        "temporal_patch_size": 2,
    },
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
}
PROCESSOR: dict[str, Any] = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
}


def _published(folder: Path, changes: dict[str, Any] | None = None) -> ModelSpec:
    """Write the publisher's files, with ``changes`` in vision_config, and return the spec."""
    config = {**SEVEN, "vision_config": {**SEVEN["vision_config"], **(changes or {})}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return load_spec(str(folder))


def test_sizes_of_published_files(tmp_path: Path) -> None:
    spec = _published(tmp_path)
    assert spec.rope.sections == (16, 24, 24)
    assert not spec.rope.interleaved
    assert (spec.rope.theta, spec.norm_eps, spec.qkv_bias) == (1e6, 1e-6, True)
    assert spec.vision is not None
    media = spec.vision.media
    assert (media.min_pixels, media.max_pixels) == (3136, 12845056)
    assert (media.placeholder, media.start, media.end, media.video) == (151655, 151652, 151653, 151656)
    assert media.frames is not None
    assert (media.frames.min_pixels, media.frames.max_pixels, media.frames.pace) == (3136, 12845056, 2)
    parameters = sum(one.numel() for one in skeleton(spec.vision).parameters())
    assert tower_bytes(spec.vision, "bfloat16") == pytest.approx(2 * parameters, rel=0.005)
    assert weight_bytes(spec, "bfloat16") == pytest.approx(2 * 8.292e9, rel=0.005)


def test_sizes_of_older_published_files(tmp_path: Path) -> None:
    """Qwen2-VL with 7 billion parameters: ``hidden_size`` of the tower is the size of the text model."""
    names = ("depth", "num_heads", "in_chans", "patch_size", "spatial_merge_size", "temporal_patch_size")
    vision = {name: SEVEN["vision_config"][name] for name in names}
    vision |= {"embed_dim": 1280, "mlp_ratio": 4, "hidden_size": 3584, "spatial_patch_size": 14}
    older = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl"}
    (tmp_path / "config.json").write_text(json.dumps({**SEVEN, **older, "vision_config": vision}))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    spec = load_spec(str(tmp_path))
    assert spec.vision is not None
    assert (spec.vision.hidden, spec.vision.intermediate, spec.vision.output) == (1280, 5120, 3584)
    assert spec.vision.media.frames is not None
    assert spec.vision.media.frames.pace == 0, "positions count groups of frames"
    parameters = sum(one.numel() for one in skeleton(spec.vision).parameters())
    assert tower_bytes(spec.vision, "bfloat16") == pytest.approx(2 * parameters, rel=0.005)
    assert weight_bytes(spec, "bfloat16") == pytest.approx(2 * 8.291e9, rel=0.005)


def test_a_tower_without_support_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "llama4_text", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["Llama4ForConditionalGeneration"], "vision_config": {"depth": 1}}
    text |= {"vocab_size": 99, "head_dim": 12, "intermediate_size": 32, "num_key_value_heads": 2}
    text |= {"intermediate_size_mlp": 32, "num_local_experts": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "text_config": text}))
    spec = load_spec(str(tmp_path), language_model_only=True)
    assert spec.vision is None
    other = msgspec.structs.replace(spec, architecture="OtherForConditionalGeneration")
    with pytest.raises(ConfigError, match=r"images of Other.* are not supported: --language-model-only"):
        read_tower(Facts(config), tmp_path, other)


def test_image_settings_are_those_of_the_reference(tmp_path: Path) -> None:
    """The publisher's bounds of the area, over sizes on both sides of the bounds."""
    from PIL import Image

    spec = _published(tmp_path)
    assert spec.vision is not None
    media = spec.vision.media
    processor = Qwen2VLImageProcessor.from_pretrained(tmp_path)
    for height, width in [(1, 1), (27, 29), (41, 300), (13, 2500), (1080, 1920), (9000, 7000), (5000, 40)]:
        fit = media.grid_of(height, width)
        assert processor.get_number_of_image_patches(height, width) == fit.tokens * 4
    for seed, (height, width) in enumerate([(37, 61), (9, 200)]):
        source = Image.fromarray(random_image(height, width, seed)[0].numpy())
        fit = media.grid_of(height, width)
        resized = np.asarray(source.resize((fit.size[1], fit.size[0]), Image.Resampling(media.resample)))
        made = patches(torch.from_numpy(resized.copy())[None], media, colour_table(media, torch.float32, CPU))
        expected = processor(source, return_tensors="pt")
        assert torch.equal(made, expected["pixel_values"])
        assert tuple(expected["image_grid_thw"][0]) == fit.grid


def _flat(source: Path, target: Path) -> None:
    """Write a copy with the text fields at the top, and with the names of the modules in transformers."""
    shutil.copytree(source, target)
    config = json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text.pop("layer_types", None)
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    config["vision_config"]["model_type"] = config["model_type"]  # as some files say
    (target / "config.json").write_text(json.dumps({**text, **config}))
    tensors = {
        re.sub(
            r"^model\.|^(?=visual)", lambda found: f"model.{'language_model.' * bool(found[0])}", name
        ): one
        for name, one in load_file(source / "model.safetensors").items()
    }
    assert {"model.visual.merger.ln_q.weight", "model.language_model.norm.weight"} < set(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["qwen2-vl", NAME])
def test_published_names_and_fields(name: str, seeing: Any, paged: Any, tmp_path: Path) -> None:
    folder = Path(seeing(name).folder)
    _flat(folder, tmp_path / "flat")
    spec, flat = load_spec(str(folder)), load_spec(str(tmp_path / "flat"))
    assert (flat.rope, flat.caches, flat.norm_eps) == (spec.rope, spec.caches, spec.norm_eps)
    prompt = make_prompt((3, (2, 3), 4), spec, 1)
    made = []
    for where, one in ((folder, spec), (tmp_path / "flat", flat)):
        harness = paged(load_model(str(where), one, torch.float64, CPU, progress=False))
        sequence = harness.reading(prompt)
        harness.step([(sequence, len(prompt.ids))])
        made.append(torch.stack(sequence.logits))
    assert torch.equal(made[0], made[1])
    image = random_image(24, 40, seed=4)
    with torch.inference_mode():
        alone = [
            load_tower(str(where), one, torch.float32, CPU, progress=False).vision.embed(image).main
            for where, one in ((folder, spec), (tmp_path / "flat", flat))
        ]
    assert torch.equal(alone[0], alone[1])


def test_a_missing_tensor_is_named(seeing: Any, tmp_path: Path) -> None:
    shutil.copytree(seeing(NAME).folder, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    tensors = load_file(path)
    del tensors["visual.merger.mlp.2.bias"]
    tensors["visual.extra.weight"] = torch.zeros(1)
    save_file(tensors, path, metadata={"format": "pt"})
    spec = load_spec(str(tmp_path / "cut"))
    with pytest.raises(ConfigError, match=r"missing: visual\.merger\.mlp\.2\.bias; unexpected: .*extra"):
        load_model(str(tmp_path / "cut"), spec, torch.float32, CPU, progress=False)
    text = load_spec(str(tmp_path / "cut"), language_model_only=True)
    assert load_model(str(tmp_path / "cut"), text, torch.float32, CPU, progress=False).vision is None


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"out_hidden_size": 8}, "out_hidden_size is 8, but the text model's hidden_size 3584"),
        ({"in_chans": 4}, "in_chans = 4 is not supported"),
        ({"num_heads": 3}, "hidden_size 1280 is not a multiple of 4 times the 3 heads"),
        ({"window_size": 27}, "window_size must be at least the side of a token, 28 pixels"),
        ({"patch_size": 16}, "patch_size is 14, but vision_config"),
        ({"hidden_act": "tanh"}, "hidden_act"),
    ],
)
def test_towers_that_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=problem):
        _published(tmp_path, changes)
    assert load_spec(str(tmp_path), language_model_only=True).vision is None


@pytest.mark.parametrize(
    ("rope", "problem"),
    [
        ({"type": "mrope", "mrope_section": [16, 24]}, "mrope_section must be three numbers with the sum 64"),
        ({"type": "mrope", "mrope_section": [16, 24, 23]}, "with the sum 64"),
        ({"type": "dynamic", "factor": 2.0}, "dynamic is not supported"),
        ({"type": "mrope", "mrope_interleaved": True}, "mrope_interleaved must be false"),
    ],
)
def test_sections_that_are_refused(rope: dict[str, Any], problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SEVEN, "rope_scaling": rope}))
    with pytest.raises(ConfigError, match=problem):
        load_spec(str(tmp_path), language_model_only=True)


@pytest.mark.parametrize(
    ("version", "found"), [(None, "none is installed"), ("4.57.1", "4.57.1 is installed")]
)
def test_without_transformers(
    version: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(towers, "transformers_version", lambda: version)
    with pytest.raises(ConfigError, match=rf"{found}.*weft\[models\].*--language-model-only"):
        _published(tmp_path)
    assert load_spec(str(tmp_path), language_model_only=True).vision is None
