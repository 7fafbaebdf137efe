"""Routes of /v1/files. An upload is written to the disk as it comes, and takes no memory of bodies."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from weft.batch.files import FileRow, IncomingFile
from weft.batch.lines import MOST_BYTES
from weft.common.errors import Cancelled, InvalidRequest, NotFound, Overloaded, RequestTimeout, TooLarge
from weft.common.log import get_logger
from weft.front.batches.batch_answers import (
    DeletedFile,
    FileList,
    FileObject,
    FileUpload,
    file_object,
    limit_of,
    page,
)
from weft.front.batches.multipart import MultipartParser, PartBegin, PartData, boundary_of
from weft.front.batches.service import BatchService, batches_of
from weft.front.http import openapi
from weft.front.http.access import key_of
from weft.front.http.answers import to_json
from weft.front.http.body import BODY_TIMEOUT, LEAST_RATE, STALL_TIMEOUT
from weft.front.http.streaming import JSON
from weft.front.requests.context import Front

log = get_logger(__name__)

MOST_LISTED = 10_000
MOST_FIELD = 4096
"""Maximum bytes of a field that is no file."""
MOST_FRAME = 1 << 20
"""Maximum bytes of a form besides the file."""
MOST_NAME = 255
"""Maximum characters of a file's name."""
WRITE = 1 << 20
"""Bytes of an upload that are written at once."""
MOST_UPLOADS, MOST_OF_KEY = 64, 16
"""Maximum number of uploads at once in one API server, and of one key."""
_EXPIRY = frozenset({"expires_after[anchor]", "expires_after[seconds]"})


def add_files(app: FastAPI, front: Front, service: BatchService | None) -> None:
    """Add the routes. ``service``: None for a server without batches, whose routes answer 404."""
    uploads: list[str] = []  # the owner of each upload that has begun

    @app.post("/v1/files", openapi_extra=_form())
    async def create_file(request: Request) -> Response:
        """Upload the lines of a batch: a form with the fields purpose (batch) and file."""
        batches = batches_of(service)
        front.lifecycle.check()
        owner = batches.owner(key_of(request.scope))
        if len(uploads) >= MOST_UPLOADS or uploads.count(owner) >= MOST_OF_KEY:
            raise Overloaded("too many uploads at once; try again later")
        uploads.append(owner)
        try:
            count, size = await batches.call(batches.files.load, owner)
            most = front.section.batch_max_files, batches.max_bytes
            if count >= most[0]:
                raise Overloaded(f"this key has {count} files (--batch-max-files); delete files")
            return _json(file_object(await _receive(request, batches, owner, most, most[1] - size)))
        finally:
            uploads.remove(owner)

    _add_stored(app, service)


def _add_stored(app: FastAPI, service: BatchService | None) -> None:
    @app.get("/v1/files", openapi_extra=openapi.returns(FileList, 400))
    async def list_files(
        request: Request,
        purpose: str | None = None,
        after: str | None = None,
        limit: str = "10000",
        order: str = "desc",
    ) -> Response:
        """List the files of the key."""
        batches = batches_of(service)
        if order not in ("asc", "desc"):
            raise InvalidRequest("order must be asc or desc", param="order")
        owner, most = batches.owner(key_of(request.scope)), limit_of(limit, MOST_LISTED)
        found = await batches.call(batches.files.list, owner, purpose, after, most, order == "desc")
        if found is None:
            raise InvalidRequest("after must be the id of a file", param="after")
        rows, more = found
        return _json(FileList(**page([file_object(row) for row in rows], more)))

    @app.get("/v1/files/{file_id}", openapi_extra=openapi.returns(FileObject))
    async def get_file(request: Request, file_id: str) -> Response:
        """Describe a file."""
        batches = batches_of(service)
        return _json(file_object(await file_of(batches, file_id, batches.owner(key_of(request.scope)))))

    @app.get("/v1/files/{file_id}/content", openapi_extra=_content())
    async def get_content(request: Request, file_id: str) -> Response:
        """Return the content of a file."""
        batches = batches_of(service)
        row = await file_of(batches, file_id, batches.owner(key_of(request.scope)))
        path = batches.files.path(row.id)
        try:
            found = await asyncio.to_thread(path.stat)
        except FileNotFoundError:
            raise NotFound("there is no such file", param="file_id") from None
        return Download(path, media_type="application/octet-stream", stat_result=found)

    @app.delete("/v1/files/{file_id}", openapi_extra=openapi.returns(DeletedFile, 400))
    async def delete_file(request: Request, file_id: str) -> Response:
        """Delete a file that no unfinished batch reads."""
        batches = batches_of(service)
        row = await file_of(batches, file_id, batches.owner(key_of(request.scope)))
        user = await batches.call(batches.files.delete, row.id)
        if user is not None:
            raise InvalidRequest(f"{user} reads this file; cancel the batch first", param="file_id")
        return _json(DeletedFile(id=row.id))


class Download(FileResponse):
    """Response with a file. A client that reads nothing for ``STALL_TIMEOUT`` seconds, or reads slower than
    ``LEAST_RATE``, loses the connection: each download holds a file and a connection."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file. At the deadline the answer is cut off, with a log line and without an exception."""
        loop = asyncio.get_running_loop()
        begun, size = loop.time(), 0

        async def timed(message: Message) -> None:
            # `send` waits while the client does not read. The rule is that of an upload.
            nonlocal size
            size += len(message.get("body", b""))
            due = begun + BODY_TIMEOUT + size / LEAST_RATE
            timeout.reschedule(min(due, loop.time() + STALL_TIMEOUT))
            await send(message)

        try:
            async with asyncio.timeout(STALL_TIMEOUT) as timeout:
                await super().__call__(scope, receive, timed)
        except TimeoutError:
            log.warning("a client did not read its file in time: connection closed")


async def file_of(batches: BatchService, file: str, owner: str, param: str = "file_id") -> FileRow:
    """Return a file of the owner. Raises NotFound."""
    found = await batches.call(batches.files.get, file, owner)
    if found is None:
        raise NotFound("there is no such file", param=param)
    return found


async def _receive(
    request: Request, batches: BatchService, owner: str, most: tuple[int, int], room: int
) -> FileRow:
    """Receive an upload, add its row and return it.

    ``most``: files and bytes that the key may have. ``room``: bytes that the key may add.

    Raises InvalidRequest for a wrong form, TooLarge, RequestTimeout for a slow upload, or Cancelled.
    """
    parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
    incoming = await batches.call(batches.files.incoming)
    form = _Form(batches, incoming, min(MOST_BYTES, room))
    loop = asyncio.get_running_loop()
    begun, size = loop.time(), 0
    try:
        async with asyncio.timeout(STALL_TIMEOUT) as timeout:
            async for chunk in request.stream():
                size += len(chunk)
                if size > form.most + MOST_FRAME:
                    raise form.too_large()
                await form.take(parser, chunk)
                # As for other bodies: a stall ends the upload, and so does a rate below the least.
                due = begun + BODY_TIMEOUT + size / LEAST_RATE
                timeout.reschedule(min(due, loop.time() + STALL_TIMEOUT))
        parser.finish()
        retention = form.check()
        await form.flush()
        return await batches.call(batches.files.keep, incoming, owner, form.name, retention, most)
    except TimeoutError:
        raise RequestTimeout("the body did not arrive in time") from None
    except ClientDisconnect:
        raise Cancelled("the client closed the connection") from None
    finally:
        if not form.kept:
            await asyncio.shield(batches.call(incoming.discard))


class _Form:
    """Fields and file of an upload."""

    def __init__(self, batches: BatchService, incoming: IncomingFile, most: int) -> None:
        self._batches, self._incoming, self.most = batches, incoming, most
        self._fields: dict[str, bytes] = {}
        self._part: PartBegin | None = None
        self._data = bytearray()
        self._size = 0
        self._files = 0
        self.name = ""
        self.kept = False

    async def take(self, parser: MultipartParser, chunk: bytes) -> None:
        """Take a piece of the body. Raises InvalidRequest or TooLarge."""
        for part in parser.feed(chunk):
            if isinstance(part, PartBegin):
                self._begin(part)
            elif isinstance(part, PartData) and self._part is not None:
                if self._part.name == "file":
                    self._data += part.data
                    self._size += len(part.data)
                else:
                    self._fields[self._part.name] += part.data
                    if len(self._fields[self._part.name]) > MOST_FIELD:
                        raise InvalidRequest(f"{self._part.name} is too long", param=self._part.name)
        if self._size > self.most:
            raise self.too_large()
        if len(self._data) >= WRITE:
            await self._write()

    def too_large(self) -> TooLarge:
        """Return the error of a file or a form with too many bytes."""
        return TooLarge(
            f"the file has more than {self.most} bytes: the limit is {MOST_BYTES} bytes per file, and "
            "--batch-max-bytes for all files of a key"
        )

    def _begin(self, part: PartBegin) -> None:
        self._part = part
        if part.name == "file":
            self._files += 1
            self.name = (part.file or "batch.jsonl")[:MOST_NAME]
        elif part.name == "purpose" or part.name in _EXPIRY:
            self._fields[part.name] = b""
        else:
            shown = "".join(c if c.isprintable() else "?" for c in part.name[:64])
            raise InvalidRequest(f"unknown parameter: {shown}", param=shown, code="unknown_parameter")

    async def _write(self) -> None:
        data, self._data = bytes(self._data), bytearray()
        await self._batches.call(self._incoming.write, data)

    async def flush(self) -> None:
        """Write the rest of the file. The file is kept from here on."""
        await self._write()
        self.kept = True

    def check(self) -> float | None:
        """Return the seconds of retention that the form asks for; None for the default. Raises
        InvalidRequest for a wrong form."""
        if self._fields.get("purpose") != b"batch":
            raise InvalidRequest("purpose must be batch", param="purpose")
        if self._files != 1:
            raise InvalidRequest("the form must have one field file", param="file")
        seconds = self._fields.get("expires_after[seconds]")
        if seconds is None:
            return None
        if not seconds.isdigit() or not 3600 <= int(seconds[:12]) <= 2_592_000:
            raise InvalidRequest(
                "expires_after[seconds] must be between 3600 and 2592000", param="expires_after[seconds]"
            )
        return float(int(seconds))


def _form() -> dict[str, Any]:
    """Return the OpenAPI parts of the upload."""
    made = openapi.answers_of(FileUpload, FileObject)
    schema = made["requestBody"]["content"].pop("application/json")["schema"]
    made["requestBody"]["content"]["multipart/form-data"] = {"schema": schema}
    return made


def _content() -> dict[str, Any]:
    """Return the OpenAPI parts of a file's content."""
    made = openapi.returns(FileObject)
    made["responses"]["200"]["content"] = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
    return made


def _json(value: Any) -> Response:
    return Response(to_json(value), media_type=JSON)
