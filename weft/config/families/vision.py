"""Vision towers of checkpoints: ``vision_config``, plus image processing settings (``image_processors``)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.image_processors import VIDEO_TEXT, area_facts, patches_facts
from weft.config.families.image_towers import gemma3_tower, gemma4_tower, mistral3_tower
from weft.config.families.tiled_towers import internvl_tower, llama4_tower
from weft.config.families.towers import qwen2_tower
from weft.config.spec import ModelSpec, VisionSpec

#: Tower fields that change results, with the implemented values.
_ONLY: dict[str, tuple[Any, ...]] = {
    "in_channels": (None, 3),
    "pos_emb_type": (None, "divided_fixed"),
    "video_attn_type": (None, "spatial_temporal"),
    "merge_type": (None, "sd2_tpool"),
    "mm_projector_type": (None, "patchmerger"),
    "projector_hidden_act": (None, "gelu"),
}


def read_tower(facts: Facts, folder: Path, spec: ModelSpec) -> VisionSpec | None:
    """Return the tower of the text model ``spec``, or None for architectures without tower.

    Raise ConfigError for an unsupported tower, or missing image settings.
    """
    read = _TOWERS.get(spec.architecture)
    if read is None and facts.get("vision_config"):
        raise ConfigError(
            f"the images of {spec.architecture} are not supported: "
            "--language-model-only serves the text model alone",
            param="--language-model-only",
        )
    if read is None:
        return None
    vision = facts.get("vision_config")
    if vision is None and spec.architecture.startswith("Gemma4"):
        return None  # a checkpoint of the text model alone
    if not isinstance(vision, dict):
        raise facts.fail("vision_config", f"must be an object, not {vision!r}")
    inner = Facts(vision, file="config.json (vision_config)")
    for name, known in _ONLY.items():
        if inner.get(name) not in known:
            raise inner.fail(name, f"= {inner.get(name)!r} is not supported")
    return read(facts, inner, folder, spec)


def _qwen(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Qwen3-VL, or of Qwen3.5 (without deepstack levels). Raise ConfigError."""
    five = spec.architecture.startswith("Qwen3_5")
    levels = () if five else _levels(vision)
    patch = _side(vision, "patch_size", 16)
    table = vision.integer("num_position_embeddings", 2304)
    # The first special token, the default if config.json has no ids.
    first = 248053 if five else 151652
    output = vision.integer("out_hidden_size", 3584)
    # Embedding rows replace token embeddings, so both need the same width.
    if output != spec.hidden:
        raise vision.fail("out_hidden_size", f"is {output}, but the text model's hidden_size {spec.hidden}")
    return VisionSpec(
        kind="qwen3_vl",
        hidden=_divided(vision, "hidden_size", 1152, heads := vision.integer("num_heads", 16)),
        layers=_layers(vision, "depth", levels),
        heads=heads,
        intermediate=vision.integer("intermediate_size", 4304),
        activation=_activation(vision),
        output=output,
        # The learned positions form a square table.
        side=math.isqrt(table),
        levels=levels,
        theta=_theta(vision),
        media=area_facts(
            folder,
            patch=patch,
            temporal=_side(vision, "temporal_patch_size", 2),
            merge=vision.integer("spatial_merge_size", 2),
            placeholder=facts.integer("image_token_id", first + 3),
            video=facts.integer("video_token_id", first + 4),
            start=facts.integer("vision_start_token_id", first),
            end=facts.integer("vision_end_token_id", first + 1),
        ),
    )


def _kimi(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Kimi K2.5. Field names are those of transformers or of the published code.

    Raise ConfigError.
    """

    def size(name: str, other: str, default: int) -> int:
        return vision.integer(other if other in vision else name, default)

    heads = size("num_attention_heads", "vt_num_attention_heads", 16)
    hidden = "vt_hidden_size" if "vt_hidden_size" in vision else "hidden_size"
    side = size("pos_emb_height", "init_pos_emb_height", 64)
    if size("pos_emb_width", "init_pos_emb_width", 64) != side:
        raise vision.fail("pos_emb_width", "must equal pos_emb_height")
    eps = vision.optional_number("projector_ln_eps")
    placeholder = "media_placeholder_token_id" if "media_placeholder_token_id" in facts else "image_token_id"
    shown = facts.get("video_placeholder") or VIDEO_TEXT
    if not isinstance(shown, str):
        raise facts.fail("video_placeholder", f"must be a text, not {shown!r}")
    frames = size("pos_emb_time", "init_pos_emb_time", 4)
    return VisionSpec(
        kind="moonvit",
        hidden=_divided(vision, hidden, 1152, heads),
        layers=size("num_hidden_layers", "vt_num_hidden_layers", 27),
        heads=heads,
        intermediate=size("intermediate_size", "vt_intermediate_size", 4304),
        activation=_activation(vision),
        output=spec.hidden,
        side=side,
        frames=frames,
        theta=_theta(vision),
        norm_eps=facts.number("projection_layer_norm_eps", 1e-5) if eps is None else eps,
        media=patches_facts(
            folder,
            patch=_side(vision, "patch_size", 14),
            merge=_side(vision, "merge_kernel_size", 2),
            placeholder=facts.integer(placeholder, 163605),
            frames=frames,
            shown=shown,
            shown_video=facts.optional_integer("video_token_id"),
            start=facts.integer("vision_start_token_id", 163602),
            end=facts.integer("vision_end_token_id", 163604),
        ),
    )


def _levels(vision: Facts) -> tuple[int, ...]:
    """Return the layers with deepstack outputs. Raise ConfigError."""
    name = "deepstack_visual_indexes"
    levels = vision.integers(name) if name in vision else (8, 16, 24)
    if list(levels) != sorted(set(levels)):
        raise vision.fail(name, f"must be layers in ascending order, not {levels!r}")
    return levels


def _layers(vision: Facts, name: str, levels: tuple[int, ...]) -> int:
    """Return the number of layers. Raise ConfigError if a layer of ``levels`` is not among them."""
    layers = vision.integer(name, 27, high=MOST_PARTS)
    if levels and not 0 <= levels[0] <= levels[-1] < layers:
        raise vision.fail("deepstack_visual_indexes", f"{levels!r} are not all among {layers} layers")
    return layers


def _divided(vision: Facts, name: str, default: int, heads: int) -> int:
    """Return the hidden size.

    Raise ConfigError unless the dims per head divide into quarters for the rotation.
    """
    hidden = vision.integer(name, default)
    if hidden % (4 * heads):
        raise vision.fail(name, f"{hidden} is not a multiple of 4 times the {heads} heads")
    return hidden


def _side(vision: Facts, name: str, default: int) -> int:
    """Return a size that files may state for each side. Raise ConfigError if the sides differ."""
    value = vision.get(name)
    if not isinstance(value, list):
        return vision.integer(name, default)
    if not value or value != [value[0]] * len(value):
        raise vision.fail(name, f"must have equal sides, not {value!r}")
    return Facts({name: value[0]}, file=vision.file).integer(name)


def _activation(vision: Facts) -> str:
    """Return the activation. The default of towers differs from that of text models. Raise ConfigError."""
    return vision.activation() if vision.get("hidden_act") else "gelu_pytorch_tanh"


def _theta(vision: Facts) -> float:
    """Return the base of the rotary embedding. Raise ConfigError for an unsupported type."""
    parameters = vision.get("rope_parameters")
    if parameters is None:
        return 10000.0
    if not isinstance(parameters, dict) or parameters.get("rope_type", "axial") != "axial":
        raise vision.fail("rope_parameters", f"{parameters!r} are not supported; there is: axial")
    return Facts(parameters, file=vision.file).number("rope_theta", 10000.0, above=1.0)


_TOWERS: dict[str, Callable[[Facts, Facts, Path, ModelSpec], VisionSpec]] = {
    "Qwen3VLForConditionalGeneration": _qwen,
    "Qwen3VLMoeForConditionalGeneration": _qwen,
    "Qwen3_5ForConditionalGeneration": _qwen,
    "Qwen3_5MoeForConditionalGeneration": _qwen,
    "Qwen2VLForConditionalGeneration": qwen2_tower,
    "Qwen2_5_VLForConditionalGeneration": qwen2_tower,
    "Gemma3ForConditionalGeneration": gemma3_tower,
    "Gemma4ForConditionalGeneration": gemma4_tower,
    "Mistral3ForConditionalGeneration": mistral3_tower,
    "InternVLForConditionalGeneration": internvl_tower,
    "Llama4ForConditionalGeneration": llama4_tower,
    "Kimi_K25ForConditionalGeneration": _kimi,
    "KimiK25ForConditionalGeneration": _kimi,
}
