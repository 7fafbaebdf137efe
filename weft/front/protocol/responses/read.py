"""Readers for bodies of the Responses API.

Stored items are in the memory of the API server that got the request, but another process may read the
body. So the stored items travel before the body, on a separate line (``with_history``).
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import decode, make
from weft.front.protocol.responses.conversion import NAMES, History, conversation, packed
from weft.front.protocol.responses.protocol import ResponsesRequest, TokensRequest
from weft.front.protocol.turns import effort_shown, renamed

if TYPE_CHECKING:
    from weft.front.requests.reading import Job, Reader

NONE = b"{}\n"
"""Line of a request without references."""
_REFERS = (b'"previous_response_id"', b'"item_reference"')


class _Refers(msgspec.Struct):
    previous_response_id: Any = None
    input: msgspec.Raw = msgspec.Raw(b"null")


class _ReadItem(msgspec.Struct):
    type: Any = None
    id: Any = None


_Input = list[_ReadItem] | str | None


class Lookup(msgspec.Struct, frozen=True):
    """Ids of a stored response and of stored items, as named by a body."""

    previous: str | None
    items: list[str]


def references(body: Sequence[bytes]) -> Lookup:
    """Return the references of a body. Empty for an invalid body; the later read reports the error.

    Decodes only the needed fields: bodies may be large, and the decoder holds Python's lock.
    """
    joined = b"".join(body)
    if not any(word in joined for word in _REFERS):
        return Lookup(None, [])
    try:
        found = msgspec.json.decode(joined.removeprefix(codecs.BOM_UTF8), type=_Refers)
        # Decode the input only if the body mentions a reference.
        given = msgspec.json.decode(found.input, type=_Input) if _REFERS[1] in joined else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Lookup(None, [])
    items = given if isinstance(given, list) else []
    named = [item.id for item in items if item.type == "item_reference" and isinstance(item.id, str)]
    previous = found.previous_response_id
    return Lookup(previous if isinstance(previous, str) and previous else None, named)


def with_history(line: bytes, body: list[bytes]) -> list[bytes]:
    """Return the payload of a body and its stored items. ``line``: see ``line_of``."""
    return [line, *body]


def line_of(history: History) -> bytes:
    """Return the line with stored items, to be sent before the body."""
    return msgspec.json.encode(history) + b"\n"


def read_response(reader: Reader, payload: bytes) -> Job:
    """Read a request for a response. Raises WeftError."""
    return _read(reader, payload, ResponsesRequest)


def read_tokens(reader: Reader, payload: bytes) -> Job:
    """Read a request to count a prompt's tokens. The returned job must not be submitted. Raises WeftError."""
    return _read(reader, payload, TokensRequest)


def _read(reader: Reader, payload: bytes, kind: type[TokensRequest]) -> Job:
    """Return the job of a payload: a line with the history, then the body.

    Raises InvalidRequest or NotFound.
    """
    line, _, body = payload.partition(b"\n")
    history = msgspec.json.decode(line, type=History)
    asked = make(decode(body), kind)
    asked = reader.named(asked)
    try:
        made, facts = conversation(
            asked, history, system_inside=reader.system_inside, join_users=not reader.users_apart
        )
        made = msgspec.structs.replace(made, effort=effort_shown(made.effort, reader.text.chat))
        job = reader.converse(made, clip=True)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    return msgspec.structs.replace(job, facts=packed(facts))
