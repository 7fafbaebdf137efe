"""Facts of images and videos from the settings of a checkpoint's processors (``processor_files``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.config.families.facts import Facts, read_json
from weft.config.families.processor_files import CLIP_MEAN, CLIP_STD, FILES, HALVES, Processor, video_content
from weft.config.media import MediaFacts
from weft.config.parts.video_frames import VideoFacts

_TIMED, _JOINED, _AVERAGED = "Qwen3VLVideoProcessor", "Qwen2VLVideoProcessor", "Kimi_K25VideoProcessor"
_VIDEO_PROCESSORS = {
    "budget": "Gemma4VideoProcessor",
    "tiles": "InternVLVideoProcessor",
}
"""Video processor classes of transformers, by the kind of ``MediaFacts``."""
NO_SETTINGS = "the checkpoint has no supported settings of a video processor"
VIDEO_TEXT = "<|kimi_k25_video_placeholder|>"
"""Text that the template of Kimi K2.5 writes for a video. The tokenizer may have no such token."""
_TIME_FORM = "hh:mm:ss.fff"
FRAME_PATCHES = 4096
"""Default maximum number of patches of a frame, Kimi K2.5."""
BILINEAR = 2
DEFAULT_FRAMES = 32
"""Frames of a video file if the settings name neither a number nor a rate."""
MOST_FRAMES = 1 << 16
"""Maximum number of frames that settings may name."""

_NAMES = {"rescale": "rescale_factor", "mean": "image_mean", "std": "image_std"}
"""Field names of ``MediaFacts``, and the names in files."""


def area_facts(
    folder: Path, *, patch: int, temporal: int, merge: int, pace: int | None = None, **tokens: Any
) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``area`` from the files of ``folder``. Raise ConfigError.

    ``patch``, ``temporal`` and ``merge`` are the tower's sizes; the files must agree. ``pace``: see
    ``VideoFacts.pace``, for a model with joined groups of frames; None: text separates the groups.
    ``tokens``: ``placeholder``, ``video``, ``start``, ``end``.
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
    found = _frames(folder, made, pace)
    return msgspec.structs.replace(made, frames=found, no_videos="" if found else NO_SETTINGS)


def _frames(folder: Path, images: MediaFacts, pace: int | None) -> VideoFacts | None:
    """Return the fitting of video frames, or None if the files do not describe videos.

    Raise ConfigError for an unsupported video file.
    """

    def made(read: Processor) -> VideoFacts:
        return _timed_frames(read, images) if pace is None else _joined_frames(read, images, pace)

    found = video_content(folder)
    if found is not None:
        return made(_video_processor(*found, _TIMED if pace is None else _JOINED))
    config = read_json(folder, FILES[0])
    if config is None:
        return None
    try:
        return made(Processor(FILES[0], config, "", ()))
    # The file is valid for images, but not for videos: the model takes no videos.
    except ConfigError:
        return None


def _video_processor(name: str, config: Mapping[str, Any], known: str) -> Processor:
    """Return the settings of the video processor of class ``known``. Raise ConfigError."""
    return Processor(name, config, "video_processor_type", (known,))


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
    found = video_content(folder)
    if found is None:
        return msgspec.structs.replace(images, no_videos=NO_SETTINGS)
    read = _video_processor(*found, _VIDEO_PROCESSORS[images.kind])
    make = _budget_frames if images.kind == "budget" else _square_frames
    return msgspec.structs.replace(images, video=video, shown_video=shown, frames=make(read, images))


def _budget_frames(read: Processor, images: MediaFacts) -> VideoFacts:
    """Return the facts of frames within a number of tokens each. Raise ConfigError."""
    read.agree("patch_size", images.patch, 16)
    read.agree("pooling_kernel_size", images.merge, 3)
    _check_colours(read, images, read.colours((0.0,) * 3, (1.0,) * 3))
    if not read.facts.flag("do_sample_frames", True):
        raise read.fail("do_sample_frames", "must be true")
    if read.facts.get("fps") is not None:
        raise read.fail("fps", "is not supported: set num_frames instead")
    return VideoFacts(
        rule="starts",
        count=read.facts.integer("num_frames", 32, high=MOST_FRAMES),
        # A list of frames without a rate has the rate of the reference.
        fps=24.0,
        budget=read.facts.integer("max_soft_tokens", 70),
        min_frames=1,
        max_frames=MOST_FRAMES,
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
        min_frames=1,
        max_frames=MOST_FRAMES,
        text="numbers",
    )


def _timed_frames(read: Processor, images: MediaFacts) -> VideoFacts:
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


def _joined_frames(read: Processor, images: MediaFacts, pace: int) -> VideoFacts:
    """Return the facts of frames in joined groups, with bounds of the area for each frame. Raise
    ConfigError."""
    read.agree("patch_size", images.patch, 14)
    read.agree("temporal_patch_size", images.temporal, 2)
    read.agree("merge_size", images.merge, 2)
    _check_colours(read, images, read.colours(CLIP_MEAN, CLIP_STD))
    token = (images.patch * images.merge) ** 2
    bounds = read.bounds({"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28})
    least = read.facts.optional_integer("min_pixels") or bounds[0]
    most = read.facts.optional_integer("max_pixels") or bounds[1]
    least, most = read.check_bounds(least, most, token)
    if read.facts.get("num_frames") is not None:
        raise read.fail("num_frames", "is not supported: set fps instead")
    capped = read.facts.get("cap_pixels_per_frame") is True
    return VideoFacts(
        min_pixels=least,
        max_pixels=most,
        total_pixels=int(read.facts.integer("max_video_tokens", 128000) * token * 0.9) if capped else 0,
        # The reference shows all frames unless its caller names a rate; a server needs a bound.
        fps=read.facts.optional_number("fps") or 2.0,
        min_frames=read.facts.integer("min_frames", 4),
        max_frames=read.facts.integer("max_frames", 768),
        multiple=images.temporal,
        rule="starts",
        text="",
        pace=pace,
    )


def patches_facts(
    folder: Path, *, patch: int, merge: int, frames: int = 4, shown: str = VIDEO_TEXT, **tokens: Any
) -> MediaFacts:
    """Return ``MediaFacts`` of kind ``patches`` from the files of ``folder``; see ``area_facts``.

    ``frames``: maximum frames that the tower averages. ``shown``: the template's text for a video. Raise
    ConfigError.
    """
    read = Processor.of_images(folder, "patches")
    read.agree("patch_size", patch, 14)
    read.agree("merge_size", merge, 2)
    if read.facts.get("fixed_output_tokens") is not None:
        raise read.fail("fixed_output_tokens", "is not supported")
    images = MediaFacts(
        kind="patches",
        patch=patch,
        temporal=1,
        merge=merge,
        max_patches=read.facts.integer("max_patches", 16384),
        max_side=_most_side(read),
        **read.colours(HALVES, HALVES),
        **tokens,
    )
    found = video_content(folder)
    try:
        if found is None:
            most = _frame_patches(read.facts, images.max_patches)
        else:
            read = _video_processor(*found, _AVERAGED)
            most = read.facts.integer("max_patches", FRAME_PATCHES)
        video = _averaged_frames(read, images, frames)
    except ConfigError as error:
        if found is not None:
            raise
        # The file is valid for images, but not for videos: the model takes no videos.
        return msgspec.structs.replace(images, no_videos=str(error))
    # Frames have the placeholder of images.
    video = msgspec.structs.replace(video, max_patches=most, shown=shown)
    return msgspec.structs.replace(images, video=images.placeholder, frames=video)


def _frame_patches(facts: Facts, images: int) -> int:
    """Return the maximum patches of a frame from the file of images, whose limit is ``images``."""
    name = "in_patch_limit_each_frame"
    if name not in facts:
        return min(FRAME_PATCHES, images)
    return facts.optional_integer(name) or images


def _averaged_frames(read: Processor, images: MediaFacts, frames: int) -> VideoFacts:
    """Return the facts of frames in groups of up to ``frames`` frames that the tower averages.

    Raise ConfigError for settings unlike those of images.
    """
    read.agree("patch_size", images.patch, 14)
    read.agree("merge_size", images.merge, 2)
    _check_colours(read, images, read.colours(HALVES, HALVES))
    if _most_side(read) != images.max_side:
        raise read.fail("size", f"must be the same as for images: {images.max_side}")
    if read.facts.get("timestamp_mode") not in (None, _TIME_FORM):
        raise read.fail("timestamp_mode", f"must be {_TIME_FORM}")
    if read.facts.get("in_patch_limit_video") is not None:
        raise read.fail("in_patch_limit_video", "is not supported")
    return VideoFacts(
        averaged=read.facts.integer("temporal_patch_size", min(4, frames), high=frames),
        fps=read.facts.optional_number("fps") or 2.0,
        min_frames=1,
        max_frames=MOST_FRAMES,
        rule="rounded",
        text="milliseconds",
    )


def _most_side(read: Processor) -> int:
    """Return the maximum patches of a side, kind ``patches``. Raise ConfigError."""
    size = read.facts.get("size")
    size = {"max_height": 512, "max_width": 512} if size is None else size
    if not isinstance(size, dict) or size.get("max_height") != size.get("max_width"):
        raise read.fail("size", f"must have a max_height and an equal max_width, not {size!r}")
    return Facts(size, file=read.name).integer("max_height", 512)


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
