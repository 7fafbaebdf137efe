"""Vision towers that run with the modules of transformers: their settings and image facts."""

from __future__ import annotations

from pathlib import Path

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import MOST_PARTS, Facts
from weft.config.families.generic.probing import BEYOND, INSTALL, OLDEST, transformers_version
from weft.config.families.image_processors import area_facts
from weft.config.spec import ModelSpec, VisionSpec

MOST_PACE = 1000
"""Maximum rope positions per second of a video."""


def qwen2_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Qwen2-VL or Qwen2.5-VL. Raise ConfigError."""
    require_transformers(spec)
    five = spec.architecture.startswith("Qwen2_5")
    # In Qwen2-VL hidden_size is the size of the text model.
    width, size, default = (
        ("out_hidden_size", "hidden_size", 3584) if five else ("hidden_size", "embed_dim", 1280)
    )
    output = vision.integer(width, 3584)
    if output != spec.hidden:
        raise vision.fail(width, f"is {output}, but the text model's hidden_size {spec.hidden}")
    if vision.get("in_chans") not in (None, 3):
        raise vision.fail("in_chans", f"= {vision.get('in_chans')!r} is not supported")
    hidden = vision.integer(size, default)
    heads = vision.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise vision.fail(size, f"{hidden} is not a multiple of 4 times the {heads} heads")
    patch = vision.integer("patch_size", 14)
    merge = vision.integer("spatial_merge_size", 2)
    if five and vision.integer("window_size", 112) < patch * merge:
        raise vision.fail("window_size", f"must be at least the side of a token, {patch * merge} pixels")
    activation = vision.get("hidden_act") or ("silu" if five else "quick_gelu")
    media = area_facts(
        folder,
        patch=patch,
        temporal=vision.integer("temporal_patch_size", 2),
        merge=merge,
        # Qwen2-VL counts groups of frames, Qwen2.5-VL counts time.
        pace=vision.integer("tokens_per_second", 4, high=MOST_PACE) if five else 0,
        placeholder=facts.integer("image_token_id", 151655),
        video=facts.integer("video_token_id", 151656),
        start=facts.integer("vision_start_token_id", 151652),
        end=facts.integer("vision_end_token_id", 151653),
    )
    return VisionSpec(
        kind="qwen2_5_vl" if five else "qwen2_vl",
        hidden=hidden,
        layers=vision.integer("depth", 32, high=MOST_PARTS),
        heads=heads,
        intermediate=vision.integer("intermediate_size", 3420)
        if five
        else hidden * vision.integer("mlp_ratio", 4),
        activation="quick_gelu" if activation == "quick_gelu" else vision.activation(),
        gated=five,
        output=output,
        side=0,
        settings=_settings(vision, facts),
        media=media,
    )


def _settings(vision: Facts, facts: Facts) -> str:
    """Return the JSON text of ``vision_config``, without the type: older files name another type."""
    config = facts.get("vision_config")
    kept = {name: value for name, value in config.items() if name != "model_type"}
    return msgspec.json.encode(kept, order="deterministic").decode()


def require_transformers(spec: ModelSpec) -> None:
    """Raise ConfigError unless a supported version of transformers is installed."""
    version = transformers_version()
    wanted = f"transformers {_dotted(OLDEST)} or newer, before {_dotted(BEYOND)}"
    if version is None or not OLDEST <= _numbers(version) < BEYOND:
        found = "none is installed" if version is None else f"{version} is installed"
        raise ConfigError(
            f"the images of {spec.architecture} need {wanted} ({found}): {INSTALL}, or pass "
            "--language-model-only to serve the text model alone",
            param="--model",
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
