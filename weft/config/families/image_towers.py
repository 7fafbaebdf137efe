"""Vision towers of Gemma 3, Gemma 4 and Mistral Small 3.x, with the modules of transformers.

All read a whole image: SigLIP (arXiv 2502.14786), Gemma 4's tower, and Pixtral (arXiv 2410.07073).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import MOST_PARTS, Facts, read_json
from weft.config.families.image_processors import budget_facts, fixed_facts, longest_facts, with_frames
from weft.config.families.towers import require_transformers
from weft.config.spec import ModelSpec, VisionSpec

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"
_OUTER = (
    "mm_tokens_per_image",
    "spatial_merge_size",
    "projector_hidden_act",
    "multimodal_projector_bias",
    "downsample_ratio",
)
"""Fields beside ``vision_config`` that the modules read."""


def gemma3_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Gemma 3: SigLIP, and a mean over squares of patches. Raise ConfigError."""
    require_transformers(spec)
    require_only(vision, "num_channels", 3)
    side, patch = vision.integer("image_size", 224), vision.integer("patch_size", 16)
    tokens = facts.integer("mm_tokens_per_image", 256)
    patches, rows = side // patch, math.isqrt(tokens)
    if rows**2 != tokens or side % patch or patches % rows:
        raise facts.fail(
            "mm_tokens_per_image", f"{tokens} is no square that divides {patches} x {patches} patches"
        )
    hidden, heads = hidden_and_heads(vision, 768, 12)
    layers = vision.integer("num_hidden_layers", 12, high=MOST_PARTS)
    inner = vision.integer("intermediate_size", 3072)
    each = 4 * hidden**2 + 2 * hidden * inner
    return VisionSpec(
        kind="gemma3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=inner,
        activation=activation_of(vision, "hidden_act", "gelu_pytorch_tanh"),
        output=spec.hidden,
        side=0,
        settings=settings_of(facts, spec, vision_use_head=False),
        parameters=layers * each + hidden * (3 * patch**2 + patches**2 + spec.hidden),
        ahead="all",
        media=fixed_facts(
            folder,
            side=side,
            patch=patch,
            merge=patches // rows,
            placeholder=facts.integer(first_of(facts, "image_token_index", "image_token_id"), 262144),
            start=facts.integer(first_of(facts, "boi_token_index", "boi_token_id"), 255999),
            end=facts.integer(first_of(facts, "eoi_token_index", "eoi_token_id"), 256000),
        ),
    )


def gemma4_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Gemma 4. Audio is not served. Raise ConfigError."""
    require_transformers(spec)
    hidden, heads = hidden_and_heads(vision, 768, 12)
    patch, merge = vision.integer("patch_size", 16), vision.integer("pooling_kernel_size", 3)
    layers = vision.integer("num_hidden_layers", 16, high=MOST_PARTS)
    inner = vision.integer("intermediate_size", 3072)
    table = vision.integer("position_embedding_size", 10240)
    size = vision.integer("head_dim", 64)
    attention = 2 * hidden * size * (heads + vision.integer("num_key_value_heads", heads))
    text = Facts(facts.get("text_config"), file="config.json (text_config)")
    ahead = text.get("use_bidirectional_attention") == "vision"
    media = budget_facts(
        folder,
        patch=patch,
        merge=merge,
        placeholder=facts.integer("image_token_id", 258880),
        start=facts.integer("boi_token_id", 255999),
        end=facts.integer("eoi_token_id", 258882),
    )
    media = with_frames(folder, media, video=facts.integer("video_token_id", 258884))
    if (tokens := media.most_budget) * merge > table:
        raise vision.fail("position_embedding_size", f"{table} has no position for {tokens} tokens")
    return VisionSpec(
        kind="gemma4",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=inner,
        activation=activation_of(vision, "hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        output=spec.hidden,
        side=0,
        settings=settings_of(facts, spec),
        parameters=layers * (attention + 3 * hidden * inner)
        + hidden * (3 * patch**2 + 2 * table + spec.hidden),
        ahead="windows" if ahead else "none",
        media=media,
    )


def mistral3_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Mistral Small 3.x and Ministral 3: Pixtral. Raise ConfigError."""
    require_transformers(spec)
    require_only(vision, "num_channels", 3)
    require_only(facts, "vision_feature_layer", -1)
    hidden, heads = hidden_and_heads(vision, 1024, 16)
    if vision.integer("head_dim", hidden // heads) != hidden // heads:
        raise vision.fail("head_dim", f"must be {hidden // heads}: hidden_size by num_attention_heads")
    if hidden // heads % 4:
        raise vision.fail("hidden_size", f"{hidden} is not a multiple of 4 times the {heads} heads")
    patch, merge = vision.integer("patch_size", 16), facts.integer("spatial_merge_size", 2)
    layers = vision.integer("num_hidden_layers", 24, high=MOST_PARTS)
    inner = vision.integer("intermediate_size", 4096)
    breaks, end = special_ids(folder, _names(folder))
    projector = merge**2 * hidden**2 + (hidden + spec.hidden) * spec.hidden
    return VisionSpec(
        kind="mistral3",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=inner,
        activation=activation_of(vision, "hidden_act", "gelu"),
        gated=True,
        output=spec.hidden,
        side=0,
        settings=settings_of(facts, spec),
        parameters=layers * (4 * hidden**2 + 3 * hidden * inner) + 3 * patch**2 * hidden + projector,
        media=longest_facts(
            folder,
            patch=patch,
            merge=merge,
            placeholder=facts.integer(first_of(facts, "image_token_index", "image_token_id"), 10),
            row_end=breaks,
            end=end,
        ),
    )


def first_of(facts: Facts, *names: str) -> str:
    """Return the first of ``names`` with a value; the first name without any."""
    return next((name for name in names if facts.get(name) is not None), names[0])


def require_only(facts: Facts, name: str, value: int | str) -> None:
    """Raise ConfigError unless the field is missing or has ``value``."""
    if facts.get(name) not in (None, value):
        raise facts.fail(name, f"= {facts.get(name)!r} is not supported")


def hidden_and_heads(vision: Facts, hidden: int, heads: int) -> tuple[int, int]:
    """Return (hidden size, heads), with defaults. Raise ConfigError."""
    return vision.integer("hidden_size", hidden), vision.integer("num_attention_heads", heads)


def activation_of(vision: Facts, name: str, default: str) -> str:
    """Return the activation in field ``name``. Raise ConfigError for an unknown activation."""
    return Facts({"hidden_act": vision.get(name) or default}, file=vision.file).activation()


def settings_of(facts: Facts, spec: ModelSpec, **vision: Any) -> str:
    """Return the JSON text for the configuration class of transformers.

    The text model is only described as far as the modules of the tower read its fields.
    """
    made = {name: facts.get(name) for name in _OUTER if facts.get(name) is not None}
    made["vision_config"] = {**facts.get("vision_config"), **vision}
    made["text_config"] = {"hidden_size": spec.hidden, "rms_norm_eps": spec.norm_eps}
    return msgspec.json.encode(made, order="deterministic").decode()


def _names(folder: Path) -> tuple[str, str]:
    """Return the texts of the tokens behind a row and behind an image. Raise ConfigError."""
    processor = read_json(folder, "processor_config.json") or {}
    names = (processor.get("image_break_token", _BREAK), processor.get("image_end_token", _END))
    return str(names[0]), str(names[1])


def special_ids(folder: Path, names: Sequence[str]) -> list[int]:
    """Return the ids of special tokens, from the files of the tokenizer. Raise ConfigError."""
    for read in (_of_settings, _of_tekken, _of_tokenizer):
        known = read(folder)
        if set(names) <= known.keys():
            return [known[name] for name in names]
    raise ConfigError(
        f"no file of the tokenizer has the tokens {' and '.join(names)}, which stand in images; add "
        "tokenizer_config.json, tekken.json or tokenizer.json, or pass --language-model-only",
        param="--model",
    )


def _of_settings(folder: Path) -> dict[str, int]:
    """Return text -> id of the added tokens of ``tokenizer_config.json``."""
    added = (read_json(folder, "tokenizer_config.json") or {}).get("added_tokens_decoder")
    tokens = added.items() if isinstance(added, dict) else ()
    return {str(token.get("content")): int(number) for number, token in tokens if number.isdecimal()}


def _of_tekken(folder: Path) -> dict[str, int]:
    """Return text -> id of the special tokens of ``tekken.json``."""
    special = (read_json(folder, "tekken.json") or {}).get("special_tokens")
    return {str(token["token_str"]): int(token["rank"]) for token in special or ()}


def _of_tokenizer(folder: Path) -> dict[str, int]:
    """Return text -> id of the added tokens of ``tokenizer.json``."""
    added = (read_json(folder, "tokenizer.json") or {}).get("added_tokens")
    return {str(token["content"]): int(token["id"]) for token in added or ()}
