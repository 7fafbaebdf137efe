"""The route that empties the KV cache, in memory and on disk."""

from __future__ import annotations

from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest
from weft.common.log import get_logger
from weft.front.admin import Acted, read_body
from weft.front.http import openapi
from weft.front.http.access import session_of
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.context import Front
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)


class FlushRequest(Body, frozen=True, kw_only=True):
    """POST /admin/cache/flush. Exactly one of ``all``, ``salt`` and ``session``."""

    all: bool = False
    """Remove every block of the folder, also of other models and servers."""
    salt: str | None = None
    """Remove the blocks of requests with this cache_salt, of every API key."""
    session: str | None = None
    """Remove the blocks of requests with this session (x-session-id or prompt_cache_key)."""
    authorization: str = ""
    """With ``session``: the header Authorization of the session's requests; "" if they send none."""

    def check(self) -> None:
        """Raise InvalidRequest unless exactly one of ``all``, ``salt`` and ``session`` is set."""
        if self.all + (self.salt is not None) + (self.session is not None) != 1:
            raise InvalidRequest('give exactly one of "all": true, salt and session', param="all")
        if self.authorization and self.session is None:
            raise InvalidRequest("authorization has an effect with session only", param="authorization")


def add_tier_routes(app: FastAPI, front: Front) -> None:
    """Add the route that empties the KV cache."""

    @app.post("/admin/cache/flush", openapi_extra=openapi.answers_of(FlushRequest, Acted))
    async def flush(request: Request) -> Response:
        """Empty the prefix cache in memory, and remove blocks from the KV tier: disk and host memory.

        The engines act after the answer. 400 if no engine process has a KV tier.
        """
        asked = await read_body(front, request, FlushRequest)
        asked.check()
        links = [front.links] if front.several is None else [one.links for one in front.several.fronts]
        engines = [
            (own, one.name)
            for own in links
            for one in own.instances
            if one.alive and one.stats.tier is not None
        ]
        if not engines:
            raise InvalidRequest(
                "no engine process has a KV tier: start the server with --kv-disk, --kv-remote or --kv-host"
            )
        for message in _messages(front, asked):
            for own, name in engines:
                own.tell(name, message)
        log.info("a flush of the KV cache was requested over /admin/cache/flush")
        acted = Acted(status="flush requested", engines=tuple(name for _, name in engines))
        return Response(to_json(acted), media_type=JSON)


def _messages(front: Front, asked: FlushRequest) -> list[FlushTier]:
    """Return the messages to every engine process."""
    if asked.session is not None:
        headers = {"authorization": asked.authorization} if asked.authorization else {}
        return [FlushTier(session=session_of(headers, asked.session))]
    if asked.salt is not None:
        return [FlushTier(salt=salt) for salt in front.access.salts_of(asked.salt)]
    return [FlushTier()]
