"""Choose the frames of the video files in a request, from the headers alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol, TypeAlias

from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts
from weft.config.sections.media_section import MediaSection
from weft.media.media_errors import BadMedia, naming
from weft.media.pictures import FileToFetch, NeedsFiles, Pictures
from weft.media.urls import inline, is_web, web_address
from weft.media.video import can_decode_videos, missing_videos
from weft.media.video_header import VIDEO_TOO_LARGE, BadVideo, Header, VideoHeader, container_of, of_video
from weft.types.video_clip import VideoClip

KEY_BYTES = 16


class VideoSource(Protocol):
    """A message part with a video file (``VideoFile`` of ``weft.text``)."""

    @property
    def url(self) -> str: ...

    @property
    def where(self) -> str: ...

    @property
    def fps(self) -> float | None: ...

    @property
    def num_frames(self) -> int | None: ...


Choose: TypeAlias = Callable[[Sequence[VideoSource], int], list[VideoClip]]
"""Returns the chosen frames of each file. The second argument is the maximum number of frames of a file."""


class VideoChoice:
    """Chooses frames by the model's sampling and the server's limits. Thread-safe."""

    def __init__(self, facts: MediaFacts, section: MediaSection) -> None:
        """``facts``: the model's frame sampling. ``section``: limits and allowed domains of the server."""
        self._facts = facts
        self._section = section

    def clips(self, files: Sequence[VideoSource], known: Mapping[str, Header], most: int) -> list[VideoClip]:
        """Return the chosen frames of each file, in order.

        ``known``: headers of video files by name. ``most``: maximum frames of a file. Raises InvalidRequest
        with the part, and NeedsFiles for files without a known header.
        """
        names = [name_of(file.url) for file in files]
        missing = {name: file for name, file in zip(names, files, strict=True) if name not in known}
        if missing:
            raise NeedsFiles([self._wanted(name, file) for name, file in missing.items()])
        found = []
        for name, file in zip(names, files, strict=True):
            header = known[name]
            assert isinstance(header, VideoHeader)
            found.append(self._clip(name, header, file, most))
        return found

    def _wanted(self, name: str, file: VideoSource) -> FileToFetch:
        """Return the file to read. Raises InvalidRequest for a forbidden URL, and for invalid data."""
        try:
            if not can_decode_videos():
                raise missing_videos()
            if is_web(file.url):
                web_address(file.url, self._section.allowed_media_domains)
                return FileToFetch(url=name, where=file.where, address=file.url)
            data = memoryview(inline(file.url, self._section.max_video_bytes, video=True))
            container_of(data)
            return FileToFetch(url=name, where=file.where, data=data)
        except BadVideo as error:
            raise error.at(file.where) from None
        except BadMedia as error:
            raise of_video(error).at(file.where) from None

    def _clip(self, name: str, header: VideoHeader, file: VideoSource, most: int) -> VideoClip:
        """Return the chosen frames of one file. Raises InvalidRequest for a file beyond the server's limits,
        with too few frames, or for more frames than ``most``."""
        video, section = self._facts.frames, self._section
        assert video is not None
        least = self._facts.temporal
        pixels = header.width * header.height
        if pixels > section.max_image_pixels:
            raise BadVideo(
                f"has {header.width} x {header.height} pixels; the limit is {section.max_image_pixels} "
                "(--max-image-pixels); send a smaller video",
                VIDEO_TOO_LARGE,
            ).at(file.where)
        if header.seconds > section.max_video_seconds:
            raise BadVideo(
                f"takes {header.seconds:.1f} seconds; the limit is {section.max_video_seconds:g} "
                "(--max-video-seconds); send a shorter video",
                VIDEO_TOO_LARGE,
            ).at(file.where)
        if file.num_frames is not None and file.num_frames > most:
            raise InvalidRequest(
                f"{file.where}: num_frames is {file.num_frames}, and the prompt has room for {most} frames "
                "of this video (--limit-mm-per-prompt)",
                param=file.where,
                code="too_many_images",
            )
        with naming(file.where):
            numbers = video.chosen(header.frames, header.rate, most, fps=file.fps, count=file.num_frames)
        if len(numbers) < least:
            raise BadVideo(f"has fewer than {least} frames; send a single frame as an image").at(file.where)
        times = tuple(number / header.rate for number in numbers)
        fps = len(numbers) / header.frames * header.rate
        return VideoClip(key=name, numbers=tuple(numbers), fps=fps, times=times)


def choosing(pictures: Pictures | None, known: Mapping[str, Header]) -> Choose | None:
    """Return a function that chooses the frames of video files with known headers, see ``clips``. Return None
    for a model without images."""
    if pictures is None:
        return None
    choice = VideoChoice(pictures.facts, pictures.section)
    return lambda files, most: choice.clips(files, known, most)


def name_of(url: str) -> str:
    """Return the short name of a video file among the files of a request. No URL equals such a name."""
    return "video " + blake2b(url.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).hexdigest()
