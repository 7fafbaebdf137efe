"""Routes without generation: tokenizing, and requests of operators."""

from __future__ import annotations

import asyncio
import re

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, NotFound
from weft.common.log import get_logger
from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.answers import to_json
from weft.front.http.body import read_json
from weft.front.http.streaming import JSON, within
from weft.front.protocol.parse import B, Body, parse
from weft.front.requests.context import Front
from weft.front.requests.tokenizing import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

log = get_logger(__name__)

MOST_PROFILE_S = 60.0
"""Maximum seconds of a profile. A profile keeps every operation in memory."""
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

    def check(self) -> None:
        """Raise InvalidRequest for an empty name, which must not drain the whole server."""
        if not self.group:
            raise InvalidRequest("group must be the name of a group", param="group")


class ReviveRequest(Body, frozen=True, kw_only=True):
    """POST /admin/revive."""

    group: str
    """Name of a group, or of one of its engine processes, as in /metrics and in the log."""


class Done(msgspec.Struct, kw_only=True):
    """The requested action is under way."""

    status: str


def add_tokenizing(app: FastAPI, front: Front) -> None:
    """Add ``/tokenize`` and ``/detokenize``."""

    @app.post("/tokenize", openapi_extra=openapi.answers_of(TokenizeRequest, Tokenized))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text, or of a conversation's prompt."""
        return await made(front, request, "tokenize")

    @app.post("/detokenize", openapi_extra=openapi.answers_of(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await made(front, request, "detokenize")


def add_admin(app: FastAPI, front: Front) -> None:
    """Add the routes for the admin key."""

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
            names = ", ".join(front.links.remove(asked.group))
            log.info("drain of %s requested over /admin/drain", names)
            return Response(to_json(Done(status=f"draining {names}")), media_type=JSON)
        log.info("drain requested over /admin/drain")
        front.drain()
        return Response(to_json(Done(status="draining")), media_type=JSON)

    @app.post("/admin/revive", openapi_extra=openapi.answers_of(ReviveRequest, Done))
    async def revive(request: Request) -> Response:
        """Start the retired engine processes of a group again, with a new budget of restarts.

        404 for an unknown group; 400 for a group without retired engine processes.
        """
        asked = await read_body(front, request, ReviveRequest)
        names = ", ".join(front.links.revive(asked.group))
        log.info("revival of %s requested over /admin/revive", names)
        return Response(to_json(Done(status=f"starting {names}")), media_type=JSON)

    @app.post("/admin/profile", openapi_extra=openapi.answers_of(ProfileRequest, Done))
    async def profile(request: Request) -> Response:
        """Profile the next steps of every engine process into --profile-dir. The last request counts.

        400 if the server was started without --profile-dir.
        """
        asked = await read_body(front, request, ProfileRequest)
        if front.config.runner.profile_dir is None:
            raise InvalidRequest("profiles need a directory: start the server with --profile-dir DIR")
        told = front.links.profile(asked.seconds)
        return Response(to_json(Done(status=f"requested from {told} engines")), media_type=JSON)


async def read_body(front: Front, request: Request, kind: type[B]) -> B:
    """Return the small JSON body of a request as ``kind``. Raises as ``read_json`` and ``parse`` do."""
    with front.bodies.upload() as upload:
        return parse(b"".join(await read_json(request, upload)), kind)


async def made(front: Front, request: Request, kind: str) -> Response:
    """Return an answer made without the engine. ``kind``: one of ``MADE``. Raises WeftError, also when the
    server takes no requests or ``request_timeout`` passes."""
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    front.lifecycle.check()
    with front.bodies.upload() as upload:
        body = await read_json(request, upload)
        with front.lifecycle.request():
            async with within(deadline):
                answer = await front.made(kind, body, key_of(request.scope))
    return Response(answer, media_type=JSON)
