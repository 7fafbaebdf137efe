"""Access control: host names, origins of web pages, sessions, API keys, the admin key, and limits per key.

Host names are checked against DNS rebinding: a web page can make its own host name resolve to 127.0.0.1.
Then a browser lets the page read answers of a server on the same machine. The Host header still has the
page's name, so a server for the local machine accepts only its own names.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b

from starlette.responses import Response
from starlette.types import Scope

from weft.common.errors import Forbidden, Overloaded, Unauthorized
from weft.front.http.rate_limit import RateLimits, RateRefused, RateRequest, Spent, duration, headers_of

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(?::\d{0,5})?")
"""Host name or address, with an optional port."""
ALL_HOSTS = "*"
LOCAL_HOST = "localhost"


class Hosts:
    """Accepted hosts of requests. Ports are ignored."""

    def __init__(self, bound: str, address: str, allowed: Iterable[str] = (), *, keys: bool = False) -> None:
        """``bound``, ``address``: listening host, as configured and as an address. ``allowed``: further
        names and addresses; * for all. ``keys``: requests need an API key, which a stranger's page does not
        have."""
        named = frozenset(_plain(name) for name in allowed)
        self._names = named | {_plain(bound), _plain(address)}
        # Without configured names, only a local server without keys needs the check.
        self._checks = ALL_HOSTS not in named and (bool(named) or (_is_local(_plain(address)) and not keys))

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
    if name == LOCAL_HOST or name.endswith("." + LOCAL_HOST):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


_NAMES = re.compile(rb"[A-Za-z0-9\-_, ]{1,1024}")
_EXPOSED = b"x-request-id, request-id, retry-after, "
_EXPOSED += b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, "
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


SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
"""Headers in order of priority."""
LONGEST_SESSION = 1024
"""Maximum characters of a name that count."""


def session_of(headers: Mapping[str, str], label: str = "") -> str:
    """Return a hash of the session's name and the client's key; "" without a name. The key prevents access
    to sessions of other keys. ``label``: name from the body, used if no header names a session."""
    name = next((headers[header] for header in SESSION_HEADERS if headers.get(header)), label)
    if not name:
        return ""
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    # The length separates key and name: different pairs never give the same bytes.
    data = f"{len(key)}:{key}{name[:LONGEST_SESSION]}".encode("utf-8", "surrogatepass")
    return blake2b(data, digest_size=16).hexdigest()


PROBES = frozenset({"/health", "/ping", "/live", "/ready"})
"""Paths for probes, which have no key and know the server by address. The answers contain only a state and
numbers of missing engine processes."""
OPEN_PATHS = PROBES | {"/"}
"""Paths without a key. The page at "/" holds no data of the server, and asks the user for a key."""
METRICS_PATHS = frozenset({"/metrics", "/metrics/history"})
"""Paths that ``--open-metrics`` opens."""
ADMIN_PATHS = frozenset(
    {
        "/abort_request",
        "/finish_weight_update",
        "/get_world_size",
        "/server_info",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weight_version",
        "/update_weights",
        "/weight_info",
        "/admin/cache/flush",
        "/admin/drain",
        "/admin/groups",
        "/admin/models",
        "/admin/models/load",
        "/admin/models/pin",
        "/admin/models/unload",
        "/admin/profile",
        "/admin/restart",
        "/admin/revive",
        "/admin/scale",
        "/is_paused",
        "/is_sleeping",
        "/pause",
        "/reset_prefix_cache",
        "/resume",
        "/sleep",
        "/wake_up",
    }
)
"""Paths that change the server or requests of other clients. Only with the admin key, and never from a page
of another origin."""
ADAPTER_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Paths that change the adapters for all clients. With the admin key, if the server has one."""
KEY = "weft.key"
"""Key of the request's scope for the number of the API key."""


REQUEST_ID = "weft.request_id"
"""Key of the request's scope for the id in the answer's header ``x-request-id``."""


def key_of(scope: Scope) -> int:
    """Return the number of the request's API key; 0 for a server without keys."""
    return int(scope.get(KEY, 0))


class ApiKeys:
    """API keys. A comparison takes the same time for every wrong key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, authorization: bytes | None, x_api_key: bytes | None = None) -> int | None:
        """Return the number of the given key (``Authorization: Bearer KEY`` or ``x-api-key: KEY``); None
        for a wrong or missing key; 0 for a server without keys. Keys are numbered from 0 in the given
        order.

        With both headers, only Authorization counts.
        """
        if not self._digests:
            return 0
        scheme = b"bearer"
        key = x_api_key or b""
        if authorization is not None:
            scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        found = None
        # Compare with every key, so that the time does not depend on the matching key.
        for number, digest in enumerate(self._digests):
            if hmac.compare_digest(digest, given):
                found = number
        return found if scheme.lower() == b"bearer" else None

    def salt_of(self, number: int, salt: str) -> str:
        """Return ``salt`` bound to the key of this number. The result cannot be derived without the key,
        and equal salts of two keys differ. All processes with the same keys return the same value."""
        if not self._digests:
            return salt
        return hmac.new(self._digests[number], b"cache salt" + salt.encode(), hashlib.sha256).hexdigest()

    def payer_of(self, number: int) -> str:
        """Return the name of the key of this number in records on disk: a hash that does not reveal the key.
        "" for a server without keys. All processes with the same keys return the same value."""
        if not self._digests:
            return ""
        return hmac.new(self._digests[number], b"payer", hashlib.sha256).hexdigest()[:32]

    def salts_of(self, salt: str) -> list[str]:
        """Return ``salt`` bound to each key."""
        return [self.salt_of(number, salt) for number in range(len(self._digests))]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AccessControl:
    """Decides on each request: key, origin and rate limits. Used from one event loop."""

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
        """``keys``: API keys; without any, all requests are allowed. ``admin_keys``: keys for
        ``ADMIN_PATHS``. ``origins``: see ``Origins``. ``limits``: limits of each key; None without.
        ``now``: the clock of ``limits``. ``open_metrics``: no key for ``METRICS_PATHS``."""
        self.open_paths = OPEN_PATHS | METRICS_PATHS if open_metrics else OPEN_PATHS
        """Paths without a key."""
        self.origins = Origins(origins)
        self._keys = ApiKeys(keys)
        self._admin_keys = ApiKeys(admin_keys)
        self._limits = limits
        self._now = now

    def admit(self, scope: Scope, headers: dict[bytes, bytes]) -> list[tuple[bytes, bytes]]:
        """Admit a request and return extra headers for the answer, with the rate limits of a POST. Stores
        the key's number in ``scope``, and takes one request from the key's limit. Raises Unauthorized for a
        missing or wrong key, Forbidden for a refused admin request, and RateLimited over a limit."""
        path = scope["path"]
        if path in self.open_paths:
            return []
        admin = path in ADMIN_PATHS or (path in ADAPTER_PATHS and bool(self._admin_keys))
        given = _authorization(headers, admin=admin), headers.get(b"x-api-key")
        if admin:
            self._admit_admin(given, headers)
            return []
        key = self._keys.find(*given)
        if key is None:
            raise Unauthorized(
                "the API key is missing or wrong; send it as Authorization: Bearer KEY, or as x-api-key: KEY"
            )
        scope[KEY] = key
        return [] if self._limits is None or scope["method"] != "POST" else self._limited(key)

    def salts_of(self, salt: str) -> list[str]:
        """Return ``salt`` as is, and bound to each key."""
        return [salt, *self._keys.salts_of(salt)]

    def salt_of(self, key: int, salt: str) -> str:
        """Return ``salt`` bound to a key, see ``ApiKeys.salt_of``. ``key``: see ``key_of``."""
        return self._keys.salt_of(key, salt)

    def payer_of(self, key: int) -> str:
        """Return the name of a key in records on disk, see ``ApiKeys.payer_of``."""
        return self._keys.payer_of(key)

    def spend(self, scope: Scope, tokens: int) -> None:
        """Take the tokens of an admitted request, after its end, from the key's limit."""
        if self._limits is not None and tokens:
            self._limits.on(Spent(key_of(scope), tokens), self._now())

    def _admit_admin(self, given: tuple[bytes | None, bytes | None], headers: dict[bytes, bytes]) -> None:
        """Raise Forbidden for a server without an admin key or for a page of another origin, and Unauthorized
        for a wrong key."""
        if not self._admin_keys:
            raise Forbidden("this route needs an admin key; start the server with --admin-key")
        if not _same_origin(headers):
            raise Forbidden("this route refuses requests of pages from other origins (the header Origin)")
        if self._admin_keys.find(*given) is None:
            raise Unauthorized("the admin key is missing or wrong; send it as Authorization: Bearer KEY")

    def _limited(self, key: int) -> list[tuple[bytes, bytes]]:
        """Take one request from the key's limit. Return the rate limit headers. Raises RateLimited over a
        limit."""
        assert self._limits is not None
        (verdict,) = self._limits.on(RateRequest(key), self._now())
        headers = headers_of(verdict)
        if isinstance(verdict, RateRefused):
            raise RateLimited(verdict.what, verdict.wait, headers)
        return headers


def _authorization(headers: Headers, *, admin: bool) -> bytes | None:
    """Return the header Authorization, with the keys of a URL as a bearer token.

    A client that takes only a URL sends the keys of ``http://API_KEY:ADMIN_KEY@host`` as Basic
    authentication. ``admin``: take the admin key.
    """
    given = headers.get(b"authorization")
    scheme, _, encoded = (given or b"").partition(b" ")
    # A browser adds the keys of a URL to requests of every page. Requests that change state have an Origin.
    if scheme.lower() != b"basic" or b"origin" in headers:
        return given
    try:
        user, _, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except binascii.Error:
        return given
    return b"Bearer " + (password if admin else user)


def _same_origin(headers: Headers) -> bool:
    """Return True for a request of this server's own page, or of a client that is no browser.

    Only browsers send Origin. The scheme is ignored, because a proxy may end TLS.
    """
    origin = headers.get(b"origin")
    return origin is None or origin.partition(b"://")[2].lower() == headers.get(b"host", b"").lower()


class RateLimited(Overloaded):
    """A key has used up a limit per minute."""

    code = "rate_limit_exceeded"

    def __init__(self, what: str, wait: float, headers: list[tuple[bytes, bytes]]) -> None:
        """``what``: the exhausted limit, "requests" or "tokens". ``wait``: seconds until another request is
        admitted. ``headers``: rate limit headers of the answer."""
        super().__init__(f"this key has used all its {what} per minute; try again in {duration(wait)}")
        self.wait = wait
        self.headers = headers
