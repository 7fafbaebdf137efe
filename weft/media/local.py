"""Images of callers in this process (``LLM``), fetched and decoded here instead of in worker processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.config.media import MediaFacts
from weft.config.sections.media_section import MediaSection
from weft.media.decode import group_pixels, load, views
from weft.media.fetch import Fetcher
from weft.media.headers import ImageHeader
from weft.media.local_videos import LocalVideos
from weft.media.media_errors import INVALID, BadMedia
from weft.media.media_items import item_of
from weft.media.pictures import ImageSource, NeedsFiles, Picture, Pictures, headers_of, runs_of
from weft.media.video_header import Header, VideoHeader
from weft.types.media_item import MediaItem

if TYPE_CHECKING:
    from PIL.Image import Image


class LocalPictures:
    """Measures, fetches and decodes images for a caller without a server. Thread-safe."""

    def __init__(self, facts: MediaFacts, section: MediaSection) -> None:
        self.facts = facts
        self._pictures = Pictures(facts, section)
        self._fetcher = Fetcher(section.allowed_media_domains, section.max_image_bytes, section.media_timeout)

    def videos(self) -> LocalVideos:
        """Return an empty ``LocalVideos`` for a new request."""
        return LocalVideos(self._pictures, self._fetcher)

    def measured(
        self, parts: Sequence[ImageSource], videos: LocalVideos | None = None
    ) -> tuple[list[Picture], list[MediaItem]]:
        """Return the pictures of ``parts`` in order (images, or tiles of images, and frame groups), and the
        item of each, at position 0, with pixels. Fetches and decodes here, and blocks meanwhile. ``videos``:
        the request's video files.

        Raises InvalidRequest with the part for an image that is refused, missing or damaged.
        """
        opened: dict[str, Image] = {}
        named = [_named(part, opened) for part in parts]
        headers: dict[str, Header] = {name: _header(image) for name, image in opened.items()}
        headers |= {} if videos is None else videos.headers
        files: dict[str, memoryview] = {}
        try:
            # First without files. ``NeedsFiles`` lists all files to fetch; then measure again.
            found = self._pictures.measured(named, headers)
        except NeedsFiles as needs:
            for wanted in needs.wanted:
                try:
                    files[wanted.url] = memoryview(self._fetcher.fetch(wanted.url))
                except BadMedia as error:
                    raise error.at(wanted.where) from None
            found = self._pictures.measured(named, {**headers, **headers_of(needs.wanted, files)})
        made: list[MediaItem] = []
        for run in runs_of(found):
            if videos is not None and isinstance(run[0].frames[0].header, VideoHeader):
                made += videos.items(run)
            else:
                made += map(item_of, run, self._pixels(run, opened, files))
        return found, made

    def _pixels(
        self, run: Sequence[Picture], opened: Mapping[str, Image], files: Mapping[str, memoryview]
    ) -> list[bytes]:
        """Return the pixels of all items of one image, or of one frame group: uint8 [frames, height, width,
        3] as bytes. ``opened``: name -> upright Pillow image. Raises InvalidRequest."""
        targets = [picture.target for picture in run]
        made = []
        for frame in run[0].frames:
            try:
                if (image := opened.get(frame.url)) is not None:
                    made.append(views(image, targets))
                else:
                    data = files[frame.url] if frame.url else frame.data
                    assert isinstance(frame.header, ImageHeader)
                    made.append(group_pixels([(data, frame.header)], targets))
            except BadMedia as error:
                raise error.at(frame.where) from None
        return [b"".join(frames) for frames in zip(*made, strict=True)]


class _Named(msgspec.Struct, frozen=True):
    """A part with a URL or a name for each image."""

    frames: tuple[Any, ...]
    where: str
    detail: str
    is_video: bool
    places: tuple[str, ...]
    fps: float | None
    times: Sequence[float] | None
    file: str

    def place(self, number: int) -> str:
        return self.places[number]


def _named(part: ImageSource, opened: dict[str, Image]) -> _Named:
    """Return ``part`` with a name for each open Pillow image. The upright images are added to ``opened`` by
    name. Raises InvalidRequest for a source that is neither a URL nor a readable image."""
    places = tuple(part.place(number) for number in range(len(part.frames)))
    names = []
    for source, where in zip(part.frames, places, strict=True):
        # Frames of a file are numbers.
        if not part.file and not isinstance(source, str):
            name = f"\0opened {len(opened)}"  # no URL starts with a NUL
            try:
                opened[name] = _upright(source)
            except BadMedia as error:
                raise error.at(where) from None
            source = name
        names.append(source)
    return _Named(
        tuple(names), part.where, part.detail, part.is_video, places, part.fps, part.times, part.file
    )


def _header(image: Image) -> ImageHeader:
    return ImageHeader(format="PNG", width=image.width, height=image.height)


def _upright(source: Any) -> Image:
    """Return a Pillow image turned by its EXIF orientation. Raises BadMedia."""
    load()
    from PIL import Image, ImageOps

    if not isinstance(source, Image.Image):
        raise BadMedia("must be a URL or a Pillow image", INVALID)
    try:
        return ImageOps.exif_transpose(source)
    except Exception:  # Pillow may read the file only now
        raise BadMedia("cannot be decoded: the file is damaged or cut off") from None


def placed(items: Sequence[MediaItem], starts: Sequence[int]) -> tuple[MediaItem, ...]:
    """Return ``items`` at the positions ``starts`` of their first tokens."""
    pairs = zip(items, starts, strict=True)
    return tuple(msgspec.structs.replace(item, start=start) for item, start in pairs)
