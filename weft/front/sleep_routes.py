"""Routes that put a server to sleep and wake the server up, with vLLM's names and parameters."""

from __future__ import annotations

import asyncio
from typing import get_args

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, Unavailable
from weft.front.admin import Done
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.requests.context import Front
from weft.front.requests.pausing import PauseMode
from weft.store.fixed_weights import PARTS, check_parts

MOST_TAGS = 8


class Sleeping(msgspec.Struct, kw_only=True):
    """Answer of GET /is_sleeping."""

    is_sleeping: bool


def add_sleep_routes(app: FastAPI, front: Front) -> None:
    """Add the routes."""

    @app.post("/sleep", openapi_extra=openapi.returns(Done, 400, 503, 504))
    async def sleep(request: Request) -> Response:
        """Pause the server as /pause does, and give memory back.

        ``?level=1`` (default) frees the KV caches with all prefixes. ``level=2`` also frees the weights,
        which /wake_up reads again. ``?mode=`` is the mode of /pause. The answer comes after the memory is
        free.
        """
        level, mode = _asked(request)
        models = front.pausing.models
        for model in models:
            model.weights.check_sleep(level)
            if level > 1 and (front.section.fronts > 1 or model.owner.shared):
                raise InvalidRequest(
                    "level 2 is not supported when several API servers share the engines: use level 1, or "
                    "start one API server (without --fronts)",
                    param="level",
                )
        await front.pausing.sleep(mode, level, front.section.request_timeout)
        pausing = front.pausing
        await asyncio.gather(*(model.weights.free(level, lambda: pausing.asleep) for model in models))
        return _json(Done(status="sleeping"))

    @app.post("/wake_up", openapi_extra=openapi.returns(Done, 400, 503))
    async def wake_up(request: Request) -> Response:
        """End a sleep. Waiting requests begin, and held requests continue.

        ``?tags=weights`` or ``?tags=kv_cache`` wakes one part, for an update between both. The server serves
        after the last part. After a sleep of level 2 without an update of all weights, the last part also
        reads the weights from before the sleep.
        """
        parts = _tags(request)
        if set(front.pausing.state.asleep) <= set(parts):
            await asyncio.gather(*(model.weights.restore() for model in front.pausing.models))
            if any(model.weights.freed for model in front.pausing.models):
                raise Unavailable("the server was put to sleep again meanwhile; try again")
        await front.pausing.wake(parts)
        return _json(Done(status="sleeping" if front.pausing.asleep else "awake"))

    @app.get("/is_sleeping", openapi_extra=openapi.returns(Sleeping))
    async def is_sleeping() -> Response:
        """Return True from a sleep until all parts are awake."""
        return _json(Sleeping(is_sleeping=front.pausing.asleep))


def _asked(request: Request) -> tuple[int, PauseMode]:
    """Return level and mode of the query of /sleep. Raises InvalidRequest."""
    given = dict(request.query_params)
    level, mode = given.pop("level", "1"), given.pop("mode", "abort")
    if given:
        raise InvalidRequest("/sleep takes only the query parameters level and mode", param=next(iter(given)))
    if level not in ("1", "2"):
        raise InvalidRequest("level must be 1 or 2; POST /pause keeps all memory", param="level")
    if mode not in get_args(PauseMode):
        raise InvalidRequest("mode must be abort, wait or keep", param="mode")
    return int(level), mode  # type: ignore[return-value]


def _tags(request: Request) -> tuple[str, ...]:
    """Return the parts of the query of /wake_up; all parts without tags. Raises InvalidRequest."""
    given = request.query_params.multi_items()
    if any(key != "tags" for key, _ in given) or len(given) > MOST_TAGS:
        raise InvalidRequest(f"/wake_up takes only the query parameter tags, at most {MOST_TAGS} times")
    tags = [tag for _, value in given for tag in value.split(",")]
    check_parts(tags)
    return tuple(tags) or PARTS


def _json(answer: msgspec.Struct) -> Response:
    return Response(to_json(answer), media_type=JSON)
