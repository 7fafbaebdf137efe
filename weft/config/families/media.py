"""How a checkpoint says that images are processed: ``preprocessor_config.json``, or what took its place.

Older files have the fields at their top, files of transformers 5 below ``image_processor``, and those of
checkpoints that bring code below ``media_proc_cfg``. What they leave out is as the reference classes have it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts, read_json
from weft.config.media import BICUBIC, MediaFacts

_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_HALVES = (0.5, 0.5, 0.5)
_FILES = ("preprocessor_config.json", "processor_config.json")

#: Image processors of the reference library, by the way they fit an image.
_PROCESSORS = {
    "area": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"),
    "patches": ("Kimi_K25ImageProcessor", "Kimi_K25ImageProcessorFast", "KimiK25VisionProcessor"),
}

#: Names in files that came with code of their own, and those of the reference library.
_OTHER_NAMES = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}


def area_facts(folder: Path, *, patch: int, temporal: int, merge: int, **tokens: Any) -> MediaFacts:
    """``MediaFacts`` of kind ``area`` from the files of ``folder``; the sizes are those of the tower.

    tokens: ``placeholder``, ``video``, ``start``, ``end``. Raises ConfigError.
    """
    read = _Processor(folder, "area")
    read.agree("patch_size", patch, 14)
    read.agree("temporal_patch_size", temporal, 2)
    read.agree("merge_size", merge, 2)
    size = read.facts.get("size")
    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280} if size is None else size
    if not isinstance(size, dict):
        raise read.fail("size", f"must be an object with shortest_edge and longest_edge, not {size!r}")
    bounds = Facts(size, file=read.name)
    least = read.facts.optional_integer("min_pixels") or bounds.optional_integer("shortest_edge")
    most = read.facts.optional_integer("max_pixels") or bounds.optional_integer("longest_edge")
    if least is None or most is None or least > most:
        raise read.fail(
            "size", f"must have a shortest_edge (area, at least) and a longest_edge (at most), not {size!r}"
        )
    if most < (patch * merge) ** 2:
        raise read.fail("size", f"has a longest_edge of {most} pixels, less than one token's")
    return MediaFacts(
        kind="area",
        patch=patch,
        temporal=temporal,
        merge=merge,
        min_pixels=least,
        max_pixels=most,
        **read.colours(_CLIP_MEAN, _CLIP_STD),
        **tokens,
    )


def patches_facts(folder: Path, *, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """``MediaFacts`` of kind ``patches``, likewise."""
    read = _Processor(folder, "patches")
    read.agree("patch_size", patch, 14)
    read.agree("merge_size", merge, 2)
    if read.facts.get("fixed_output_tokens") is not None:
        raise read.fail("fixed_output_tokens", "is not supported")
    size = read.facts.get("size")
    size = {"max_height": 512, "max_width": 512} if size is None else size
    if not isinstance(size, dict) or size.get("max_height") != size.get("max_width"):
        raise read.fail("size", f"must have a max_height and an equal max_width, not {size!r}")
    return MediaFacts(
        kind="patches",
        patch=patch,
        temporal=1,
        merge=merge,
        max_patches=read.facts.integer("max_patches", 16384),
        max_side=Facts(size, file=read.name).integer("max_height", 512),
        **read.colours(_HALVES, _HALVES),
        **tokens,
    )


class _Processor:
    """The file that says how images are processed."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.name, config = _content(folder)
        self.facts = Facts(config, file=self.name)
        named = self.facts.get("image_processor_type") or self.facts.get("feature_extractor_type")
        known = _PROCESSORS[kind]
        if named is not None and named not in known:
            raise self.fail(
                "image_processor_type", f"{named!r} is not supported; there are: {', '.join(known)}"
            )
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            if not self.facts.flag(name, True):
                raise self.fail(name, "must be true")
        for name in ("do_center_crop", "do_pad"):
            if self.facts.flag(name, False):
                raise self.fail(name, "is not supported")

    def fail(self, name: str, problem: str) -> ConfigError:
        """The error for field ``name``, to be raised."""
        return self.facts.fail(name, problem)

    def agree(self, name: str, tower: int, default: int) -> None:
        """Raises ConfigError where the file does not say ``tower``, which the tower's sizes do."""
        found = self.facts.integer(name, default)
        if found != tower:
            raise self.fail(name, f"is {found}, but vision_config of config.json says {tower}")

    def colours(self, mean: tuple[float, ...], std: tuple[float, ...]) -> dict[str, Any]:
        """The fields of ``MediaFacts`` that say how pixels are resampled and coloured."""
        resample = self.facts.integer("resample", BICUBIC, low=0, high=5)
        return {
            "resample": resample,
            "rescale": self.facts.number("rescale_factor", 1 / 255),
            "mean": self._triple("image_mean", mean, above=-math.inf),
            "std": self._triple("image_std", std, above=0.0),
        }

    def _triple(self, name: str, default: tuple[float, ...], above: float) -> tuple[float, ...]:
        value = self.facts.get(name)
        value = default if value is None else value
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self.fail(name, f"must be a list of three numbers, not {value!r}")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int | float) or not above < entry < math.inf:
                raise self.fail(name, f"must be a list of three numbers, not {value!r}")
        return tuple(float(entry) for entry in value)


def _content(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """The name and content of the file about images."""
    for name in _FILES:
        config = read_json(folder, name)
        if config is None:
            continue
        if name == "processor_config.json" or "image_processor" in config:
            config = config.get("image_processor")
            if not isinstance(config, dict):
                continue
        code = config.get("media_proc_cfg")
        if isinstance(code, dict):
            config = {_OTHER_NAMES.get(key, key): value for key, value in dict[str, Any](code).items()}
            side = config.pop("patch_limit_on_one_side", None)
            if side is not None:
                config["size"] = {"max_height": side, "max_width": side}
        return name, config
    raise ConfigError(
        "the checkpoint has no preprocessor_config.json, so images cannot be processed; add it, or pass "
        "--language-model-only",
        param="--model",
    )
