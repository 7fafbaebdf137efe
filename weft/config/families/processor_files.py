"""Image processing settings of a checkpoint: ``preprocessor_config.json``, or its replacement.

Older files have the fields at the top level. Files of transformers 5 have the fields below
``image_processor``. Checkpoints with code have the fields below ``media_proc_cfg``. Missing fields have the
defaults of the reference classes. Video settings are below ``video_processor`` (transformers 5), or in
``video_preprocessor_config.json`` (older). Without either, the image file also sets the video processing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts, read_json
from weft.config.media import BICUBIC

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILE = "video_preprocessor_config.json"
#: Image processor classes of transformers, by the rule for image sizes.
_PROCESSORS = {
    "area": ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"),
    "patches": ("Kimi_K25ImageProcessor", "Kimi_K25ImageProcessorFast", "KimiK25VisionProcessor"),
    "longest": ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil"),
    "fixed": ("Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"),
    "budget": ("Gemma4ImageProcessor", "Gemma4ImageProcessorFast", "Gemma4ImageProcessorPil"),
    "ratio": ("GotOcr2ImageProcessor", "GotOcr2ImageProcessorFast", "GotOcr2ImageProcessorPil"),
    "canvas": ("Llama4ImageProcessor", "Llama4ImageProcessorFast"),
}
#: Field names in checkpoints with code, and the names in transformers.
_OTHER_NAMES = {
    "in_patch_limit": "max_patches",
    "merge_kernel_size": "merge_size",
    "sample_fps": "fps",
    "temporal_merge_kernel_size": "temporal_patch_size",
}


class Processor:
    """Settings file of an image processor or a video processor."""

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        field: str,
        known: Sequence[str],
        *,
        plain: bool = False,
        pads: bool = False,
    ) -> None:
        """Check the common fields. Raise ConfigError.

        ``field``: name of the field with the processor class, "" for none. ``known``: supported classes.
        ``plain``: True if colours need no normalization. ``pads``: True if the padding is that of a batch.
        """
        self.name = name
        self.facts = Facts(config, file=name)
        named = self.facts.get(field) if field else None
        if named is not None and named not in known:
            raise self.fail(field, f"{named!r} is not supported; there are: {', '.join(known)}")
        for name in ("do_resize", "do_rescale", "do_convert_rgb", *(() if plain else ("do_normalize",))):
            if not self.facts.flag(name, True):
                raise self.fail(name, "must be true")
        for name in ("do_center_crop", *(() if pads else ("do_pad",))):
            if self.facts.flag(name, False):
                raise self.fail(name, "is not supported")

    @classmethod
    def of_images(cls, folder: Path, kind: str, *, plain: bool = False) -> Processor:
        name, config = _content(folder)
        old = "image_processor_type" not in config and "feature_extractor_type" in config
        field = "feature_extractor_type" if old else "image_processor_type"
        return cls(name, config, field, _PROCESSORS[kind], plain=plain, pads=kind == "longest")

    def bounds(self, default: Mapping[str, int]) -> tuple[int | None, int | None]:
        """Return (minimum area, maximum area) from the edges in ``size``. Raise ConfigError."""
        size = self.facts.get("size")
        size = default if size is None else size
        if not isinstance(size, Mapping):
            raise self.fail("size", f"must be an object with shortest_edge and longest_edge, not {size!r}")
        bounds = Facts(size, file=self.name)
        return bounds.optional_integer("shortest_edge"), bounds.optional_integer("longest_edge")

    def check_bounds(self, least: int | None, most: int | None, token: int) -> tuple[int, int]:
        """Return (``least``, ``most``).

        Raise ConfigError for a missing bound, for ``least`` above ``most``, or bounds without room for
        ``token`` pixels.
        """
        if least is None or most is None or least > most:
            raise self.fail(
                "size",
                "must have a shortest_edge (area, at least) and a longest_edge (at most), not "
                f"{self.facts.get('size')!r}",
            )
        if most < token:
            raise self.fail("size", f"has a longest_edge of {most} pixels, less than one token's")
        return least, most

    def fail(self, name: str, problem: str) -> ConfigError:
        """Return the error for field ``name``; the caller raises the error."""
        return self.facts.fail(name, problem)

    def agree(self, name: str, tower: int, default: int) -> None:
        """Raise ConfigError if the field differs from ``tower``, the value in the tower's configuration."""
        found = self.facts.integer(name, default)
        if found != tower:
            raise self.fail(name, f"is {found}, but vision_config of config.json says {tower}")

    def colours(
        self, mean: tuple[float, ...], std: tuple[float, ...], filter_: int = BICUBIC
    ) -> dict[str, Any]:
        """Return the fields of ``MediaFacts`` for resampling and colours. Raise ConfigError."""
        resample = self.facts.integer("resample", filter_, low=0, high=5)
        return {
            "resample": resample,
            "rescale": self.facts.number("rescale_factor", 1 / 255),
            "mean": self._triple("image_mean", mean, above=-math.inf),
            "std": self._triple("image_std", std, above=0.0),
        }

    def _triple(self, name: str, default: tuple[float, ...], above: float) -> tuple[float, ...]:
        """Return a field with three numbers greater than ``above``. Raise ConfigError."""
        value = self.facts.get(name)
        value = default if value is None else value
        if not isinstance(value, list | tuple) or len(value) != 3:
            raise self.fail(name, f"must be a list of three numbers, not {value!r}")
        for entry in value:
            if isinstance(entry, bool) or not isinstance(entry, int | float) or not above < entry < math.inf:
                raise self.fail(name, f"must be a list of three numbers, not {value!r}")
        return tuple(float(entry) for entry in value)


def _content(folder: Path) -> tuple[str, Mapping[str, Any]]:
    """Return (file name, content) of the image settings, with fields of older code renamed.

    Raise ConfigError if there is none.
    """
    for name in FILES:
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
            # Old code names one limit per side; transformers has a maximum height and width.
            side = config.pop("patch_limit_on_one_side", None)
            if side is not None:
                config["size"] = {"max_height": side, "max_width": side}
        return name, config
    raise ConfigError(
        "the checkpoint has no preprocessor_config.json, so images cannot be processed; add it, or pass "
        "--language-model-only",
        param="--model",
    )


def video_content(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return (file name, content) of separate video settings, or None."""
    whole = read_json(folder, "processor_config.json") or {}
    if isinstance(own := whole.get("video_processor"), dict):
        return "processor_config.json", own
    config = read_json(folder, _VIDEO_FILE)
    return None if config is None else (_VIDEO_FILE, config)
