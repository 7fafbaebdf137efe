"""URLs of images: ``data:`` URLs, and http(s) URLs if ``--allowed-media-domains`` allows the host.

URLs are never repaired. Any URL that two programs could read differently (userinfo, backslashes, numbers as
hosts) is refused, so that the checked host is the contacted host.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Sequence
from ipaddress import AddressValueError, IPv4Address, IPv6Address
from typing import Literal
from urllib.parse import urljoin

import msgspec

from weft.media.media_errors import REFUSED, TOO_LARGE, BadMedia

MAX_URL = 8192
"""Maximum characters of an http(s) URL."""
_MAX_HEAD = 512
"""Maximum characters of a ``data:`` URL before the data."""
_SPACE = b" \t\r\n"
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_HEAD = re.compile(r"data:[\w.+\-/]{0,100}((?:;[\w.+\-]{1,40}(?:=[\w.+\-\"]{0,100})?){0,8})", re.IGNORECASE)
_VIDEO_HEAD = re.compile(
    r"data:[\w.+\-/]{0,100}((?:;[\w.+\-]{1,40}(?:=[\w.+\-\", ]{0,100})?){0,8})", re.IGNORECASE
)
"""The head of a video's ``data:`` URL, which may list several codecs."""
_BASE64 = re.compile(";base64,", re.IGNORECASE)
_WEB = re.compile(r"(https?)://([^/?#]+)([^#]*)", re.IGNORECASE)
_NETLOC = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9.\-]+)(?::(\d{1,5}))?", re.IGNORECASE)
_LABEL = re.compile(r"(?!-)[a-z0-9\-]{1,63}(?<!-)")
_PORTS = {"http": 80, "https": 443}


class WebAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A checked http(s) URL, in parts."""

    scheme: Literal["http", "https"]
    host: str
    """A name or an address in lower case; IPv6 without brackets."""
    port: int
    target: str
    """Path and query, for the request line."""

    @property
    def netloc(self) -> str:
        """Value of the ``Host`` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def is_web(url: str) -> bool:
    """Return True for an http(s) URL."""
    return url[:8].lower().startswith(("http://", "https://"))


def inline(url: str, most: int, *, video: bool = False) -> bytes:
    """Return the bytes in a ``data:`` URL; the declared type is ignored. Raises BadMedia for any other URL,
    for data that is not base64, and for more than ``most`` bytes. ``video``: the file is a video."""
    if url[:5].lower() != "data:":
        raise BadMedia(
            "must be a data: URL with base64, or an http(s) URL if this server allows http(s); this server "
            "does not read its own files",
            REFUSED,
        )
    form = "data:video/mp4;base64,..." if video else "data:image/png;base64,..."
    at = url.find(",", 0, _MAX_HEAD)
    # Browsers write the codecs of a recorded video with a comma: data:video/webm;codecs=vp8,opus;base64,...
    if video and (end := _BASE64.search(url, 0, _MAX_HEAD)) is not None:
        at = end.end() - 1
    found = None if at < 0 else (_VIDEO_HEAD if video else _HEAD).fullmatch(url[:at])
    if found is None:
        raise BadMedia(f"has an invalid data: URL; use the form {form}")
    if not found[1].lower().endswith(";base64"):
        raise BadMedia(f"must be encoded in base64 in its data: URL ({form})")
    return from_base64(url[at + 1 :], most, video=video)


def from_base64(text: str, most: int, *, video: bool = False) -> bytes:
    """Return the decoded bytes. Line breaks, missing padding and the URL-safe alphabet are accepted. Raises
    BadMedia for invalid or empty data and for more than ``most`` bytes."""
    if len(text) > most // 2 * 3 + 4096:  # before decoding; leaves room for line breaks
        raise too_large(most, video=video)
    try:
        data = text.encode("ascii")
    except UnicodeEncodeError:
        raise BadMedia("is not valid base64") from None
    try:
        made = binascii.a2b_base64(data, strict_mode=True)
    except binascii.Error:
        made = _tolerant(data)
    if len(made) > most:
        raise too_large(most, video=video)
    if not made:
        raise BadMedia("has no bytes")
    return made


def _tolerant(data: bytes) -> bytes:
    """Decode base64 with line breaks, without padding, or in the URL-safe alphabet. Raises BadMedia."""
    data = data.translate(_URL_SAFE, _SPACE).rstrip(b"=")
    try:
        return binascii.a2b_base64(data + b"=" * (-len(data) % 4), strict_mode=True)
    except binascii.Error:
        raise BadMedia("is not valid base64") from None


def too_large(most: int, *, video: bool = False) -> BadMedia:
    """Return the error of an image, or of a video, with more than ``most`` bytes."""
    noun = "video" if video else "image"
    return BadMedia(f"has more than {most} bytes (--max-{noun}-bytes); send a smaller {noun}", TOO_LARGE)


def web_address(url: str, allowed: Sequence[str]) -> WebAddress:
    """Return an http(s) URL in parts, after checks of the form and of the host against ``allowed``.

    Raises BadMedia. ``fetch`` checks later if all addresses of the host are public.
    """
    if not allowed:
        raise BadMedia(
            "is an http(s) URL, and this server fetches no URLs (--allowed-media-domains); send a data: URL",
            REFUSED,
        )
    if len(url) > MAX_URL:
        raise BadMedia(f"has a URL of more than {MAX_URL} characters", REFUSED)
    if not url.isascii() or not url.isprintable() or any(c in url for c in ' \\"<>^`{|}'):
        raise BadMedia("has a URL with characters that must be percent-encoded", REFUSED)
    # Each check refuses a form that other URL parsers read differently.
    whole = _WEB.fullmatch(url.partition("#")[0])
    if whole is None:
        raise BadMedia("has an invalid URL; use the form https://host/path", REFUSED)
    if "@" in whole[2]:
        raise BadMedia("has a URL with a user name or password; remove both", REFUSED)
    place = _NETLOC.fullmatch(whole[2])
    if place is None:
        raise BadMedia("has a URL with an invalid host", REFUSED)
    scheme: Literal["http", "https"] = "https" if whole[1].lower() == "https" else "http"
    port = int(place[2]) if place[2] else _PORTS[scheme]
    host = _host(place[1].lower())
    if not 1 <= port <= 65535 or not _permits(allowed, host, port, port == _PORTS[scheme]):
        raise BadMedia(
            "has a URL of a host that this server does not fetch from (--allowed-media-domains)", REFUSED
        )
    target = whole[3] if whole[3].startswith("/") else "/" + whole[3]
    return WebAddress(scheme=scheme, host=host, port=port, target=target)


def redirected(start: WebAddress, location: str, allowed: Sequence[str]) -> WebAddress:
    """Return the target of a redirect from ``start``, with the usual checks. ``location`` may be relative.
    Raises BadMedia, also for a redirect from https to http."""
    try:
        url = urljoin(f"{start.scheme}://{start.netloc}{start.target}", location)
    except ValueError:  # brackets without an address: http://[
        raise BadMedia("is redirected to an invalid URL", REFUSED) from None
    if not is_web(url):
        raise BadMedia("is redirected to a URL that is not http(s)", REFUSED)
    found = web_address(url, allowed)
    # A downgrade would send the path unencrypted.
    if start.scheme == "https" and found.scheme == "http":
        raise BadMedia("is redirected from https to http", REFUSED)
    return found


def _host(text: str) -> str:
    """Return the host in normal form.

    Raises BadMedia for anything except a name or an address in the usual form (127.1, 0x7f.1 and 1234567 are
    refused).
    """
    wrong = BadMedia("has a URL with a host that is not a valid name or IP address", REFUSED)
    if text.startswith("["):
        try:
            return str(IPv6Address(text[1:-1]))
        except AddressValueError:
            raise wrong from None
    labels = text.split(".")
    if len(text) > 253 or not all(map(_LABEL.fullmatch, labels)):
        raise wrong
    if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):  # resolvers accept numbers in several bases
        try:
            return str(IPv4Address(text))
        except AddressValueError:
            raise wrong from None
    return text


def _permits(allowed: Sequence[str], host: str, port: int, usual: bool) -> bool:
    """Return True if an entry names the host: the host itself, ``*.`` with a parent domain, or ``*``.

    An entry without a port allows only the scheme's default port (``usual``).
    """
    shown = f"[{host}]" if ":" in host else host
    for entry in allowed:
        domain, colon, number = entry.lower().rpartition(":")
        # An IPv6 address without a port ends in a bracket and contains colons itself.
        if not colon or not number.isdecimal() or number == "" or entry.endswith("]"):
            domain, number = entry.lower(), ""
        if not (usual if number == "" else int(number) == port):
            continue
        if domain == "*" or domain == shown or (domain[:2] == "*." and shown.endswith(domain[1:])):
            return True
    return False
