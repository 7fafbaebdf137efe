"""Routes for the admin key: drain, abort and profile a running server, and show and change its groups."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, NotFound
from weft.common.log import get_logger
from weft.control.fleet.instances import InstanceState
from weft.front.http import openapi
from weft.front.http.answers import to_json
from weft.front.http.body import read_json
from weft.front.http.streaming import JSON
from weft.front.protocol.parse import B, Body, parse
from weft.front.requests.context import Front

log = get_logger(__name__)

MOST_PROFILE_S = 60.0
"""Maximum seconds of a profile. A profile keeps every operation in memory."""
MOST_TOPOLOGY = 48 << 10
"""Maximum bytes of a topology: a message between processes has a limit (``channel.MOST_BYTES``)."""
_ID = re.compile(r"[A-Za-z0-9_\-]{1,128}")


class AbortRequest(Body, frozen=True, kw_only=True):
    """POST /abort_request."""

    rid: str
    """Full id of an answer, as shown in its stream."""

    def check(self) -> None:
        """Raise InvalidRequest unless ``rid`` has the form of an id."""
        if not _ID.fullmatch(self.rid):
            raise InvalidRequest(
                "rid must be the id of an answer, as shown in the answer's field id", param="rid"
            )


class ProfileRequest(Body, frozen=True, kw_only=True):
    """POST /admin/profile."""

    seconds: float = 5.0
    """Seconds of the profile; 0 ends a running profile."""

    def check(self) -> None:
        if not 0 <= self.seconds <= MOST_PROFILE_S:
            raise InvalidRequest(f"seconds must be between 0 and {MOST_PROFILE_S:g}", param="seconds")


class DrainRequest(Body, frozen=True, kw_only=True):
    """POST /admin/drain with a body."""

    group: str
    """Name of the group, or of one engine process, that drains and ends."""
    model: str = ""
    """Name of the model of the group, in a server of several models."""

    def check(self) -> None:
        """Raise InvalidRequest for an empty name, which must not drain the whole server."""
        if not self.group:
            raise InvalidRequest("group must be the name of a group", param="group")


class ReviveRequest(Body, frozen=True, kw_only=True):
    """POST /admin/revive."""

    group: str
    """Name of a group, or of one of its engine processes, as in /metrics and in the log."""
    model: str = ""
    """Name of the model of the group, in a server of several models."""


class ScaleRequest(Body, frozen=True, kw_only=True):
    """POST /admin/scale."""

    base: str
    """Name of the groups without their number, for instance decode."""
    groups: int
    """Wanted number of groups."""
    model: str = ""
    """Name of the model of the groups, in a server of several models."""


class RestartRequest(Body, frozen=True, kw_only=True):
    """POST /admin/restart."""

    group: str = ""
    """Name of a group, or of one engine process; "" for all."""
    topology: str = ""
    """Text of a topology file with new settings for the groups; "" keeps the settings. At most 48 KiB."""
    model: str = ""
    """Name of the model of the group, in a server of several models."""

    def check(self) -> None:
        """Raise InvalidRequest for a topology that is too large for a message between processes."""
        if len(self.topology.encode()) > MOST_TOPOLOGY:
            raise InvalidRequest(f"topology has more than {MOST_TOPOLOGY} bytes", param="topology")


class EngineStatus(msgspec.Struct, kw_only=True):
    """One engine process in the answer of GET /admin/groups."""

    name: str
    group: str
    base: str
    role: str
    state: str
    """State of the process: loading, running, draining, leaving, waiting (for a restart), retired, ended."""
    model: str | msgspec.UnsetType = msgspec.UNSET
    """Name of the model, in a server of several models."""
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
    starts: int = 0
    """Number of processes that were started under the name so far."""
    failure: str = ""
    """Reason of the last unexpected end of a process; "" without such an end."""


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
    returning: tuple[str, ...]
    """Names of the engine processes that drained for an earlier request, and stay."""


class Acted(msgspec.Struct, kw_only=True):
    """The requested action on engine processes is under way."""

    status: str
    engines: tuple[str, ...]
    """Names of the engine processes."""


class Done(msgspec.Struct, kw_only=True):
    """The requested action is under way."""

    status: str


def add_admin(app: FastAPI, front: Front) -> None:
    """Add the routes that act on requests and on the whole server, and the routes of groups."""

    @app.post("/abort_request", openapi_extra=openapi.answers_of(AbortRequest, Done))
    async def abort_request(request: Request) -> Response:
        """End a running request; its choices end with "abort".

        404 if no running request has exactly this id.
        """
        asked = await read_body(front, request, AbortRequest)
        if not await front.abort(asked.rid):
            raise NotFound("no running request has this rid", param="rid")
        return Response(to_json(Done(status="aborted")), media_type=JSON)

    @app.post("/admin/drain", openapi_extra=openapi.answers_of(DrainRequest, Done))
    async def drain(request: Request) -> Response:
        """Drain and end the server, as SIGTERM does: new requests are refused, and running requests may
        finish. With ``group`` in the body: drain and end one group; the server goes on.

        404 for an unknown group; 400 if the server could not serve requests without the group.
        """
        headers = request.headers
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            asked = await read_body(front, request, DrainRequest)
            return _acted("draining", await chosen(front, asked.model).links.remove(asked.group), "drain")
        log.info("drain requested over /admin/drain")
        front.drain()
        return Response(to_json(Done(status="draining")), media_type=JSON)

    @app.post("/admin/profile", openapi_extra=openapi.answers_of(ProfileRequest, Done))
    async def profile(request: Request) -> Response:
        """Profile the next steps of every engine process into --profile-dir. The last request counts.

        400 if the server was started without --profile-dir.
        """
        asked = await read_body(front, request, ProfileRequest)
        fronts = [front] if front.several is None else front.several.fronts
        able = [one for one in fronts if one.config.runner.profile_dir is not None]
        if not able:
            raise InvalidRequest("profiles need a directory: start the server with --profile-dir DIR")
        count = sum(one.links.profile(asked.seconds) for one in able)
        return Response(to_json(Done(status=f"requested from {count} engines")), media_type=JSON)

    _add_groups(app, front)


def _add_groups(app: FastAPI, front: Front) -> None:
    """Add the routes of groups."""

    @app.get("/admin/groups", openapi_extra=openapi.returns(GroupList))
    async def groups() -> Response:
        """List the engine processes of all groups, with state and load."""
        return Response(to_json(GroupList(engines=_all_engines(front))), media_type=JSON)

    @app.post("/admin/scale", openapi_extra=openapi.answers_of(ScaleRequest, Scaled))
    async def scale(request: Request) -> Response:
        """Start or end groups until a base name has the wanted number of groups.

        Groups that drain for an earlier request stay before new groups start. New groups have the settings of
        the first group. Groups that end first finish their requests. 404 for an unknown name; 400 if the
        server could not serve requests any more; 503 without a free GPU, and while groups get new settings.
        """
        asked = await read_body(front, request, ScaleRequest)
        change = await chosen(front, asked.model).links.scale(asked.base, asked.groups)
        parts = [
            f"{verb} {', '.join(names)}"
            for verb, names in (
                ("starting", change.starting),
                ("taking back", change.returning),
                ("draining", change.leaving),
            )
            if names
        ]
        log.info("%d groups of %s requested over /admin/scale", asked.groups, asked.base)
        said = "; ".join(parts) or f"{asked.base} has {asked.groups} groups already"
        return Response(to_json(Scaled(status=said, **change._asdict())), media_type=JSON)

    @app.post("/admin/restart", openapi_extra=openapi.answers_of(RestartRequest, Acted))
    async def restart(request: Request) -> Response:
        """Replace the engine processes of a group, or of all groups, in turn, without loss of a request.

        404 for an unknown group; 400 if no engine process of the group runs, and for a topology that cannot
        be used.
        """
        asked = await read_body(front, request, RestartRequest)
        asked.check()
        names = await chosen(front, asked.model).links.restart(asked.group, asked.topology)
        return _acted("restarting", names, "restart")

    @app.post("/admin/revive", openapi_extra=openapi.answers_of(ReviveRequest, Acted))
    async def revive(request: Request) -> Response:
        """Start the retired engine processes of a group again, with a new budget of restarts.

        404 for an unknown group; 400 for a group without retired engine processes.
        """
        asked = await read_body(front, request, ReviveRequest)
        return _acted("starting", await chosen(front, asked.model).links.revive(asked.group), "revival")


def _acted(verb: str, engines: Iterable[str], noun: str) -> Response:
    """Return the answer after the owner has begun to act on ``engines``, and log the request."""
    names = tuple(engines)
    log.info("%s of %s requested by an operator", noun, ", ".join(names))
    return Response(to_json(Acted(status=f"{verb} {', '.join(names)}", engines=names)), media_type=JSON)


async def read_body(front: Front, request: Request, kind: type[B]) -> B:
    """Return the small JSON body of a request as ``kind``. Raises as ``read_json`` and ``parse`` do."""
    with front.bodies.upload() as upload:
        return parse(b"".join(await read_json(request, upload)), kind)


def chosen(front: Front, model: str) -> Front:
    """Return the front of the model that an operator names. Raises the errors of
    ``SeveralModels.front_of``."""
    if front.several is not None:
        return front.several.front_of(model)
    if model:
        front.check_model(model)
    return front


def _all_engines(front: Front) -> list[EngineStatus]:
    """Return the status of each member of each loaded model."""
    if front.several is None:
        return _engines(front)
    made = []
    for one in front.several.fronts:
        for status in _engines(one):
            status.model = one.names[0]
            made.append(status)
    return made


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
