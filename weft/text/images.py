"""Images and videos in messages.

A video is a list of frames with the time of each frame. A model reads a video in groups of frames. Each group
is read like an image, behind the time of the group. ``videos.py`` has video files such as MP4.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from weft.common.errors import InvalidRequest

Detail: TypeAlias = Literal["auto", "low", "high"]
DETAILS: tuple[Detail, ...] = ("auto", "low", "high")


CACHE_HINTS = ("cache_control", "prompt_cache_breakpoint")
"""Fields of any part without effect: every prompt is cached as far as possible."""


class ImagePart(msgspec.Struct, frozen=True):
    """An image of a message."""

    source: Any
    """A URL, or a Pillow image from a caller in this process."""
    where: str
    """The part of the request, for errors."""
    detail: Detail = "auto"
    """"low": the model receives a small version of the image."""
    part_type: str = "image_url"
    """The API's name for such parts."""

    is_video = False
    file = ""
    fps = None
    times = None

    @property
    def frames(self) -> tuple[Any, ...]:
        """The image as the only frame."""
        return (self.source,)

    def place(self, number: int) -> str:
        """Return the place of a frame in the request, for errors."""
        return self.where


def detail_of(value: Any, where: str) -> Detail:
    """Return a valid ``detail`` of an image; None means "auto". Raises InvalidRequest."""
    if value is None:
        return "auto"
    if value == "original":  # a word of the Responses API: the whole image, as with "high"
        return "high"
    for known in DETAILS:
        if value == known:
            return known
    raise InvalidRequest(f"{where}: detail must be one of {', '.join(DETAILS)}, original", param=where)


def image_part(part: Mapping[str, Any], part_type: str, where: str) -> ImagePart:
    """Return a checked image part, from OpenAI's ``image_url``, or from ``image`` with a Pillow object from
    this process.

    The URL itself is not fetched here. Raises InvalidRequest for unknown fields and other forms.
    """
    unknown = {name for name, value in part.items() if value is not None} - {"type", part_type, *CACHE_HINTS}
    if unknown:
        shown = min((name for name in unknown if isinstance(name, str)), default="")
        shown = shown if re.fullmatch(r"\w{1,40}", shown) else "a field"
        raise InvalidRequest(f"{where}.{shown} is not supported in a part with an image", param=where)
    given = part.get(part_type)
    if part_type == "image":
        if given is None or isinstance(given, str | bytes | Mapping | list | int | float):
            raise InvalidRequest(
                f'{where} must be a part of the form {{"type": "image_url", "image_url": {{"url": ...}}}}',
                param=where,
            )
        return ImagePart(given, where, part_type=part_type)
    # Some clients send the URL alone instead of an object.
    fields = _given(given) if isinstance(given, Mapping) else {"url": given}
    url = fields.get("url")
    if not isinstance(url, str) or fields.keys() - {"url", "detail"}:
        raise InvalidRequest(
            f'{where} must be a part of the form {{"type": "image_url", "image_url": {{"url": ...}}}}, '
            "optionally with detail",
            param=where,
        )
    return ImagePart(url, where, detail_of(fields.get("detail"), where), part_type)


def _given(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields that are not null."""
    return {name: value for name, value in fields.items() if value is not None}


_OF_RESPONSES = {"input_text": "text", "output_text": "text", "input_image": "image_url"}
"""Type of a part in the Responses API -> type in chat. Some clients mix both APIs."""


def as_chat(part: Any) -> Any:
    """Return a part of the Responses API as a part of chat; any other part unchanged."""
    part_type = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part_type, str) or part_type not in _OF_RESPONSES:
        return part
    made = {**part, "type": _OF_RESPONSES[part_type]}
    if part_type == "input_image" and isinstance(url := part.get("image_url"), str):
        made["image_url"] = {"url": url, "detail": made.pop("detail", None)}
    return made


VIDEO_PARTS = ("video", "video_url")
LEAST_FPS, MOST_FPS = 1e-3, 1e3
MOST_SECONDS = 1e6
_JPEGS = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)
_JPEG = "data:image/jpeg;base64,"
_FORM = '{"type": "video", "video": [<URL of a frame>, ...]}'


class VideoPart(msgspec.Struct, frozen=True):
    """A video of a message."""

    frames: tuple[Any, ...]
    """URLs of images, or Pillow images from a caller in this process. Frame numbers for a ``file``."""
    where: str
    """The part of the request, for errors."""
    fps: float | None = None
    """Frames per second; the mean rate of chosen frames of a ``file``. None: the model's default, or the rate
    given by ``times``.
    """
    times: tuple[float, ...] | None = None
    """Time of each frame in seconds, in order."""
    part_type: str = "video"
    """The API's name for such parts."""
    file: str = ""
    """Name of the video file whose frames were chosen; "" for a list of frames."""

    detail = "auto"
    is_video = True

    def groups(self, size: int) -> int:
        """Return the number of groups of ``size`` frames. The last group may be shorter."""
        return -(-len(self.frames) // size)

    def place(self, number: int) -> str:
        """Return the place of a frame in the request, for errors."""
        return self.where if self.file else f"{self.where}.{self.part_type}[{number}]"


def group_times(video: VideoPart, size: int, fps: float, *, starts: bool = False) -> list[float]:
    """Return the time of each group of ``size`` frames in seconds: the middle of the first and the last
    frame, or the first frame with ``starts``.

    ``fps`` is the rate of a video without a rate of its own. A short last group ends with the last frame.
    """
    rate = video.fps or fps
    times = [number / rate for number in range(len(video.frames))] if video.times is None else video.times
    if starts:
        return list(times[::size])
    return [
        (times[first] + times[min(first + size, len(times)) - 1]) / 2 for first in range(0, len(times), size)
    ]


def video_part(part: Mapping[str, Any], where: str, least: int) -> VideoPart | str:
    """Return a checked video part, or the URL of a video file if the part has one. Raises InvalidRequest,
    also for fewer than ``least`` frames."""
    part_type = str(part.get("type"))
    given = part.get(part_type)
    if part_type == "video_url":
        if isinstance(given, Mapping) and _given(given).keys() == {"url"}:
            given = given["url"]
        if not isinstance(given, str):
            raise InvalidRequest(
                f'{where} must be a part of the form {{"type": "video_url", "video_url": {{"url": '
                '"data:video/mp4;base64,..."}}',
                param=where,
            )
    # Match only the start, because a data URL can be megabytes long.
    is_file = isinstance(given, str) and _JPEGS.match(given[:64]) is None
    unknown = {name for name, value in part.items() if value is not None}
    if unknown := unknown - {"type", part_type, "fps", "num_frames" if is_file else "", "timestamps"}:
        # Echo the field's name only if short and plain: the name comes from the client.
        shown = min((name for name in unknown if isinstance(name, str)), default="")
        shown = shown if re.fullmatch(r"\w{1,40}", shown) else "a field"
        only = "; num_frames is for video files" if shown == "num_frames" else ""
        raise InvalidRequest(f"{where}.{shown} is not supported in a part with a video{only}", param=where)
    if is_file:
        return str(given)
    frames = _frames(given, where)
    if len(frames) < least:
        raise InvalidRequest(
            f"{where}: a video must have at least {least} frames; send a single frame as an image",
            param=where,
        )
    times = _times(part, len(frames), where)
    fps = fps_of(part, where)
    return VideoPart(frames, where, fps, times, part_type)


def _frames(given: Any, where: str) -> tuple[Any, ...]:
    """Return the frames of a list, or of a data URL with JPEGs. Raises InvalidRequest."""
    if isinstance(given, str):
        found = _JPEGS.match(given[:64])
        assert found is not None
        return tuple(_JPEG + piece for piece in given[found.end() :].split(","))
    if not isinstance(given, list | tuple) or not given:
        raise InvalidRequest(f"{where} must be a part of the form {_FORM}", param=where)
    for number, frame in enumerate(given):
        if frame is None or isinstance(frame, bytes | Mapping | list | tuple | int | float):
            raise InvalidRequest(f"{where}.video[{number}] must be the URL of an image", param=where)
    return tuple(given)


def fps_of(part: Mapping[str, Any], where: str) -> float | None:
    """Return the frames per second of a part, or None. Raises InvalidRequest for a rate out of range."""
    fps = part.get("fps")
    if fps is not None and not (_number(fps) and LEAST_FPS <= fps <= MOST_FPS):
        raise InvalidRequest(
            f"{where}.fps must be between {LEAST_FPS:g} and {MOST_FPS:g} frames per second", param=where
        )
    return None if fps is None else float(fps)


def _times(part: Mapping[str, Any], count: int, where: str) -> tuple[float, ...] | None:
    """Return the seconds of each frame, or None. Raises InvalidRequest for invalid times, and for times
    beside a rate."""
    fps, times = part.get("fps"), part.get("timestamps")
    if times is None:
        return None
    if fps is not None:
        raise InvalidRequest(f"{where} may have fps or timestamps, but not both", param=where)
    # Check the length before the values, so that a long list costs nothing.
    fits = isinstance(times, list | tuple) and len(times) == count
    if not fits or not all(_number(time) and 0 <= time <= MOST_SECONDS for time in times):
        raise InvalidRequest(
            f"{where}.timestamps must be a list of seconds, one for each of the {count} frames", param=where
        )
    if any(after < before for before, after in itertools.pairwise(times)):
        raise InvalidRequest(f"{where}.timestamps must be in ascending order", param=where)
    return tuple(map(float, times))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
