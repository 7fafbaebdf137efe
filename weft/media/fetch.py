"""Fetch one file by http(s), with protection against server-side request forgery (SSRF).

The host is resolved once, and every address must be public. The connection goes to one of the checked
addresses, not to the name, so that a later change of DNS (rebinding) has no effect. Each redirect is checked
like the first URL. Proxies and credentials of the environment are not used.
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
from weft.media.media_errors import REFUSED, UNREACHABLE, BadMedia
from weft.media.urls import WebAddress, redirected, too_large, web_address

MAX_REDIRECTS = 3
_PIECE = 64 << 10
_MOVED = frozenset((301, 302, 303, 307, 308))
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "weft", "Connection": "close"}


class Fetcher:
    """Fetches files under one server's rules. Blocks."""

    def __init__(
        self,
        allowed: Sequence[str],
        most_bytes: int,
        seconds: float,
        *,
        permits: Callable[[str], bool] = is_public,
        secure: ssl.SSLContext | None = None,
    ) -> None:
        """``allowed``: entries of ``--allowed-media-domains``; an empty list refuses every URL.
        ``most_bytes``: maximum bytes of a file. ``seconds``: limit of a fetch including redirects; only a
        name lookup may exceed the limit. ``permits``: check of addresses. ``secure``: TLS settings; None for
        the system's."""
        self._allowed = allowed
        self._most = most_bytes
        self._seconds = seconds
        self._permits = permits
        self._secure = secure

    def fetch(self, url: str, most: int | None = None, *, video: bool = False) -> bytes:
        """Return the bytes of the file, of any content. Blocks. ``most``: maximum bytes, if not the
        fetcher's. ``video``: the file is a video. Raises BadMedia for a refused URL, a failed fetch, a
        time-out, and a file that is too large."""
        most = self._most if most is None else most
        deadline = time.monotonic() + self._seconds
        address = web_address(url, self._allowed)
        try:
            # ``_get`` checks each new address like the first.
            for _ in range(1 + MAX_REDIRECTS):
                found = self._get(address, deadline, most, video)
                if isinstance(found, bytes):
                    return found
                address = found
        except TimeoutError:
            raise BadMedia(f"took longer than {self._seconds:g} seconds to fetch", UNREACHABLE) from None
        except (OSError, http.client.HTTPException, ValueError):
            raise BadMedia(
                "could not be fetched: its server gave no valid HTTP response", UNREACHABLE
            ) from None
        raise BadMedia(f"is behind more than {MAX_REDIRECTS} redirects", REFUSED)

    def _get(self, address: WebAddress, deadline: float, most: int, video: bool) -> bytes | WebAddress:
        """Return the file, or the address of a redirect. The connection is closed at the return. Raises
        BadMedia, OSError (TimeoutError past the deadline) or HTTPException."""
        with self._connect(address, deadline) as link:
            watched = _SocketWithDeadline(link, deadline)
            link.sendall(_request(address, video))
            answer = http.client.HTTPResponse(watched, method="GET")  # type: ignore[arg-type]
            try:
                answer.begin()
                if answer.status in _MOVED and (location := answer.getheader("Location")):
                    return redirected(address, location, self._allowed)
                if answer.status != 200:
                    raise BadMedia(
                        f"could not be fetched: its server answers with status {answer.status}", UNREACHABLE
                    )
                # A compressed body could expand beyond every limit, so only plain bodies are read.
                if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
                    raise BadMedia("could not be fetched: its server sent a compressed response", UNREACHABLE)
                if answer.length is not None and answer.length > most:
                    raise too_large(most, video=video)
                return self._read(answer, most, video)
            finally:
                answer.close()

    def _read(self, answer: http.client.HTTPResponse, most: int, video: bool) -> bytes:
        """Return the body. Raises BadMedia for a body longer than the limit or shorter than declared."""
        data = bytearray()
        while piece := answer.read(min(_PIECE, most + 1 - len(data))):
            data += piece
            if len(data) > most:
                raise too_large(most, video=video)
        if answer.length:
            raise BadMedia("could not be fetched: its server closed the connection early", UNREACHABLE)
        return bytes(data)

    def _connect(self, address: WebAddress, deadline: float) -> socket.socket:
        """Return a connection to one of the host's addresses, after a check of all addresses. With https,
        TLS is set up. Raises BadMedia for an unknown or refused host, TimeoutError past the deadline, and
        the OSError of the last address if no address works."""
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except (socket.gaierror, UnicodeError):
            raise BadMedia("could not be fetched: its host name cannot be resolved", UNREACHABLE) from None
        places = [(family, place) for family, _, _, _, place in found]
        # A single private address refuses the host, because an attacker may mix both kinds.
        if not places or not all(self._permits(str(place[0])) for _, place in places):
            raise BadMedia("has a URL with a host that is not on the public internet", REFUSED)
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


class _SocketWithDeadline:
    """The socket interface that ``HTTPResponse`` needs, with a deadline for all reads."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def makefile(self, mode: str) -> object:
        """Return the reader for the response. ``mode`` is "rb"."""
        return io.BufferedReader(_SocketReader(self._link, self._deadline), _PIECE)


class _SocketReader(io.RawIOBase):
    """A reader with one deadline for all reads, so that a slow server cannot prolong a fetch."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link = link
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Read into ``buffer`` and return the number of bytes. Raises TimeoutError past the deadline."""
        self._link.settimeout(_left(self._deadline))
        return self._link.recv_into(buffer)


def _left(deadline: float) -> float:
    """Return the seconds before the deadline. Raises TimeoutError past the deadline."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _request(address: WebAddress, video: bool) -> bytes:
    accept = "video/*, image/gif" if video else "image/*"
    lines = [f"GET {address.target} HTTP/1.1", f"Host: {address.netloc}", f"Accept: {accept}"]
    lines += [f"{name}: {value}" for name, value in _HEADERS.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
