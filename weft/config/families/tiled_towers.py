"""Vision towers of InternVL and Llama 4, with the modules of transformers. Each tile is an item."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import MOST_PARTS, Facts, read_json
from weft.config.families.image_processors import BILINEAR, with_frames
from weft.config.families.image_towers import (
    activation_of,
    first_of,
    hidden_and_heads,
    require_only,
    settings_of,
    special_ids,
)
from weft.config.families.processor_files import CLIP_MEAN, CLIP_STD, HALVES, Processor
from weft.config.families.towers import require_transformers
from weft.config.media import MediaFacts
from weft.config.parts.tiles import TileFacts
from weft.config.spec import ModelSpec, VisionSpec

_INTERN_AROUND = ("<img>", "</img>")
_INTERN_VIDEO = "<video>"
_LLAMA_BETWEEN = ("<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>")
MOST_TILES = 64
"""Maximum number of tiles that a checkpoint may ask for."""


def internvl_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of InternVL3 and InternVL3.5: InternViT, and squares of patches joined by a matrix.

    Raise ConfigError.
    """
    require_transformers(spec)
    require_only(vision, "num_channels", 3)
    require_only(facts, "vision_feature_layer", -1)
    require_only(facts, "vision_feature_select_strategy", "default")
    side, patch = _square(vision, "image_size", 448), _square(vision, "patch_size", 14)
    merge = _merge(facts, "downsample_ratio", side, patch)
    tokens = (side // patch // merge) ** 2
    if facts.integer("image_seq_length", 256) != tokens:
        raise facts.fail("image_seq_length", f"must be {tokens}: the patches of a tile, by {merge} x {merge}")
    hidden, heads = hidden_and_heads(vision, 1024, 16)
    layers = vision.integer("num_hidden_layers", 24, high=MOST_PARTS)
    inner = vision.integer("intermediate_size", 4096)
    joined = hidden * merge**2
    start, end = special_ids(folder, _INTERN_AROUND)
    return VisionSpec(
        kind="internvl",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=inner,
        activation=activation_of(vision, "hidden_act", "gelu"),
        output=spec.hidden,
        side=0,
        settings=settings_of(facts, spec),
        parameters=layers * (4 * hidden**2 + 2 * hidden * inner)
        + hidden * (3 * patch**2 + (side // patch) ** 2)
        + (joined + spec.hidden) * spec.hidden,
        media=_ratio_facts(
            folder,
            side=side,
            patch=patch,
            merge=merge,
            placeholder=facts.integer("image_token_id", 151667),
            start=start,
            end=end,
        ),
    )


def llama4_tower(facts: Facts, vision: Facts, folder: Path, spec: ModelSpec) -> VisionSpec:
    """Return the tower of Llama 4: an encoder with axial rotation, and an adapter. Raise ConfigError."""
    require_transformers(spec)
    require_only(vision, "num_channels", 3)
    require_only(vision, "vision_feature_select_strategy", "default")
    side, patch = _square(vision, "image_size", 448), _square(vision, "patch_size", 14)
    merge = _merge(vision, "pixel_shuffle_ratio", side, patch)
    hidden, heads = hidden_and_heads(vision, 768, 16)
    if hidden % (4 * heads):
        raise vision.fail("hidden_size", f"{hidden} is not a multiple of 4 times the {heads} heads")
    layers = vision.integer("num_hidden_layers", 34, high=MOST_PARTS)
    inner = vision.integer("intermediate_size", 5632)
    joined, out = vision.integer("projector_input_dim", 4096), vision.integer("projector_output_dim", 4096)
    # The modules of transformers name the sizes in three places.
    for name, wanted in (("intermediate_size", hidden * merge**2), ("vision_output_dim", out)):
        if vision.integer(name, wanted) != wanted:
            raise vision.fail(name, f"must be {wanted}, the input of the next matrix")
    if joined != out:
        raise vision.fail("projector_input_dim", f"must be the projector_output_dim, {out}")
    processor = Facts(read_json(folder, "processor_config.json") or {}, file="processor_config.json")
    if processor.integer("patch_size", patch) != patch:
        raise processor.fail("patch_size", f"must be {patch}, as in vision_config of config.json")
    beside, below, whole = special_ids(folder, _LLAMA_BETWEEN)
    return VisionSpec(
        kind="llama4",
        hidden=hidden,
        layers=layers,
        heads=heads,
        intermediate=inner,
        activation="gelu",
        output=spec.hidden,
        side=0,
        settings=settings_of(facts, spec),
        parameters=layers * (4 * hidden**2 + 2 * hidden * inner)
        + hidden * (3 * patch**2 + (side // patch) ** 2)
        + inner * joined
        + out * (out + spec.hidden),
        media=_canvas_facts(
            folder,
            side=side,
            patch=patch,
            merge=merge,
            between=(beside, below, whole),
            shown=whole,
            placeholder=facts.integer(first_of(facts, "image_token_index", "image_token_id"), 200092),
            start=facts.integer(first_of(facts, "boi_token_index", "boi_token_id"), 200080),
            end=facts.integer(first_of(facts, "eoi_token_index", "eoi_token_id"), 200081),
        ),
    )


def _square(vision: Facts, name: str, default: int) -> int:
    """Return a size that files may state for each side. Raise ConfigError if the sides differ."""
    value = vision.get(name)
    if not isinstance(value, list):
        return vision.integer(name, default)
    if len(value) != 2 or value[0] != value[1]:
        raise vision.fail(name, f"must have two equal sides, not {value!r}")
    return Facts({name: value[0]}, file=vision.file).integer(name)


def _merge(facts: Facts, name: str, side: int, patch: int) -> int:
    """Return the side of a token in patches. Raise ConfigError unless tokens divide a tile."""
    ratio = facts.number(name, 0.5)
    merge = round(1 / ratio) if 0 < ratio <= 1 else 0
    if merge < 1 or merge * ratio != 1 or side % (patch * merge):
        raise facts.fail(name, f"{ratio} does not divide {side} x {side} pixels into whole tokens")
    return merge


def _ratio_facts(folder: Path, *, side: int, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``tiles`` with the rule ``ratio``; see ``area_facts``.

    ``side``: side of a tile in pixels. Raise ConfigError.
    """
    read = Processor.of_images(folder, "ratio")
    # The processor of the model cuts images, whatever ``crop_to_patches`` of the image processor says.
    read.facts.get("crop_to_patches")
    most = read.facts.integer("max_patches", 12, high=MOST_TILES)
    tiles = TileFacts(rule="ratio", least=read.facts.integer("min_patches", 1, high=most), most=most)
    colours = read.colours(CLIP_MEAN, CLIP_STD)
    media = _tiled(read, tiles, colours, side=side, default=384, patch=patch, merge=merge, **tokens)
    try:
        (shown,) = special_ids(folder, (_INTERN_VIDEO,))
    except ConfigError:
        return msgspec.structs.replace(media, no_videos=f"the tokenizer has no token {_INTERN_VIDEO}")
    # A frame is a tile: both have the same placeholder.
    return with_frames(folder, media, video=media.placeholder, shown=shown)


def _canvas_facts(
    folder: Path, *, side: int, patch: int, merge: int, between: tuple[int, int, int], **tokens: Any
) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``tiles`` with the rule ``canvas``; see ``area_facts``.

    ``side``: side of a tile in pixels. ``between``: tokens beside a tile, below a row of tiles, and in front
    of the whole image. Raise ConfigError.
    """
    read = Processor.of_images(folder, "canvas")
    beside, below, whole = between
    tiles = TileFacts(
        rule="canvas",
        most=read.facts.integer("max_patches", 16, high=MOST_TILES),
        grow=read.facts.flag("resize_to_max_canvas", False),
        beside=beside,
        below=below,
        whole=whole,
    )
    colours = {**read.colours(HALVES, HALVES, BILINEAR), "bfloat16": True}
    return _tiled(read, tiles, colours, side=side, default=336, patch=patch, merge=merge, **tokens)


def _tiled(
    read: Processor, tiles: TileFacts, colours: dict[str, Any], *, side: int, default: int, **sizes: Any
) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``tiles``. Raise ConfigError unless the file has the tower's side."""
    size = read.facts.get("size")
    size = {"height": default, "width": default} if size is None else size
    if size != {"height": side, "width": side}:
        raise read.fail("size", f"must have the image_size of vision_config as height and width: {side}")
    return MediaFacts(
        kind="tiles", temporal=1, longest=side, tiles=tiles, around="tokens", **colours, **sizes
    )
