"""The images of a prompt before they are decoded: checked, measured and counted by their headers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, Protocol

import msgspec

from weft.common.errors import InvalidRequest
from weft.config.media import MediaFacts
from weft.config.media_section import MediaSection
from weft.media.decode import KEY_BYTES
from weft.media.errors import TOO_LARGE, BadMedia
from weft.media.headers import ImageHeader, read_header
from weft.media.urls import inline, is_web, web_address
from weft.media.words import Target

LOW_PIXELS = 512 * 512
"""Of an image with ``detail: low``, once it is resized."""


class Asked(Protocol):
    """A part of a message (``weft.text.messages.ImagePart``)."""

    @property
    def source(self) -> Any: ...

    @property
    def where(self) -> str: ...

    @property
    def detail(self) -> str: ...


class Wanted(msgspec.Struct, frozen=True):
    """A file that has to be fetched."""

    url: str
    where: str


class NeedsFiles(Exception):
    """Files have to be fetched before a request can be read: it is to be read again then."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        super().__init__()
        self.wanted = list(wanted)


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """An image of a prompt, whose file is here or is fetched."""

    where: str
    """The part of the request, for errors."""
    header: ImageHeader
    target: Target
    grid: tuple[int, int, int]
    """Frame groups, rows and columns of patches."""
    count: int
    """Tokens that stand for it."""
    start: int = 0
    """Position of the first one."""
    url: str = ""
    """Of one whose file was fetched."""
    data: memoryview = msgspec.field(default_factory=lambda: memoryview(b""))
    """The file of one that came with the request."""

    @property
    def nbytes(self) -> int:
        """Of its pixels."""
        height, width = self.target.canvas
        return height * width * 3


def headers_of(wanted: Sequence[Wanted], files: Mapping[str, memoryview]) -> dict[str, ImageHeader]:
    """Of fetched files, by their URLs. Raises InvalidRequest, naming the part."""
    found = {}
    for one in wanted:
        try:
            found[one.url] = read_header(files[one.url])
        except BadMedia as error:
            raise error.at(one.where) from None
    return found


class Pictures:
    """What a model makes of images, and what a server lets them be. Thread-safe."""

    def __init__(self, facts: MediaFacts, section: MediaSection) -> None:
        self.facts = facts
        self._section = section
        self._fingerprint = blake2b(msgspec.json.encode(facts), digest_size=KEY_BYTES).digest()
        least = min(facts.min_pixels, LOW_PIXELS)
        self._low = msgspec.structs.replace(
            facts,
            min_pixels=least,
            max_pixels=min(facts.max_pixels, LOW_PIXELS),
            max_patches=min(facts.max_patches, LOW_PIXELS // facts.patch**2),
        )

    def measured(self, parts: Sequence[Asked], known: Mapping[str, ImageHeader]) -> list[Picture]:
        """One for each of ``parts``; ``known`` has the headers of files that were fetched, by their URLs.

        Raises InvalidRequest, naming the part, and NeedsFiles for what is neither here nor known.
        """
        wanted = {part.source: part.where for part in parts if self._is_missing(part, known)}
        if wanted:
            raise NeedsFiles([Wanted(url, where) for url, where in wanted.items()])
        return [self._picture(part, known) for part in parts]

    def _is_missing(self, part: Asked, known: Mapping[str, ImageHeader]) -> bool:
        if not is_web(part.source) or part.source in known:
            return False
        try:
            web_address(part.source, self._section.allowed_media_domains)
        except BadMedia as error:
            raise error.at(part.where) from None
        return True

    def _picture(self, part: Asked, known: Mapping[str, ImageHeader]) -> Picture:
        if is_web(part.source):
            return self.fitted(known[part.source], part.where, part.detail, url=part.source)
        try:
            data = inline(part.source, self._section.max_image_bytes)
            header = read_header(data)
        except BadMedia as error:
            raise error.at(part.where) from None
        return self.fitted(header, part.where, part.detail, data=data)

    def fitted(
        self, header: ImageHeader, where: str, detail: str = "auto", *, url: str = "", data: bytes = b""
    ) -> Picture:
        """An image of this header, as the model wants it. Raises InvalidRequest."""
        if header.width * header.height > self._section.max_image_pixels:
            raise BadMedia(
                f"has {header.width} x {header.height} pixels, and at most {self._section.max_image_pixels} "
                "are decoded (--max-image-pixels); send a smaller one",
                TOO_LARGE,
            ).at(where)
        facts = self._low if detail == "low" else self.facts
        try:
            fit = facts.grid_of(*header.shown)
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}: {error.message}", param=where) from None
        target = Target(
            height=fit.size[0],
            width=fit.size[1],
            canvas=fit.padded,
            resample=facts.resample,
            fingerprint=self._fingerprint,
        )
        return Picture(
            where=where,
            header=header,
            target=target,
            grid=fit.grid,
            count=fit.tokens,
            url=url,
            data=memoryview(data),
        )
