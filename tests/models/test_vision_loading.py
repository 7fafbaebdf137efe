"""Published checkpoints of vision models: quantized text, unquantized towers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import quantized as make
from tests.support.ranks import on_ranks
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.models.decoder import Model
from weft.models.loader import load_model
from weft.types.layout import Layout

Tensor = torch.Tensor
CPU = torch.device("cpu")
_TEXT = re.compile(r"(.*language_model\..*_proj)\.weight$")
_FP8 = {"quant_method": "fp8", "weight_block_size": [32, 16], "modules_to_not_convert": ["visual", "lm_head"]}
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {},
    "ignore": ["lm_head", "re:.*vision_tower.*", "re:.*mm_projector.*"],
}


def _fp8(_: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    return make.fp8(weight, "block", block=(32, 16))


def _packed(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    """Quantize routed experts only, in the form of Kimi K2.5."""
    return make.packed(tuple(weight.shape), 4, 0) if ".experts." in name else None


def _rewritten(folder: str, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy with another config.json."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    change(config)
    (target / "config.json").write_text(json.dumps(config))
    return target


def _tensors(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _save(folder: Path, tensors: dict[str, Tensor]) -> None:
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})


def _load(folder: Path, **more: Any) -> Model:
    spec = load_spec(str(folder))
    return load_model(str(folder), spec, torch.float64, CPU, progress=False, pack=False, **more)


@pytest.mark.parametrize(
    ("name", "quantize", "config", "inside"),
    [("qwen3-vl", _fp8, _FP8, False), ("kimi-k25", _packed, _PACKED, True)],
)
def test_quantized_text_beside_a_plain_tower(
    name: str, quantize: Any, config: dict[str, Any], inside: bool, seeing: Any, tmp_path: Path
) -> None:
    """The configuration of the quantization may be the text model's. Ranks read the same."""
    source = seeing(name).folder

    def quantized(facts: dict[str, Any]) -> None:
        (facts["text_config"] if inside else facts)["quantization_config"] = config

    packed = _rewritten(source, tmp_path / "packed", quantized)
    exact = _rewritten(source, tmp_path / "exact", lambda facts: None)
    saved, meant, count = {}, {}, 0
    for weight, tensor in _tensors(exact).items():
        found = _TEXT.match(weight)
        parts = quantize(weight, tensor) if found else None
        if parts is None or found is None:
            saved[weight] = meant[weight] = tensor
            continue
        count += 1
        meant[weight] = parts[1]
        saved |= {f"{found[1]}.{end}": part for end, part in parts[0].items()}
    assert count > 10
    _save(packed, saved)
    _save(exact, meant)
    want = dict(_load(exact).named_parameters())
    for model in (_load(packed), *on_ranks(Layout(tensor=2), lambda mesh: _load(packed, mesh=mesh))[:1]):
        for parameter, held in model.named_parameters():
            if held.shape == want[parameter].shape:
                assert torch.equal(held, want[parameter]), parameter
            else:
                assert not parameter.startswith("vision."), "ranks have it whole"


def test_fused_experts_with_inputs_first(seeing: Any, tmp_path: Path) -> None:
    """Published so; transformers 5 saves the same names with outputs first. One by one works, too."""
    source = seeing("qwen3-vl-moe").folder
    want = dict(_load(Path(source)).named_parameters())
    turned = _rewritten(source, tmp_path / "turned", lambda facts: None)
    single = _rewritten(source, tmp_path / "single", lambda facts: None)
    tensors, apart = {}, {}
    for name, tensor in _tensors(turned).items():
        tensors[name] = tensor.transpose(1, 2) if ".experts." in name else tensor
        if ".experts." not in name:
            apart[name] = tensor
            continue
        for expert, matrix in enumerate(tensor):
            halves = {"gate_proj": matrix[:20], "up_proj": matrix[20:]}
            for part, rows in (halves if "gate_up" in name else {"down_proj": matrix}).items():
                apart[f"{name.rsplit('.', 1)[0]}.{expert}.{part}.weight"] = rows
    assert len(tensors) < len(apart)
    _save(turned, tensors)
    _save(single, apart)
    for folder in (turned, single):
        held = dict(_load(folder).named_parameters())
        assert held.keys() == want.keys()
        assert all(torch.equal(held[name], want[name]) for name in want)


def test_a_tower_that_is_not_there(seeing: Any, tmp_path: Path) -> None:
    """The error names the missing tensors. Without a tower the checkpoint is complete."""
    folder = _rewritten(seeing("qwen3-5-vision").folder, tmp_path / "text", lambda facts: None)
    _save(folder, {n: t for n, t in _tensors(folder).items() if ".visual." not in n})
    with pytest.raises(ConfigError, match=r"missing: model\.visual\."):
        _load(folder)
    spec = load_spec(str(folder), language_model_only=True)
    assert load_model(str(folder), spec, torch.float32, CPU, progress=False).vision is None
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match="--language-model-only"):
        load_spec(str(folder))
    assert load_spec(str(folder), language_model_only=True) == spec


def test_names_of_a_checkpoint_with_code(seeing: Any, tmp_path: Path) -> None:
    """Kimi K2.5's configuration has other names for the sizes of its tower."""
    names = {
        "hidden_size": "vt_hidden_size",
        "num_hidden_layers": "vt_num_hidden_layers",
        "num_attention_heads": "vt_num_attention_heads",
        "intermediate_size": "vt_intermediate_size",
        "pos_emb_height": "init_pos_emb_height",
        "pos_emb_width": "init_pos_emb_width",
        "pos_emb_time": "init_pos_emb_time",
    }

    def published(facts: dict[str, Any]) -> None:
        vision = facts["vision_config"]
        facts["vision_config"] = {
            **{names.get(name, name): value for name, value in vision.items() if name != "rope_parameters"},
            "projector_ln_eps": facts.pop("projection_layer_norm_eps"),
            "mm_projector_type": "patchmerger",
            "merge_type": "sd2_tpool",
        }
        facts["media_placeholder_token_id"] = facts.pop("image_token_id")
        facts["architectures"] = ["KimiK25ForConditionalGeneration"]
        facts["text_config"]["architectures"] = ["DeepseekV3ForCausalLM"]

    source = seeing("kimi-k25").folder
    made, plain = load_spec(str(_rewritten(source, tmp_path / "own", published))), load_spec(source)
    assert made.vision == plain.vision
    assert made.architecture == "KimiK25ForConditionalGeneration"


def test_published_defaults(tmp_path: Path) -> None:
    """Absent fields take the defaults of the reference's classes."""
    text = {"vocab_size": 151936, "hidden_size": 3584, "num_hidden_layers": 2, "intermediate_size": 8}
    files = {
        "config.json": {
            "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {**text, "num_attention_heads": 32},
            "vision_config": {},
        },
        "preprocessor_config.json": {"patch_size": 16, "image_processor_type": "Qwen2VLImageProcessorFast"},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    spec = load_spec(str(tmp_path))
    vision = spec.vision
    assert vision is not None
    assert (vision.layers, vision.heads, vision.hidden, vision.side) == (27, 16, 1152, 48)
    assert vision.levels == (8, 16, 24)
    media = vision.media
    assert (media.placeholder, media.video, media.start, media.end) == (151655, 151656, 151652, 151653)
    assert (spec.rope.sections, spec.rope.interleaved, spec.rope.theta) == ((24, 20, 20), True, 500000.0)
