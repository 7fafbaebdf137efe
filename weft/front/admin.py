"""Routes for the admin key that show and change the groups of a running server."""

from __future__ import annotations

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.log import get_logger
from weft.control.fleet.instances import InstanceState
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import Body
from weft.front.requests.context import Front
from weft.front.small_routes import Done, read_body

log = get_logger(__name__)


class ScaleRequest(Body, frozen=True, kw_only=True):
    """POST /admin/scale."""

    base: str
    """Name of the groups without their number, for instance decode."""
    groups: int
    """Wanted number of groups."""


class RestartRequest(Body, frozen=True, kw_only=True):
    """POST /admin/restart."""

    group: str = ""
    """Name of a group, or of one engine process; "" for all."""


class EngineStatus(msgspec.Struct, kw_only=True):
    """One engine process in the answer of GET /admin/groups."""

    name: str
    group: str
    base: str
    role: str
    state: str
    """State of the process: loading, running, draining, leaving, waiting (for a restart), retired, ended."""
    alive: bool
    """True if this API server can reach the engine."""
    incarnation: str = ""
    """Hexadecimal number of the process start; "" before the engine answers."""
    running: int | None = None
    """Sequences that the engine computes; null if unknown."""
    waiting: int | None = None
    """Sequences in the engine's queue; null if unknown."""
    kv_usage: float | None = None
    """Used part of the KV cache, 0 to 1; null if unknown."""


class GroupList(msgspec.Struct, kw_only=True):
    """Answer of GET /admin/groups."""

    engines: list[EngineStatus]


class Scaled(msgspec.Struct, kw_only=True):
    """Answer of POST /admin/scale."""

    status: str
    starting: tuple[str, ...]
    """Names of the engine processes that start."""
    leaving: tuple[str, ...]
    """Names of the engine processes that drain and end."""


def add_groups(app: FastAPI, front: Front) -> None:
    """Add the routes."""

    @app.get("/admin/groups", openapi_extra=openapi.returns(GroupList))
    async def groups() -> Response:
        """List the engine processes of all groups, with state and load."""
        return Response(to_json(GroupList(engines=_engines(front))), media_type=JSON)

    @app.post("/admin/scale", openapi_extra=openapi.answers_of(ScaleRequest, Scaled))
    async def scale(request: Request) -> Response:
        """Start or end groups until a base name has the wanted number of groups.

        New groups have the settings of the first group. Groups that end first finish their requests. 404 for
        an unknown name; 400 if the server could not serve requests any more; 503 without a free GPU.
        """
        asked = await read_body(front, request, ScaleRequest)
        change = front.links.scale(asked.base, asked.groups)
        parts = [
            f"{verb} {', '.join(names)}"
            for verb, names in (("starting", change.starting), ("draining", change.leaving))
            if names
        ]
        log.info("%d groups of %s requested over /admin/scale", asked.groups, asked.base)
        said = "; ".join(parts) or f"{asked.base} has {asked.groups} groups already"
        answer = Scaled(status=said, starting=change.starting, leaving=change.leaving)
        return Response(to_json(answer), media_type=JSON)

    @app.post("/admin/restart", openapi_extra=openapi.answers_of(RestartRequest, Done))
    async def restart(request: Request) -> Response:
        """Replace the engine processes of a group, or of all groups, in turn, without loss of a request.

        404 for an unknown group.
        """
        asked = await read_body(front, request, RestartRequest)
        names = ", ".join(front.links.restart(asked.group))
        log.info("restart of %s requested over /admin/restart", names)
        return Response(to_json(Done(status=f"restarting {names}")), media_type=JSON)


def _engines(front: Front) -> list[EngineStatus]:
    """Return the status of each member: the owner's knowledge, with the load that the engine reported."""
    instances = {one.name: one for one in front.links.instances}
    made = []
    for member in front.links.describe():
        one = instances.get(member.name)
        status = EngineStatus(**member._asdict(), alive=one is not None and one.alive)
        if status.state == "running" and one is not None and one.state is InstanceState.STARTING:
            status.state = "loading"
        if one is not None and one.alive:
            status.incarnation = f"{one.incarnation:x}"
            status.running, status.waiting = one.stats.running, one.stats.waiting
            status.kv_usage = float(one.stats.kv_usage)
        made.append(status)
    return made
