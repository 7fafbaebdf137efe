"""Accepted host names of the server, against DNS rebinding.

A web page can make its own host name resolve to 127.0.0.1. Then a browser lets the page read answers of a
server on the same machine. The Host header still has the page's name, so a server for the local machine
accepts only its own names.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from weft.common.errors import Forbidden

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{0,5})?")
"""Host name or address, with an optional port."""
ALL = "*"
LOCAL = "localhost"


class Hosts:
    """Accepted hosts of requests. Ports are ignored."""

    def __init__(self, bound: str, address: str, allowed: Iterable[str] = (), *, keys: bool = False) -> None:
        """``bound``, ``address``: listening host, as configured and as an address. ``allowed``: further
        names and addresses; * for all. ``keys``: requests need an API key, which a stranger's page does not
        have."""
        named = frozenset(_plain(name) for name in allowed)
        self._names = named | {_plain(bound), _plain(address)}
        # Without configured names, only a local server without keys needs the check.
        self._checks = ALL not in named and (bool(named) or (_is_local(_plain(address)) and not keys))

    def check(self, host: bytes | None) -> None:
        """Raise Forbidden for a request to another ``host``, the value of the Host header. Names of the
        local machine always pass. A request without the header passes, because every browser sends the
        header."""
        if not self._checks or host is None:
            return
        found = _HOST.fullmatch(host.decode("latin-1").strip())
        name = "" if found is None else _plain(found[1])
        if name and (name in self._names or _is_local(name)):
            return
        raise Forbidden(
            "this server does not accept this host name in the header Host: use localhost, or add the name "
            "to --allowed-hosts",
            code="host_not_allowed",
        )


def _plain(name: str) -> str:
    """Return a name or an address in comparable form."""
    return name.lower().strip("[]").removesuffix(".")


def _is_local(name: str) -> bool:
    """Return True if the name, or the address without brackets, always means the local machine."""
    if name == LOCAL or name.endswith("." + LOCAL):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
