"""The images and video frames of a prompt before decoding: checks, sizes and token counts from headers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts, View
from weft.config.sections.media_section import MediaSection
from weft.media.decode import KEY_BYTES
from weft.media.headers import ImageHeader, read_header
from weft.media.media_errors import INVALID, TOO_LARGE, BadMedia, naming
from weft.media.media_messages import Target
from weft.media.urls import inline, is_web, web_address
from weft.media.video_header import Header, VideoHeader

LOW_PIXELS = 512 * 512
"""Maximum pixels of an image with ``detail: low`` after resizing."""
MOST_BETWEEN = 64 << 20
"""Maximum pixels between the two passes of a resize: rows of the image times columns of the result.

A pixel needs 4 bytes. Only images of extreme shape exceed the limit, for example 1 x 200,000 pixels. A larger
``max_image_pixels`` raises the limit.
"""


class ImageSource(Protocol):
    """A message part with images (``ImagePart`` or ``VideoPart`` of ``weft.text``)."""

    @property
    def frames(self) -> tuple[Any, ...]:
        """Sources, normally URLs; exactly one for an image."""

    @property
    def where(self) -> str: ...

    @property
    def detail(self) -> str: ...

    @property
    def file(self) -> str:
        """Name of the video file whose frame numbers are the ``frames``; "" for a part with sources."""

    @property
    def is_video(self) -> bool: ...

    @property
    def fps(self) -> float | None: ...

    @property
    def times(self) -> Sequence[float] | None:
        """Seconds of each frame of a video, if known. ``fps`` has precedence for rope positions."""

    def place(self, number: int) -> str:
        """Return the place of a frame in the request, for errors."""


class FileToFetch(msgspec.Struct, frozen=True):
    """A file to fetch."""

    url: str
    """URL, and name among the files of the request. For a video file, a name."""
    where: str
    address: str = ""
    """For a video file: the URL; "" for a file inside the request."""
    data: memoryview = msgspec.field(default_factory=lambda: memoryview(b""))
    """The video file, for a file inside the request."""

    @property
    def is_video(self) -> bool:
        return bool(self.address) or bool(self.data)


class NeedsFiles(Exception):
    """Files must be fetched first. Fetch ``wanted``, then read the request again."""

    def __init__(self, wanted: Sequence[FileToFetch]) -> None:
        super().__init__()
        self.wanted = list(wanted)


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """An image, or a frame of a video. The file is available."""

    where: str
    """The place in the request, for errors."""
    header: Header
    url: str = ""
    """URL of a fetched file, or name of a video file; "" for an image inside the request."""
    number: int = 0
    """Number of the frame in the video file."""
    data: memoryview = msgspec.field(default_factory=lambda: memoryview(b""))
    """The file, for a file inside the request."""


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The content of one run of placeholders in a prompt: an image, a part of an image, or a frame group."""

    where: str
    """The part of the request, for errors."""
    frames: tuple[Frame, ...]
    """One frame for an image; the frames of the group for a video."""
    target: Target
    grid: tuple[int, int, int]
    """(frame groups, rows, columns) of patches; see ``MediaItem.grid``."""
    count: int
    """Number of placeholder tokens."""
    start: int = 0
    """Position of the first placeholder token."""
    number: int = 0
    """Index of the part in its image. The parts of an image are consecutive."""
    front: tuple[int, ...] = ()
    """Tokens of text in front of the part; see ``View.front``."""
    lag: int | None = None
    """See ``MediaItem.lag``."""

    @property
    def more(self) -> int:
        """Number of tokens that the picture adds to a prompt that has one placeholder per image."""
        return self.count + len(self.front) - (self.number == 0)

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded pixels."""
        height, width = self.target.shape
        return len(self.frames) * height * width * 3


def headers_of(wanted: Sequence[FileToFetch], files: Mapping[str, memoryview]) -> dict[str, ImageHeader]:
    """Return URL -> header for fetched files. ``files``: URL -> file, with every wanted URL. Raises
    InvalidRequest with the part for an unusable file. Video files are left out."""
    found = {}
    for one in wanted:
        if one.is_video:
            continue
        try:
            found[one.url] = read_header(files[one.url])
        except BadMedia as error:
            raise error.at(one.where) from None
    return found


class Pictures:
    """Checks and measures images by the model's sizes and the server's limits. Thread-safe."""

    def __init__(self, facts: MediaFacts, section: MediaSection) -> None:
        """``facts``: image sizes of the model. ``section``: limits and allowed domains of the server."""
        self.facts = facts
        self.section = section
        self._fingerprint = blake2b(msgspec.json.encode(facts), digest_size=KEY_BYTES).digest()
        least = min(facts.min_pixels, LOW_PIXELS)
        self._low = msgspec.structs.replace(
            facts,
            min_pixels=least,
            max_pixels=min(facts.max_pixels, LOW_PIXELS),
            max_patches=min(facts.max_patches, LOW_PIXELS // facts.patch**2),
            longest=facts.longest
            if facts.kind in ("fixed", "tiles")
            else min(facts.longest, math.isqrt(LOW_PIXELS)),
            budget=min(facts.budget, max(1, LOW_PIXELS // (facts.patch * facts.merge) ** 2)),
            # One tile shows the whole image.
            tiles=facts.tiles and msgspec.structs.replace(facts.tiles, least=1, most=1),
        )

    def measured(self, parts: Sequence[ImageSource], known: Mapping[str, Header]) -> list[Picture]:
        """Return one picture per image and per frame group of ``parts``, in order.

        ``known`` maps the URLs of fetched files, and the names of video files, to headers. Raises
        InvalidRequest with the part, and NeedsFiles for files neither in the request nor known.
        """
        # A part with a video file has frame numbers instead of sources.
        each = [
            [(source, part.place(n)) for n, source in enumerate(part.frames) if not part.file]
            for part in parts
        ]
        sources = itertools.chain.from_iterable(each)
        wanted = {source: where for source, where in sources if self._is_missing(source, where, known)}
        if wanted:
            raise NeedsFiles([FileToFetch(url, where) for url, where in wanted.items()])
        found: list[Picture] = []
        work = 0
        for part, places in zip(parts, each, strict=True):
            frames = [self._frame(source, where, known) for source, where in places]
            if part.file:
                header = known[part.file]
                frames = [
                    Frame(where=part.where, header=header, url=part.file, number=number)
                    for number in part.frames
                ]
            if part.is_video:
                fitted = self.groups(frames, part.where, part.fps, part.times)
            else:
                fitted = self.fitted(frames[0], part.detail)
            # Check the total before the next part, so that many large images stop early.
            runs = [[group] for group in fitted] if part.is_video else [fitted]
            work += sum(map(work_of, runs))
            if work > self.section.max_request_pixels:
                raise BadMedia(
                    f"brings the images of this prompt to {work} pixels (a JPEG counts once for each scan, a "
                    "small image by its size for the model); the limit is "
                    f"{self.section.max_request_pixels} (--max-request-pixels); send fewer or smaller images",
                    TOO_LARGE,
                ).at(part.where)
            found += fitted
        return found

    def _is_missing(self, source: str, where: str, known: Mapping[str, Header]) -> bool:
        """Return True for an allowed web URL without a known header. Raises InvalidRequest for a forbidden
        URL.
        """
        if source in known or not is_web(source):
            return False
        try:
            web_address(source, self.section.allowed_media_domains)
        except BadMedia as error:
            raise error.at(where) from None
        return True

    def _frame(self, source: str, where: str, known: Mapping[str, Header]) -> Frame:
        """Return the checked frame of one source: a known file, or a ``data:`` URL that is decoded here.
        Raises InvalidRequest."""
        # Accept image headers only: a client may send the name of a video file as the URL of an image.
        if isinstance(header := known.get(source), ImageHeader):
            return self._checked(Frame(where=where, header=header, url=source))
        try:
            data = inline(source, self.section.max_image_bytes)
            header = read_header(data)
        except BadMedia as error:
            raise error.at(where) from None
        return self._checked(Frame(where=where, header=header, data=memoryview(data)))

    def _checked(self, frame: Frame) -> Frame:
        """Return ``frame``. Raise InvalidRequest if the image exceeds the pixel limit."""
        header = frame.header
        if header.width * header.height > self.section.max_image_pixels:
            raise BadMedia(
                f"has {header.width} x {header.height} pixels; the limit is {self.section.max_image_pixels} "
                "(--max-image-pixels); send a smaller image",
                TOO_LARGE,
            ).at(frame.where)
        return frame

    def fitted(self, frame: Frame, detail: str = "auto") -> list[Picture]:
        """Return the items of one image, fitted to the model's sizes: one item, or one per tile. ``detail``:
        "low" limits the image to ``LOW_PIXELS`` and one tile. Raises InvalidRequest for an image over the
        server's limit or outside the model's sizes."""
        facts = self._low if detail == "low" else self.facts
        height, width = self._checked(frame).header.shown
        with naming(frame.where):
            found = facts.views_of(height, width)
        self._check_between(frame, max(view.fit.size[1] for view in found))
        return [self._picture(frame.where, (frame,), view, number) for number, view in enumerate(found)]

    def _check_between(self, frame: Frame, columns: int) -> None:
        """Raise InvalidRequest for an image of extreme shape. ``columns``: width after resizing."""
        height, width = frame.header.shown
        if height * columns > max(MOST_BETWEEN, self.section.max_image_pixels):
            raise BadMedia(
                f"has {width} x {height} pixels, a shape too long to resize; send a part of the image",
                TOO_LARGE,
            ).at(frame.where)

    def groups(
        self,
        frames: Sequence[Frame],
        where: str,
        fps: float | None = None,
        times: Sequence[float] | None = None,
    ) -> list[Picture]:
        """Return the frame groups of a video, fitted to the model's sizes. The last group may have fewer
        frames. ``fps``, ``times``: frames per second, and seconds of each frame, if known.

        Raises InvalidRequest for a model without videos, for frames of different sizes, and for sizes
        outside the limits of the model or the server.
        """
        video, size = self.facts.frames, self.facts.group
        if video is None:
            why = self.facts.no_videos and f": {self.facts.no_videos}"
            raise InvalidRequest(f"{where}: this model accepts no videos{why}", param=where)
        height, width = frames[0].header.shown
        for frame in frames:
            if frame.header.shown != (height, width):
                shown = frame.header.shown
                raise InvalidRequest(
                    f"{frame.where}: the frame has {shown[1]} x {shown[0]} pixels, and the first frame has "
                    f"{width} x {height}; all frames of a video must have the same size",
                    param=frame.where,
                    code=INVALID,
                )
        with naming(where):
            fit = self.facts.video_grid_of(video, len(frames), height, width)
        self._check_between(frames[0], fit.size[1])
        cuts = [tuple(frames[begin : begin + size]) for begin in range(0, len(frames), size)]
        lags = video.lags(len(cuts), size, fps, times)
        fits = [fit._replace(grid=(len(cut), *fit.grid[1:])) if video.averaged else fit for cut in cuts]
        return [
            self._picture(where, cut, View(one), lag=lag)
            for cut, one, lag in zip(cuts, fits, lags, strict=True)
        ]

    def _picture(
        self, where: str, frames: tuple[Frame, ...], view: View, number: int = 0, lag: int | None = None
    ) -> Picture:
        fit = view.fit
        target = Target(
            height=fit.size[0],
            width=fit.size[1],
            canvas=fit.padded,
            part=view.part,
            resample=self.facts.resample,
            fingerprint=self._fingerprint,
        )
        return Picture(
            where=where,
            frames=frames,
            target=target,
            grid=fit.grid,
            count=fit.tokens,
            number=number,
            front=view.front,
            lag=lag,
        )


def work_of(run: Sequence[Picture]) -> int:
    """Return the pixels that a worker visits for the items of one image or frame group.

    The maximum of the pixels of the file and of the resize passes: a small image in many tiles is work, too.
    """
    sizes = {(picture.target.height, picture.target.width) for picture in run}
    work = 0
    for frame in run[0].frames:
        rows = frame.header.shown[0]
        # The first pass makes the columns of the result, the second pass makes the rows.
        work += max(frame.header.work, sum(max(rows, height) * width for height, width in sizes))
    return work


def runs_of(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Return ``pictures`` in order, in runs: all parts of one image, or all groups of one video file. A frame
    group from a list of frames is a run alone."""
    runs: list[list[Picture]] = []
    for picture in pictures:
        first = picture.frames[0]
        same = runs and runs[-1][0].frames[0]
        # Two parts of a message may name the same file.
        if picture.number or (
            same
            and isinstance(first.header, VideoHeader)
            and (first.url, picture.where) == (same.url, runs[-1][0].where)
        ):
            runs[-1].append(picture)
        else:
            runs.append([picture])
    return runs
