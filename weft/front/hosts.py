"""Names under which a server may be asked, against DNS rebinding.

A web page may have its own name resolve to 127.0.0.1: then a browser lets the page read what a server on the
same machine answers. The header Host still has the page's name, so a server for this machine alone takes no
other names than its own.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from weft.common.errors import Forbidden

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{0,5})?")
"""A name or an address, and perhaps a port."""
ALL = "*"
LOCAL = "localhost"


class Hosts:
    """The hosts that requests may name. Ports are not looked at."""

    def __init__(self, bound: str, address: str, allowed: Iterable[str] = (), *, keys: bool = False) -> None:
        """``bound``, ``address``: where the server listens, as asked for and as an address. ``allowed``:
        names and addresses beside these and this machine's own; * for all. ``keys``: requests need an API
        key, which no page of a stranger has.
        """
        named = frozenset(_plain(name) for name in allowed)
        self._names = named | {_plain(bound), _plain(address)}
        self._checks = ALL not in named and (bool(named) or (_is_local(_plain(address)) and not keys))

    def check(self, host: bytes | None) -> None:
        """Raises Forbidden for a request to another ``host``. A request without the header passes, since
        every browser sends the header."""
        if not self._checks or host is None:
            return
        found = _HOST.fullmatch(host.decode("latin-1").strip())
        name = "" if found is None else _plain(found[1])
        if name and (name in self._names or _is_local(name)):
            return
        raise Forbidden(
            "this server answers no requests to this host name: ask it by localhost, or start it with "
            "--allowed-hosts and the name",
            code="host_not_allowed",
        )


def _plain(name: str) -> str:
    """A name or an address as it is compared."""
    return name.lower().strip("[]").removesuffix(".")


def _is_local(name: str) -> bool:
    """Whether the name, or the address without brackets, is this machine's own for everybody."""
    if name == LOCAL or name.endswith("." + LOCAL):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
