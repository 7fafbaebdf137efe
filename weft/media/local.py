"""Images of callers in this process: fetched and decoded here, since they are the caller's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.config.media import MediaFacts
from weft.config.media_section import MediaSection
from weft.media.decode import finished, key_of, load, pixels_of
from weft.media.errors import INVALID, BadMedia
from weft.media.fetch import Fetcher
from weft.media.headers import ImageHeader
from weft.media.pictures import Asked, NeedsFiles, Picture, Pictures, headers_of
from weft.types.media import MediaItem

if TYPE_CHECKING:
    from PIL.Image import Image


class LocalPictures:
    """What ``Pictures`` and media workers do for a server. Thread-safe."""

    def __init__(self, facts: MediaFacts, section: MediaSection) -> None:
        self.facts = facts
        self._pictures = Pictures(facts, section)
        self._fetcher = Fetcher(section.allowed_media_domains, section.max_image_bytes, section.media_timeout)

    def items(self, parts: Sequence[Asked]) -> list[MediaItem]:
        """One for each of ``parts``, each at position 0. Raises InvalidRequest, naming the part."""
        named = [part for part in parts if isinstance(part.source, str)]
        files: dict[str, memoryview] = {}
        try:
            found = self._pictures.measured(named, {})
        except NeedsFiles as needs:
            for wanted in needs.wanted:
                try:
                    files[wanted.url] = memoryview(self._fetcher.fetch(wanted.url))
                except BadMedia as error:
                    raise error.at(wanted.where) from None
            found = self._pictures.measured(named, headers_of(needs.wanted, files))
        here = iter(found)
        return [
            self._of_file(next(here), files) if isinstance(part.source, str) else self._of_image(part)
            for part in parts
        ]

    def _of_file(self, picture: Picture, files: dict[str, memoryview]) -> MediaItem:
        data = files[picture.url] if picture.url else picture.data
        try:
            return _item(picture, pixels_of(data, picture.header, picture.target))
        except BadMedia as error:
            raise error.at(picture.where) from None

    def _of_image(self, part: Asked) -> MediaItem:
        """Of an image that Pillow has read."""
        try:
            image = _upright(part.source)
        except BadMedia as error:
            raise error.at(part.where) from None
        header = ImageHeader(format="PNG", width=image.width, height=image.height)
        picture = self._pictures.fitted(header, part.where, part.detail)
        return _item(picture, finished(image, picture.target))


def _upright(source: Any) -> Image:
    load()
    from PIL import Image, ImageOps

    if not isinstance(source, Image.Image):
        raise BadMedia("must be a URL or an image of Pillow's", INVALID)
    try:
        return ImageOps.exif_transpose(source)
    except Exception:  # it may be read only now
        raise BadMedia("cannot be decoded: the file is damaged or cut off") from None


def _item(picture: Picture, pixels: bytes) -> MediaItem:
    key = key_of(pixels, picture.target)
    return MediaItem(key=key, start=0, count=picture.count, grid=picture.grid, pixels=pixels)


def placed(items: Sequence[MediaItem], starts: Sequence[int]) -> tuple[MediaItem, ...]:
    """``items`` at the positions of their first tokens."""
    pairs = zip(items, starts, strict=True)
    return tuple(msgspec.structs.replace(item, start=start) for item, start in pairs)
