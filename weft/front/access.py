"""Who may ask a server for what, and how often: API keys, the admin key, other origins, limits of a key."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from starlette.types import Scope

from weft.common.errors import Forbidden, Overloaded, Unauthorized
from weft.front.cors import Origins
from weft.front.rate_limit import Asked, RateLimits, Refused, Spent, duration, headers_of

PROBES = frozenset({"/health", "/ping", "/live", "/ready"})
"""Machinery asks these, which holds no key and knows the server by an address. They tell only a state."""
OPEN_PATHS = PROBES | {"/"}
"""Paths that need no key. The page at "/" holds nothing of the server, and asks its reader for a key."""
ADMIN_PATHS = frozenset({"/abort_request", "/admin/drain", "/admin/profile", "/admin/revive"})
"""What changes the server or other clients' requests: with the admin key alone, and never for a browser."""
KEY = "weft.key"
"""Under which a request's scope has the number of its API key."""


REQUEST_ID = "weft.request_id"
"""Under which a request's scope has the id of its answer's header ``x-request-id``."""


def key_of(scope: Scope) -> int:
    """The number of the API key that a request came with; 0 where none is needed."""
    return int(scope.get(KEY, 0))


class ApiKeys:
    """The keys that open the API. Comparing takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: bytes | None, x_api_key: bytes | None = None) -> int | None:
        """The number of the key that came (``Authorization: Bearer KEY`` or ``x-api-key: KEY``); None for a
        wrong one. 0 where none is needed.

        Where both headers came, Authorization alone counts.
        """
        if not self._digests:
            return 0
        scheme = b"bearer"
        key = x_api_key or b""
        if authorization is not None:
            scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        found = None
        for number, digest in enumerate(self._digests):
            if hmac.compare_digest(digest, given):
                found = number
        return found if scheme.lower() == b"bearer" else None

    def salt_of(self, number: int, salt: str) -> str:
        """``salt`` as requests of the key with this number have it: nobody without the key can derive it, and
        equal names of two keys differ. All processes with the same keys derive the same one.
        """
        if not self._digests:
            return salt
        return hmac.new(self._digests[number], b"cache salt" + salt.encode(), hashlib.sha256).hexdigest()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AccessControl:
    """Who may ask for what, and how often. Used from one event loop."""

    def __init__(
        self,
        keys: Iterable[str],
        admin_keys: Iterable[str],
        origins: Iterable[str],
        limits: RateLimits | None,
        now: Callable[[], float],
        *,
        open_metrics: bool = False,
    ) -> None:
        """``origins``: see ``Origins``. ``now``: the clock of ``limits``. ``open_metrics``: no key for
        ``/metrics``.
        """
        self.open_paths = OPEN_PATHS | {"/metrics"} if open_metrics else OPEN_PATHS
        """Paths that need no key."""
        self.origins = Origins(origins)
        self._keys = ApiKeys(keys)
        self._admin_keys = ApiKeys(admin_keys)
        self._limits = limits
        self._now = now

    def admit(self, scope: Scope, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Lets a request in, or raises WeftError; what the answer's head has more for it."""
        path = scope["path"]
        if path in self.open_paths:
            return []
        given = headers.get(b"authorization"), headers.get(b"x-api-key")
        if path in ADMIN_PATHS:
            self._admit_admin(given, headers)
            return []
        key = self._keys.find(*given)
        if key is None:
            raise Unauthorized(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            )
        scope[KEY] = key
        return [] if self._limits is None or scope["method"] != "POST" else self._limited(key)

    def salt_of(self, key: int, salt: str) -> str:
        """See ``ApiKeys.salt_of``. ``key``: see ``key_of``."""
        return self._keys.salt_of(key, salt)

    def spend(self, scope: Scope, tokens: int) -> None:
        """Counts the tokens of a request that was let in."""
        if self._limits is not None and tokens:
            self._limits.on(Spent(key_of(scope), tokens), self._now())

    def _admit_admin(self, given: tuple[bytes | None, bytes | None], headers: dict[bytes, bytes]) -> None:
        if not self._admin_keys:
            raise Forbidden("this route needs an admin key; start the server with --admin-key")
        if b"origin" in headers:
            raise Forbidden("this route is not for browsers")
        if self._admin_keys.find(*given) is None:
            raise Unauthorized("the admin key is missing or wrong; send it as Authorization: Bearer KEY")

    def _limited(self, key: int) -> list[tuple[bytes, bytes]]:
        assert self._limits is not None
        (verdict,) = self._limits.on(Asked(key), self._now())
        headers = headers_of(verdict)
        if isinstance(verdict, Refused):
            raise RateLimited(verdict.what, verdict.wait, headers)
        return headers


class RateLimited(Overloaded):
    """A key has used what it may a minute."""

    code = "rate_limit_exceeded"

    def __init__(self, what: str, wait: float, headers: list[tuple[bytes, bytes]]) -> None:
        super().__init__(f"this key's {what} a minute are used up; try again in {duration(wait)}")
        self.wait = wait
        self.headers = headers
