"""Fetches one file by http(s), for a client who may wish that this server reaches where the client cannot.

The host is looked up once; every address that it has must be public, and the connection is made to one of
these addresses, not to the name, so that a name which changes meanwhile changes nothing. Each redirect is a
new URL, checked like the first. Neither proxies nor credentials of the environment are used.
"""

from __future__ import annotations

import http.client
import io
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any

from weft.media.addresses import is_public
from weft.media.errors import REFUSED, UNREACHABLE, BadMedia
from weft.media.urls import WebAddress, redirected, too_large, web_address

MAX_REDIRECTS = 3
_PIECE = 64 << 10
_MOVED = frozenset((301, 302, 303, 307, 308))
_HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "weft", "Connection": "close"}


class Fetcher:
    """Fetches for one server's rules. Blocks."""

    def __init__(
        self,
        allowed: Sequence[str],
        most_bytes: int,
        seconds: float,
        *,
        permits: Callable[[str], bool] = is_public,
        secure: ssl.SSLContext | None = None,
    ) -> None:
        """``allowed``: entries of ``--allowed-media-domains``. ``seconds``: for all of a fetch, redirects
        included; a look-up of a name alone may take longer. ``permits``: of addresses.
        """
        self._allowed = allowed
        self._most = most_bytes
        self._seconds = seconds
        self._permits = permits
        self._secure = secure

    def fetch(self, url: str) -> bytes:
        """The file. Raises BadMedia."""
        deadline = time.monotonic() + self._seconds
        address = web_address(url, self._allowed)
        try:
            for _ in range(1 + MAX_REDIRECTS):
                found = self._get(address, deadline)
                if isinstance(found, bytes):
                    return found
                address = found
        except TimeoutError:
            raise BadMedia(f"took longer than {self._seconds:g} seconds to fetch", UNREACHABLE) from None
        except (OSError, http.client.HTTPException, ValueError):
            raise BadMedia(
                "could not be fetched: its server does not answer as it should", UNREACHABLE
            ) from None
        raise BadMedia(f"is behind more than {MAX_REDIRECTS} redirects", REFUSED)

    def _get(self, address: WebAddress, deadline: float) -> bytes | WebAddress:
        """The file, or where it is said to be."""
        with self._connect(address, deadline) as link:
            watched = _Watched(link, deadline)
            link.sendall(_request(address))
            answer = http.client.HTTPResponse(watched, method="GET")  # type: ignore[arg-type]
            try:
                answer.begin()
                if answer.status in _MOVED and (location := answer.getheader("Location")):
                    return redirected(address, location, self._allowed)
                if answer.status != 200:
                    raise BadMedia(
                        f"could not be fetched: its server answers with status {answer.status}", UNREACHABLE
                    )
                if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
                    raise BadMedia("could not be fetched: its server sends it compressed", UNREACHABLE)
                if answer.length is not None and answer.length > self._most:
                    raise too_large(self._most)
                return self._read(answer)
            finally:
                answer.close()

    def _read(self, answer: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while piece := answer.read(min(_PIECE, self._most + 1 - len(data))):
            data += piece
            if len(data) > self._most:
                raise too_large(self._most)
        if answer.length:
            raise BadMedia("could not be fetched: its server ended before the file did", UNREACHABLE)
        return bytes(data)

    def _connect(self, address: WebAddress, deadline: float) -> socket.socket:
        """A connection to one of the host's addresses, all of which were checked."""
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):
            raise BadMedia("could not be fetched: its host is not known", UNREACHABLE) from None
        places = [(family, place) for family, _, _, _, place in found]
        if not places or not all(self._permits(str(place[0])) for _, place in places):
            raise BadMedia("has a URL whose host is not on the public internet", REFUSED)
        failure: OSError = ConnectionError()
        for family, place in places:
            link = socket.socket(family, socket.SOCK_STREAM)
            try:
                link.settimeout(_left(deadline))
                link.connect(place)
                if address.scheme == "http":
                    return link
                secure = self._secure or ssl.create_default_context()
                return secure.wrap_socket(link, server_hostname=address.host)
            except TimeoutError:
                link.close()
                raise
            except OSError as error:
                link.close()
                failure = error
        raise failure


class _Watched:
    """A socket of which ``HTTPResponse`` makes its file: each read has what is left of the deadline."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def makefile(self, mode: str) -> object:
        """``mode`` is "rb"."""
        return io.BufferedReader(_Reads(self._link, self._deadline), _PIECE)


class _Reads(io.RawIOBase):
    """Reads of a socket until a deadline, so that a byte now and then does not make it endless."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Raises TimeoutError."""
        self._link.settimeout(_left(self._deadline))
        return self._link.recv_into(buffer)


def _left(deadline: float) -> float:
    """Seconds. Raises TimeoutError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _request(address: WebAddress) -> bytes:
    lines = [f"GET {address.target} HTTP/1.1", f"Host: {address.netloc}"]
    lines += [f"{name}: {value}" for name, value in _HEADERS.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
