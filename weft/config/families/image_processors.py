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

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts, read_json
from weft.config.media import BICUBIC, MediaFacts, VideoFacts

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALVES = (0.5, 0.5, 0.5)
_FILES = ("preprocessor_config.json", "processor_config.json")
_VIDEO_FILE = "video_preprocessor_config.json"
_VIDEO_PROCESSORS = {
    "area": "Qwen3VLVideoProcessor",
    "budget": "Gemma4VideoProcessor",
    "tiles": "InternVLVideoProcessor",
}
"""Video processor classes of transformers, by the kind of ``MediaFacts``."""
NO_SETTINGS = "the checkpoint has no supported settings of a video processor"
SHARED_POSITIONS = (
    "frames of one video share rope positions in this family, which is not supported; send images"
)
JOINED_FRAMES = "the tower of this family joins four frames, which is not supported; send images"

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
BILINEAR = 2
DEFAULT_FRAMES = 32
"""Frames of a video file if the settings name neither a number nor a rate."""
MOST_FRAMES = 1 << 16
"""Maximum number of frames that settings may name."""

#: Field names in checkpoints with code, and the names in transformers.
_OTHER_NAMES = {"in_patch_limit": "max_patches", "merge_kernel_size": "merge_size"}
_NAMES = {"rescale": "rescale_factor", "mean": "image_mean", "std": "image_std"}
"""Field names of ``MediaFacts``, and the names in files."""


def area_facts(
    folder: Path, *, patch: int, temporal: int, merge: int, videos: bool = True, **tokens: Any
) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``area`` from the files of ``folder``. Raise ConfigError.

    ``patch``, ``temporal`` and ``merge`` are the tower's sizes; the files must agree. ``videos``: False for
    a model without videos here. ``tokens``: ``placeholder``, ``video``, ``start``, ``end``.
    """
    read = Processor.of_images(folder, "area")
    read.agree("patch_size", patch, 14)
    read.agree("temporal_patch_size", temporal, 2)
    read.agree("merge_size", merge, 2)
    bounds = read.bounds({"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    least = read.facts.optional_integer("min_pixels") or bounds[0]
    most = read.facts.optional_integer("max_pixels") or bounds[1]
    least, most = read.check_bounds(least, most, (patch * merge) ** 2)
    made = MediaFacts(
        kind="area",
        patch=patch,
        temporal=temporal,
        merge=merge,
        min_pixels=least,
        max_pixels=most,
        **read.colours(CLIP_MEAN, CLIP_STD),
        **tokens,
    )
    if not videos:
        return msgspec.structs.replace(made, no_videos=SHARED_POSITIONS)
    found = _frames(folder, made)
    return msgspec.structs.replace(made, frames=found, no_videos="" if found else NO_SETTINGS)


def _frames(folder: Path, images: MediaFacts) -> VideoFacts | None:
    """Return the fitting of video frames, or None if the files do not describe videos.

    Raise ConfigError for an unsupported video file.
    """
    found = _video_content(folder)
    if found is not None:
        return _video_facts(_video_processor(*found, images), images)
    config = read_json(folder, _FILES[0])
    if config is None:
        return None
    try:
        return _video_facts(Processor(_FILES[0], config, "", ()), images)
    # The file is valid for images, but not for videos: the model takes no videos.
    except ConfigError:
        return None


def _video_processor(name: str, config: Mapping[str, Any], images: MediaFacts) -> Processor:
    """Return the settings of the video processor for the kind of ``images``. Raise ConfigError."""
    return Processor(name, config, "video_processor_type", (_VIDEO_PROCESSORS[images.kind],))


def _check_colours(read: Processor, images: MediaFacts, given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless frames have the colours of images: the same tower encodes both."""
    for name, value in given.items():
        if value != getattr(images, name):
            raise read.fail(
                _NAMES.get(name, name), f"must be the same as for images: {getattr(images, name)}"
            )


def with_frames(folder: Path, images: MediaFacts, *, video: int, shown: int | None = None) -> MediaFacts:
    """Return ``images`` with the facts of videos whose frames are items alone: Gemma 4 and InternVL.

    ``video``: token for a part of a frame. ``shown``: the template's token for a video. A folder without
    settings of a video processor gives a model without videos. Raise ConfigError for unsupported settings.
    """
    found = _video_content(folder)
    if found is None:
        return msgspec.structs.replace(images, no_videos=NO_SETTINGS)
    read = _video_processor(*found, images)
    make = _budget_frames if images.kind == "budget" else _square_frames
    return msgspec.structs.replace(images, video=video, shown_video=shown, frames=make(read, images))


def _budget_frames(read: Processor, images: MediaFacts) -> VideoFacts:
    """Return the facts of frames within a number of tokens each. Raise ConfigError."""
    read.agree("patch_size", images.patch, 16)
    read.agree("pooling_kernel_size", images.merge, 3)
    _check_colours(read, images, read.colours((0.0,) * 3, (1.0,) * 3))
    if not read.facts.flag("do_sample_frames", True):
        raise read.fail("do_sample_frames", "must be true")
    return VideoFacts(
        rule="starts",
        count=read.facts.integer("num_frames", 32, high=MOST_FRAMES),
        # A list of frames without a rate has the rate of the reference.
        fps=24.0,
        budget=read.facts.integer("max_soft_tokens", 70),
        text="clock",
    )


def _square_frames(read: Processor, images: MediaFacts) -> VideoFacts:
    """Return the facts of frames of one square each. Raise ConfigError."""
    _check_colours(read, images, read.colours(CLIP_MEAN, CLIP_STD))
    size = read.facts.get("size")
    side = {"height": images.longest, "width": images.longest}
    if ({"height": 384, "width": 384} if size is None else size) != side:
        raise read.fail("size", f"must have the size of a tile as height and width: {images.longest}")
    if read.facts.get("initial_shift") not in (None, True):
        raise read.fail("initial_shift", "must be true")
    # The reference shows all frames unless its caller names a number; a server needs a bound.
    read.facts.flag("do_sample_frames", False)
    rate = read.facts.optional_number("fps")
    count = read.facts.optional_integer("num_frames")
    return VideoFacts(
        rule="middles",
        count=count or (0 if rate else DEFAULT_FRAMES),
        fps=rate or 2.0,
        text="numbers",
    )


def _video_facts(read: Processor, images: MediaFacts) -> VideoFacts:
    """Return the fitting of video frames. Raise ConfigError if frames would be cut or coloured unlike images.

    The same tower encodes images and frames, so both must agree.
    """
    read.agree("patch_size", images.patch, 16)
    read.agree("temporal_patch_size", images.temporal, 2)
    read.agree("merge_size", images.merge, 2)
    _check_colours(read, images, read.colours(HALVES, HALVES))
    bounds = read.bounds({"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32})
    least, most = read.check_bounds(*bounds, images.temporal * (images.patch * images.merge) ** 2)
    capped = read.facts.get("cap_pixels_per_frame") is True
    return VideoFacts(
        min_pixels=least,
        max_pixels=most,
        fps=read.facts.optional_number("fps") or 2.0,
        frame_tokens=read.facts.integer("max_video_tokens", 768) if capped else 0,
        min_frames=read.facts.integer("min_frames", 4),
        max_frames=read.facts.integer("max_frames", 768),
    )


def patches_facts(folder: Path, *, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``patches`` from the files of ``folder``; see ``area_facts``.

    Raise ConfigError.
    """
    read = Processor.of_images(folder, "patches")
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
        no_videos=JOINED_FRAMES,
        **read.colours(HALVES, HALVES),
        **tokens,
    )


def longest_facts(folder: Path, *, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``longest`` from the files of ``folder``; see ``area_facts``.

    Raise ConfigError.
    """
    read = Processor.of_images(folder, "longest")
    # The processor has the size of a patch and of a token. The image processor's patch is not used.
    whole = Facts(read_json(folder, "processor_config.json") or {}, file="processor_config.json")
    for name, wanted in (("patch_size", patch), ("spatial_merge_size", merge)):
        if whole.get(name) is not None and whole.integer(name) != wanted:
            raise whole.fail(name, f"is {whole.get(name)}, but config.json says {wanted}")
    size = read.facts.get("size")
    size = {"longest_edge": 1024} if size is None else size
    if not isinstance(size, Mapping):
        raise read.fail("size", f"must be an object with longest_edge, not {size!r}")
    return MediaFacts(
        kind="longest",
        patch=patch,
        temporal=1,
        merge=merge,
        longest=Facts(size, file=read.name).integer("longest_edge"),
        **read.colours(CLIP_MEAN, CLIP_STD),
        **tokens,
    )


def fixed_facts(folder: Path, *, side: int, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``fixed`` from the files of ``folder``; see ``area_facts``.

    ``side``: side of the tower's images in pixels. Raise ConfigError.
    """
    read = Processor.of_images(folder, "fixed")
    if read.facts.flag("do_pan_and_scan", False):
        raise read.fail(
            "do_pan_and_scan",
            "is not supported: set it to false, and the model reads each image as one square",
        )
    size = read.facts.get("size")
    size = {"height": 224, "width": 224} if size is None else size
    if size != {"height": side, "width": side}:
        raise read.fail("size", f"must have the image_size of vision_config as height and width: {side}")
    return MediaFacts(
        kind="fixed",
        patch=patch,
        temporal=1,
        merge=merge,
        longest=side,
        shown=tokens["start"],
        around="lines",
        **read.colours(HALVES, HALVES, BILINEAR),
        **tokens,
    )


def budget_facts(folder: Path, *, patch: int, merge: int, **tokens: Any) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``budget`` from the files of ``folder``; see ``area_facts``.

    Raise ConfigError.
    """
    read = Processor.of_images(folder, "budget", plain=True)
    read.agree("patch_size", patch, 16)
    read.agree("pooling_kernel_size", merge, 3)
    colours = read.colours((0.0,) * 3, (1.0,) * 3)
    if not read.facts.flag("do_normalize", False):
        colours |= {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    return MediaFacts(
        kind="budget",
        patch=patch,
        temporal=1,
        merge=merge,
        budget=read.facts.integer("max_soft_tokens", 280),
        around="tokens",
        **colours,
        **tokens,
    )


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


def _video_content(folder: Path) -> tuple[str, Mapping[str, Any]] | None:
    """Return (file name, content) of separate video settings, or None."""
    whole = read_json(folder, "processor_config.json") or {}
    if isinstance(own := whole.get("video_processor"), dict):
        return "processor_config.json", own
    config = read_json(folder, _VIDEO_FILE)
    return None if config is None else (_VIDEO_FILE, config)
