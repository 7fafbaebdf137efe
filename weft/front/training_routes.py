"""Routes for training loops: pause and resume the server, and empty the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import get_args

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, Unavailable
from weft.common.log import get_logger
from weft.control.fleet.instances import Instance
from weft.control.links.links import Links
from weft.front.admin import Done, chosen, read_body
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.context import Front
from weft.front.requests.pausing import PauseMode
from weft.types.messages import TIER_SINCE, common_version
from weft.types.tier_flush import FlushTier

log = get_logger(__name__)

ANSWER_S = 10.0
"""Maximum seconds for the answers of the engine processes."""


class ResetRequest(Body, frozen=True, kw_only=True):
    """POST /reset_prefix_cache with a body."""

    disk: bool = False
    """True: also remove every block of the KV disk tier, also of other models and servers."""
    model: str = ""
    """Name of the model, in a server of several models; "" for all loaded models."""


class Paused(msgspec.Struct, kw_only=True):
    """Answer of GET /is_paused."""

    is_paused: bool


class Reset(msgspec.Struct, kw_only=True):
    """Answer of POST /reset_prefix_cache."""

    status: str
    blocks: int
    """Blocks removed from the prefix caches of all engine processes."""


def add_training_routes(app: FastAPI, front: Front) -> None:
    """Add the routes."""

    @app.post("/pause", openapi_extra=openapi.returns(Done, 400, 503, 504))
    async def pause(request: Request) -> Response:
        """Generate no tokens until /resume. New requests wait until then.

        ``?mode=abort`` (default) ends the requests of the server with finish reason "abort". ``wait`` lets
        begun requests finish. ``keep`` holds begun requests: they continue after /resume with the same
        tokens. The answer comes when no request generates. ``?clear_cache=false`` keeps the prefix cache.
        """
        mode, clear = _asked(request)
        await front.pausing.pause(mode, front.section.request_timeout)
        if clear:
            await _reset(_models(front, ""), disk=False)
        return _json(Done(status="paused"))

    @app.post("/resume", openapi_extra=openapi.returns(Done, 503))
    async def resume() -> Response:
        """End a pause. Waiting requests begin, and held requests continue."""
        await front.pausing.resume()
        return _json(Done(status="resumed"))

    @app.get("/is_paused", openapi_extra=openapi.returns(Paused))
    async def is_paused() -> Response:
        """Return True from a pause until the resume."""
        return _json(Paused(is_paused=front.pausing.paused))

    @app.post("/reset_prefix_cache", openapi_extra=openapi.answers_of(ResetRequest, Reset))
    async def reset_prefix_cache(request: Request) -> Response:
        """Empty the prefix caches of all engine processes. Running requests go on. The body is optional.

        503 if an engine process does not answer in time.
        """
        if request.query_params:
            raise InvalidRequest("this route takes no query parameters; send a JSON body")
        headers, asked = request.headers, ResetRequest()
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            asked = await read_body(front, request, ResetRequest)
        blocks = await _reset(_models(front, asked.model), asked.disk)
        log.info("the prefix cache was emptied over /reset_prefix_cache: %d blocks", blocks)
        return _json(Reset(status="reset", blocks=blocks))


def _json(answer: msgspec.Struct) -> Response:
    return Response(to_json(answer), media_type=JSON)


def _asked(request: Request) -> tuple[PauseMode, bool]:
    """Return mode and ``clear_cache`` of the query of /pause. Raises InvalidRequest."""
    given = dict(request.query_params)
    mode, clear = given.pop("mode", "abort"), given.pop("clear_cache", "true").lower()
    if given:
        raise InvalidRequest(
            "/pause takes only the query parameters mode and clear_cache", param=next(iter(given))
        )
    if mode not in get_args(PauseMode):
        raise InvalidRequest("mode must be abort, wait or keep", param="mode")
    if clear not in ("true", "false", "1", "0"):
        raise InvalidRequest("clear_cache must be true or false", param="clear_cache")
    return mode, clear in ("true", "1")  # type: ignore[return-value]


def _models(front: Front, model: str) -> list[Links]:
    """Return the links of the named model, or of all loaded models. Raises the errors of ``chosen``."""
    if front.several is not None and not model:
        return [one.links for one in front.several.loaded]
    return [chosen(front, model).links]


async def _reset(all_links: Sequence[Links], disk: bool) -> int:
    """Empty the prefix caches, and return the number of blocks. Raises Unavailable."""
    return sum(await asyncio.gather(*(reset_prefixes(links, disk) for links in all_links)))


async def reset_prefixes(links: Links, disk: bool) -> int:
    """Empty the prefix caches of the engine processes of one model, and return the number of blocks.

    An engine process that restarts during the call has an empty cache, and counts no blocks. Raises
    Unavailable if an engine process does not answer in ``ANSWER_S`` seconds, or runs an earlier release that
    cannot empty its cache. Raises EngineDead.
    """
    await links.stats(ANSWER_S)
    before = {one.name: one.stats for one in links.instances if _computes(one)}
    incarnations = {one.name: one.incarnation for one in links.instances}
    links.flush(FlushTier(disk=disk))

    def asked() -> list[Instance]:
        """Return the engine processes that were alive at the flush and still are."""
        same = (one for one in links.instances if one.incarnation == incarnations.get(one.name))
        return [one for one in same if _computes(one) and one.name in before]

    deadline = asyncio.get_running_loop().time() + ANSWER_S
    while any(one.stats.prefix_resets <= before[one.name].prefix_resets for one in asked()):
        if asyncio.get_running_loop().time() > deadline:
            raise Unavailable("an engine process did not empty its prefix cache in time; try again")
        await links.stats(ANSWER_S)
    return sum(one.stats.forgotten_blocks - before[one.name].forgotten_blocks for one in asked())


def _computes(instance: Instance) -> bool:
    """Return True for a live engine process with a prefix cache. Raises Unavailable for an old release."""
    if not instance.alive or instance.role == "encode":
        return False
    if instance.welcome is None or (common_version(instance.welcome.versions) or 0) < TIER_SINCE:
        raise Unavailable(
            f"the engine {instance.name} runs an earlier release, which cannot empty its prefix cache; "
            "restart the engine with the release of this server"
        )
    return True
