"""Parser of ``multipart/form-data`` bodies in pieces of any size. Pure: bytes in, parts out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from weft.common.errors import InvalidRequest, UnsupportedMedia

MOST_HEADER = 8 << 10
"""Maximum bytes of the headers of a part."""
MOST_PARTS = 16
_BOUNDARY = re.compile(r'(?:^|;)\s*boundary=(?:"([^"]{1,200})"|([^\s;"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(rb'[;\s]name="([^"\r\n]{0,200})"', re.IGNORECASE)
_FILE = re.compile(rb'[;\s]filename="((?:[^"\\\r\n]|\\.){0,1000})"', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*)", re.IGNORECASE | re.MULTILINE)


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
    kind, _, rest = content_type.partition(";")
    found = _BOUNDARY.search(rest)
    if kind.strip().lower() != "multipart/form-data" or found is None:
        raise UnsupportedMedia("the content type must be multipart/form-data with a boundary")
    return (found[1] or found[2]).encode("latin-1", "replace")


class MultipartParser:
    """State of one body. ``feed`` each piece, then ``finish``."""

    def __init__(self, boundary: bytes) -> None:
        self._mark = b"\r\n--" + boundary
        # The first boundary has no line end in front.
        self._rest = b"\r\n"
        self._state = "preamble"
        self._parts = 0

    def feed(self, data: bytes) -> Iterator[Part]:
        """Yield the parts in a piece of the body. Raises InvalidRequest for a body of another form."""
        self._rest += data
        # Each round consumes one element: preamble or data up to a boundary, the bytes behind a boundary, or
        # headers. A round without enough bytes ends the loop.
        while True:
            if self._state in ("preamble", "data"):
                at = self._rest.find(self._mark)
                if at < 0:
                    keep = len(self._mark) - 1
                    passed, self._rest = self._rest[:-keep], self._rest[-keep:]
                    if passed and self._state == "data":
                        yield PartData(passed)
                    return
                if self._state == "data":
                    if at:
                        yield PartData(self._rest[:at])
                    yield PartEnd()
                self._rest, self._state = self._rest[at + len(self._mark) :], "boundary"
            elif self._state == "boundary":
                if len(self._rest) < 2:
                    return
                if self._rest[:2] not in (b"\r\n", b"--"):
                    raise _broken("a boundary is followed by other bytes")
                self._state = "headers" if self._rest[:2] == b"\r\n" else "end"
                self._rest = self._rest[2:]
            elif self._state == "headers":
                at = self._rest.find(b"\r\n\r\n")
                if at > MOST_HEADER or (at < 0 and len(self._rest) > MOST_HEADER):
                    raise _broken("the headers of a part are too long")
                if at < 0:
                    return
                yield self._begin(self._rest[:at])
                # The line end stays: data may begin with a boundary.
                self._rest, self._state = self._rest[at + 2 :], "empty"
            elif self._state == "empty":
                if len(self._rest) < len(self._mark):
                    return
                if self._rest.startswith(self._mark):
                    yield PartEnd()
                    self._rest, self._state = self._rest[len(self._mark) :], "boundary"
                else:
                    self._rest, self._state = self._rest[2:], "data"
            else:
                self._rest = b""
                return

    def _begin(self, headers: bytes) -> PartBegin:
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _broken("too many parts")
        disposition = _DISPOSITION.search(headers)
        name = None if disposition is None else _NAME.search(disposition[1])
        if disposition is None or name is None:
            raise _broken("a part has no name")
        file = _FILE.search(disposition[1])
        shown = None if file is None else re.sub(rb"\\(.)", rb"\1", file[1]).decode("utf-8", "replace")
        return PartBegin(name[1].decode("utf-8", "replace"), shown)

    def finish(self) -> None:
        """Raise InvalidRequest unless the body is complete."""
        if self._state != "end":
            raise _broken("the last boundary is missing")


def _broken(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the body is not valid multipart/form-data: {reason}", code="invalid_multipart")
