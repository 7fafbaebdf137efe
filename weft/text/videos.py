"""Video files in messages, and the text of frame groups in a prompt.

VideoFile      the part as received: a URL and the wanted frames
with_clips     replaces each VideoFile by a VideoPart with chosen frames, once the file's header is known
with_groups    writes the time and the placeholder of each frame group into the rendered conversation
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import msgspec

from weft.common.errors import InvalidRequest
from weft.text.images import VideoPart, group_times
from weft.types.video_clip import VideoClip

if TYPE_CHECKING:
    from weft.text.chat_messages import ChatMessage, Part, Shows

MOST_FRAMES = 1 << 16
"""Maximum value of ``num_frames``; the server's limits are lower."""


class VideoFile(VideoPart, frozen=True, kw_only=True):
    """A video file of a message, before the choice of frames. ``frames`` is empty."""

    url: str
    """URL of the file."""
    num_frames: int | None = None
    """Number of frames to choose, instead of a rate."""

    def groups(self, size: int) -> int:
        """Return 1: at least one group of frames."""
        return 1


Choose: TypeAlias = Callable[[Sequence[VideoFile], int], Sequence[VideoClip]]
"""Returns the chosen frames of each file. The second argument is the maximum number of frames of a file.
Raises InvalidRequest."""


def video_file(part: Mapping[str, Any], url: str, where: str, least: int, fps: float | None) -> VideoFile:
    """Return a checked part with the video file at ``url``. ``fps`` is checked already. Raises InvalidRequest
    for other options, and for fewer than ``least`` frames."""
    if part.get("timestamps") is not None:
        raise InvalidRequest(
            f"{where}.timestamps is for lists of frames; a video file has its own times", param=where
        )
    count = part.get("num_frames")
    if count is None:
        return VideoFile((), where, fps, part_type=str(part.get("type")), url=url)
    if fps is not None:
        raise InvalidRequest(f"{where} may have fps or num_frames, but not both", param=where)
    if type(count) is not int or not least <= count <= MOST_FRAMES:
        raise InvalidRequest(
            f"{where}.num_frames must be an integer from {least} to {MOST_FRAMES}", param=where
        )
    return VideoFile((), where, part_type=str(part.get("type")), url=url, num_frames=count)


def with_clips(messages: list[ChatMessage], shows: Shows | None, choose: Choose | None) -> list[ChatMessage]:
    """Return ``messages`` with the chosen frames of each video file.

    Files share the room that images and lists of frames leave below the limit of images. Raises
    InvalidRequest, also without ``choose``.
    """
    shown = [part for message in messages for part in message.shown]
    files = [part for part in shown if isinstance(part, VideoFile)]
    if not files:
        return messages
    if choose is None or shows is None:
        raise InvalidRequest(f"{files[0].where}: video files are not supported here", param=files[0].where)
    others = sum(
        part.groups(shows.group) if isinstance(part, VideoPart) else 1
        for part in shown
        if not isinstance(part, VideoFile)
    )
    # ``check_messages`` counted each file as one group, so there is room for one group each.
    most = (shows.most - others) // len(files) * shows.group
    clips = iter(choose(files, most))

    def chosen(part: Part) -> Part:
        if not isinstance(part, VideoFile):
            return part
        clip = next(clips)
        return VideoPart(clip.numbers, part.where, clip.fps, clip.times, part.part_type, clip.key)

    return [
        msgspec.structs.replace(message, content=tuple(map(chosen, message.content or ())))
        if message.shown
        else message
        for message in messages
    ]


class VideoRules(Protocol):
    """The part of ``ImageRules`` for the text of videos."""

    @property
    def shows(self) -> Shows: ...

    @property
    def fps(self) -> float: ...

    @property
    def text(self) -> str: ...


def with_groups(rendered: str, videos: Sequence[VideoPart], rules: VideoRules, tokens: Sequence[str]) -> str:
    """Replace the placeholder of each video in ``rendered`` by the placeholders of the frame groups.

    Each group becomes a text and a placeholder between the start and end tokens, or a placeholder alone where
    groups have no text. The template's text around the token of the video stays, as in the reference
    implementation. ``tokens``: texts of the template's token, the placeholder, the start and the end. Return
    "" if ``rendered`` does not show each video once.
    """
    shown, placeholder, start, end = tokens
    # User text cannot contain the token: its special tokens have marks inside.
    pieces = rendered.split(shown) if shown and placeholder and start and end else []
    if len(pieces) != 1 + len(videos):
        return ""
    form = _TEXTS[rules.text]
    start, end = (start + form.inside, end) if rules.text else ("", "")
    made = [pieces[0]]
    for part, after in zip(videos, pieces[1:], strict=True):
        times = group_times(part, rules.shows.group, rules.fps, starts=form.starts)
        groups = (
            f"{form.front(number, time)}{start}{placeholder}{end}"
            for number, time in enumerate(times, start=1)
        )
        made += [form.between.join(groups), after]
    return "".join(made)


class GroupText(NamedTuple):
    """The text around the frame groups of a video."""

    front: Callable[[int, float], str]
    """Returns the text in front of a group by its number and time."""
    between: str = ""
    inside: str = ""
    """Text between the start token and the placeholder."""
    starts: bool = False
    """True if the time of a group is that of its first frame."""


def _milliseconds(number: int, time: float) -> str:
    """Return 00:00:01.500. Hours start again after a day, as in the reference."""
    seconds = int(time)
    hours, minutes = seconds // 3600 % 24, seconds // 60 % 60
    return f"{hours:02d}:{minutes:02d}:{seconds % 60:02d}.{int(time % 1 * 1000):03d}"


_TEXTS: dict[str, GroupText] = {
    "": GroupText(lambda number, time: ""),
    "seconds": GroupText(lambda number, time: f"<{time:.1f} seconds>"),
    "clock": GroupText(lambda number, time: f"{int(time // 60):02d}:{int(time % 60):02d} ", " "),
    "numbers": GroupText(lambda number, time: f"Frame{number}: ", "\n"),
    "milliseconds": GroupText(_milliseconds, inside="video<|media_content|>", starts=True),
}
"""``VideoFacts.text`` -> the text around groups."""
