"""Routes that need no generation: text to ids and back, and what operators ask of a server."""

from __future__ import annotations

import asyncio
import re

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from weft.common.errors import InvalidRequest, NotFound
from weft.common.log import get_logger
from weft.front import openapi
from weft.front.access import key_of
from weft.front.answers import to_json
from weft.front.body import read_json
from weft.front.context import Front
from weft.front.protocol.parse import Body, parse
from weft.front.streaming import JSON, within
from weft.front.tokenizing import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

log = get_logger(__name__)

MOST_PROFILE_S = 60.0
"""That a profile may take: it keeps every operation in memory."""
_ID = re.compile(r"[A-Za-z0-9_\-]{1,128}")


class AbortRequest(Body, frozen=True, kw_only=True):
    """POST /abort_request."""

    rid: str
    """The id of an answer, as its stream shows it; all of it."""

    def check(self) -> None:
        if not _ID.fullmatch(self.rid):
            raise InvalidRequest("rid must be the id of an answer", param="rid")


class ProfileRequest(Body, frozen=True, kw_only=True):
    """POST /admin/profile."""

    seconds: float = 5.0
    """That the profile takes; 0 ends one that runs."""

    def check(self) -> None:
        if not 0 <= self.seconds <= MOST_PROFILE_S:
            raise InvalidRequest(
                f"seconds must be at least 0 and at most {MOST_PROFILE_S:g}", param="seconds"
            )


class ReviveRequest(Body, frozen=True, kw_only=True):
    """POST /admin/revive."""

    group: str
    """The name of a group, or of one of its heads, as /metrics and the log have it."""


class Done(msgspec.Struct, kw_only=True):
    """What was asked for is under way."""

    status: str


def add_tokenizing(app: FastAPI, front: Front) -> None:
    """``/tokenize`` and ``/detokenize``."""

    @app.post("/tokenize", openapi_extra=openapi.answers_of(TokenizeRequest, Tokenized))
    async def tokenize(request: Request) -> Response:
        """The ids of a text, or of a conversation as the model is prompted with it."""
        return await _made(front, request, "tokenize")

    @app.post("/detokenize", openapi_extra=openapi.answers_of(DetokenizeRequest, Detokenized))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        return await _made(front, request, "detokenize")


def add_admin(app: FastAPI, front: Front) -> None:
    """What needs the admin key."""

    @app.post("/abort_request", openapi_extra=openapi.answers_of(AbortRequest, Done))
    async def abort_request(request: Request) -> Response:
        """Ends a request that is being answered; its choices end with "abort".

        404 where no request has exactly this id, or it has ended.
        """
        with front.bodies.upload() as upload:
            body = b"".join(await read_json(request, upload))
        if not await front.abort(parse(body, AbortRequest).rid):
            raise NotFound("no request with this id is being answered", param="rid")
        return Response(to_json(Done(status="aborted")), media_type=JSON)

    @app.post("/admin/drain", openapi_extra=openapi.returns(Done))
    async def drain(request: Request) -> Response:
        """Ends the server as SIGTERM does: it takes no more requests, and those that run may finish."""
        log.info("a drain was asked for")
        front.drain()
        return Response(to_json(Done(status="draining")), media_type=JSON)

    @app.post("/admin/revive", openapi_extra=openapi.answers_of(ReviveRequest, Done))
    async def revive(request: Request) -> Response:
        """Starts the retired heads of a group again, with a new budget of restarts.

        404 where no group has this name, 400 where none of its heads is retired.
        """
        with front.bodies.upload() as upload:
            asked = parse(b"".join(await read_json(request, upload)), ReviveRequest)
        names = ", ".join(front.links.revive(asked.group))
        log.info("a revival was asked for: of %s", names)
        return Response(to_json(Done(status=f"starting {names}")), media_type=JSON)

    @app.post("/admin/profile", openapi_extra=openapi.answers_of(ProfileRequest, Done))
    async def profile(request: Request) -> Response:
        """Has every head write a profile of its next steps into --profile-dir; the last request counts."""
        with front.bodies.upload() as upload:
            asked = parse(b"".join(await read_json(request, upload)), ProfileRequest)
        if front.config.runner.profile_dir is None:
            raise InvalidRequest("profiles need a folder: start the server with --profile-dir DIR")
        told = front.links.profile(asked.seconds)
        return Response(to_json(Done(status=f"asked {told} heads")), media_type=JSON)


async def _made(front: Front, request: Request, kind: str) -> Response:
    """An answer that no engine is needed for."""
    deadline = asyncio.get_running_loop().time() + front.section.request_timeout
    front.lifecycle.check()
    with front.bodies.upload() as upload:
        body = await read_json(request, upload)
        with front.lifecycle.request():
            async with within(deadline):
                made = await front.made(kind, body, key_of(request.scope))
    return Response(made, media_type=JSON)
