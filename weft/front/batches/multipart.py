"""Parts of ``multipart/form-data`` bodies in pieces of any size, by python-multipart. Bytes in, parts out."""

from __future__ import annotations

import logging
from typing import NamedTuple, TypeAlias

from python_multipart import exceptions, multipart

from weft.common.errors import InvalidRequest, UnsupportedMedia

# The library logs a warning for each wrong body. The client gets the same text as an error.
logging.getLogger("python_multipart").setLevel(logging.ERROR)

MOST_HEADER = 8 << 10
"""Maximum bytes of a header of a part."""
MOST_PARTS = 16


class PartBegin(NamedTuple):
    """A part begins."""

    name: str
    file: str | None
    """Name of the file; None for a field."""


class PartData(NamedTuple):
    """Bytes of the present part."""

    data: bytes


class PartEnd(NamedTuple):
    """The present part is complete."""


Part: TypeAlias = PartBegin | PartData | PartEnd


def boundary_of(content_type: str) -> bytes:
    """Return the boundary in a header Content-Type. Raises UnsupportedMedia for another type."""
    kind, options = multipart.parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMedia("the content type must be multipart/form-data with a boundary")
    return boundary


class MultipartParser:
    """State of one body. ``feed`` each piece, then ``finish``."""

    def __init__(self, boundary: bytes) -> None:
        """Raises InvalidRequest for a boundary that is too long."""
        self._made: list[Part] = []
        self._header, self._value = bytearray(), bytearray()
        self._disposition = ""
        self._parts = 0
        self._complete = False
        callbacks: multipart.MultipartCallbacks = {
            "on_part_begin": self._on_begin,
            "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": lambda data, start, end: self._made.append(PartData(data[start:end])),
            "on_part_end": lambda: self._made.append(PartEnd()),
            "on_end": self._on_end,
        }
        try:
            self._parser = multipart.MultipartParser(boundary, callbacks, max_header_size=MOST_HEADER)
        except exceptions.FormParserError as error:
            raise _broken(str(error)) from None

    def feed(self, data: bytes) -> list[Part]:
        """Return the parts in a piece of the body. Raises InvalidRequest for a body of another form."""
        try:
            self._parser.write(data)
        except exceptions.MultipartParseError as error:
            raise _broken(str(error)) from None
        made, self._made = self._made, []
        return made

    def finish(self) -> None:
        """Raise InvalidRequest unless the body is complete."""
        if not self._complete:
            raise _broken("the last boundary is missing")

    def _on_begin(self) -> None:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _broken("too many parts")
        self._disposition = ""

    def _on_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value.decode("latin-1")
        self._header.clear()
        self._value.clear()

    def _on_headers(self) -> None:
        _, options = multipart.parse_options_header(self._disposition)
        if b"name" not in options:
            raise _broken("a part has no name")
        file = options.get(b"filename")
        shown = None if file is None else file.decode("utf-8", "replace")
        self._made.append(PartBegin(options[b"name"].decode("utf-8", "replace"), shown))

    def _on_end(self) -> None:
        self._complete = True


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {reason}", code="invalid_multipart")
