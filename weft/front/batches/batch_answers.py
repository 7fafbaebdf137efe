"""Requests and answers of /v1/files and /v1/batches, in OpenAI's form."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from weft.batch.files import FileRow
from weft.batch.lines import ENDPOINTS
from weft.batch.store import BatchRow
from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import Body, between

MOST_METADATA, MOST_NAME, MOST_VALUE = 16, 64, 512
"""Maximum number of pairs of metadata, and characters of a name and of a value."""
WINDOW = "24h"


class BatchRequest(Body, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None

    def check(self) -> None:
        """Raise InvalidRequest for an unknown endpoint, another window, or too much metadata."""
        if self.endpoint not in ENDPOINTS:
            raise InvalidRequest(f"endpoint must be {', '.join(ENDPOINTS)}", param="endpoint")
        if self.completion_window != WINDOW:
            raise InvalidRequest(f"completion_window must be {WINDOW}", param="completion_window")
        pairs = self.metadata or {}
        if len(pairs) > MOST_METADATA or any(
            len(name) > MOST_NAME or len(value) > MOST_VALUE for name, value in pairs.items()
        ):
            raise InvalidRequest(
                f"metadata may have {MOST_METADATA} pairs, with names of {MOST_NAME} and values of "
                f"{MOST_VALUE} characters",
                param="metadata",
            )


class FileUpload(msgspec.Struct, kw_only=True):
    """POST /v1/files, as multipart/form-data."""

    file: str
    purpose: Literal["batch"]


class FileObject(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchError(msgspec.Struct, kw_only=True):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, kw_only=True):
    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch. Times are seconds since 1970; null before the event."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str = WINDOW
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def file_object(row: FileRow) -> FileObject:
    """Return a file as an answer."""
    return FileObject(
        id=row.id,
        bytes=row.bytes,
        created_at=row.created,
        expires_at=row.expires,
        filename=row.name,
        purpose=row.purpose,
    )


def batch_object(row: BatchRow) -> BatchObject:
    """Return a batch as an answer. The files have ids after the end of the batch, if they have lines."""
    ended = row.status in ("completed", "expired", "cancelled")
    errors = [BatchError(**error) for error in row.errors]
    return BatchObject(
        id=row.id,
        endpoint=row.endpoint,
        errors=BatchErrors(data=errors) if errors else None,
        input_file_id=row.input,
        status=row.status,
        output_file_id=row.output if ended and row.output_end else None,
        error_file_id=row.error if ended and row.error_end else None,
        created_at=row.created,
        in_progress_at=row.times.get("in_progress"),
        expires_at=row.expires,
        finalizing_at=row.times.get("finalizing"),
        completed_at=row.times.get("completed"),
        failed_at=row.times.get("failed"),
        expired_at=row.times.get("expired"),
        cancelling_at=row.times.get("cancelling"),
        cancelled_at=row.times.get("cancelled"),
        request_counts=RequestCounts(total=row.total, completed=row.completed, failed=row.failed),
        metadata=row.metadata,
    )


def page(rows: list[Any], more: bool) -> dict[str, Any]:
    """Return the fields of a list: the objects, the first and the last id, and whether there are more."""
    return {
        "data": rows,
        "first_id": rows[0].id if rows else None,
        "last_id": rows[-1].id if rows else None,
        "has_more": more,
    }


def limit_of(given: str, most: int) -> int:
    """Return the query parameter ``limit``. Raises InvalidRequest."""
    if not (given.isascii() and given.isdecimal()):
        raise InvalidRequest(f"limit must be between 1 and {most}", param="limit")
    between("limit", int(given[:9]), 1, most)
    return int(given)
