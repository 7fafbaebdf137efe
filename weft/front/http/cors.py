"""Requests of browsers from other origins: allowed origins, and answers to preflights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from starlette.responses import Response

_NAMES = re.compile(rb"[A-Za-z0-9\-_, ]{1,1024}")
_EXPOSED = b"x-request-id, retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
_EXPOSED += b"x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, "
_EXPOSED += b"x-ratelimit-reset-tokens"
Headers = Mapping[bytes, bytes]


class Origins:
    """Origins whose pages may read answers. Without any, browsers hide the answers from all other pages."""

    def __init__(self, allowed: Iterable[str]) -> None:
        """``allowed``: origins as sent by browsers (``https://example.org``), or ``*`` for all."""
        self._allowed = frozenset(origin.rstrip("/").encode() for origin in allowed)

    def headers(self, request: Headers) -> list[tuple[bytes, bytes]]:
        """Return the extra headers for an answer to ``request``: [] without allowed origins, ``Vary`` alone
        for a refused or missing origin."""
        if not self._allowed:
            return []
        origin = request.get(b"origin")
        if b"*" in self._allowed:
            granted = b"*"
        elif origin in self._allowed:
            assert origin is not None
            granted = origin
        else:
            return [(b"vary", b"Origin")]
        return [
            (b"access-control-allow-origin", granted),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"Origin"),
        ]

    def preflight(self, method: str, request: Headers, allow: str) -> Response | None:
        """Return the answer to a browser's preflight; None for another request or a refused origin."""
        wanted = request.get(b"access-control-request-method")
        if method != "OPTIONS" or wanted is None or len(self.headers(request)) < 2:
            return None
        names = request.get(b"access-control-request-headers", b"")
        granted = names if _NAMES.fullmatch(names) else b"authorization, content-type, x-api-key"
        headers = {
            "access-control-allow-methods": allow,
            "access-control-allow-headers": granted.decode(),
            "access-control-max-age": "600",
        }
        return Response(status_code=204, headers=headers)
