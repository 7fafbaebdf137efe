"""Reads bodies of the Responses API.

What a request refers to is in the memory of the front that it came to: it travels before the body, in a line
of its own (``with_history``), because bodies may be read in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.parse import decode, make
from weft.front.responses.conversion import NAMES, History, conversation, reference_of
from weft.front.responses.protocol import ResponsesRequest, TokensRequest
from weft.front.turns import effort_shown, renamed

if TYPE_CHECKING:
    from weft.front.reading import Job, Reader

_NONE = b"{}\n"
_REFERS = (b'"previous_response_id"', b'"item_reference"')


class _Refers(msgspec.Struct):
    previous_response_id: Any = None
    input: Any = None


class Lookup(msgspec.Struct, frozen=True):
    """What a body refers to."""

    previous: str | None
    items: list[str]


def references(body: bytes) -> Lookup:
    """What is to be looked up for a request. Nothing for a body that is none: reading it tells why."""
    try:
        found = msgspec.json.decode(body, type=_Refers)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Lookup(None, [])
    previous = found.previous_response_id
    items = []
    for item in found.input if isinstance(found.input, list) else ():
        try:
            reference = reference_of(item) if isinstance(item, dict) else None
        except InvalidRequest:
            continue
        if reference is not None:
            items.append(reference)
    return Lookup(previous if isinstance(previous, str) else None, items)


def may_refer(body: Sequence[bytes]) -> bool:
    """Whether it is worth to look for references."""
    joined = b"".join(body)
    return any(word in joined for word in _REFERS)


def with_history(history: History | None, body: list[bytes]) -> list[bytes]:
    """The payload of a body and what it refers to."""
    return [_NONE if history is None else msgspec.json.encode(history) + b"\n", *body]


def read_response(reader: Reader, payload: bytes) -> Job:
    """A request for a response. Raises WeftError."""
    return _read(reader, payload, ResponsesRequest)


def read_tokens(reader: Reader, payload: bytes) -> Job:
    """A request to count a prompt's tokens: a job that is not to be submitted. Raises WeftError."""
    return _read(reader, payload, TokensRequest)


def _read(reader: Reader, payload: bytes, kind: type[TokensRequest]) -> Job:
    line, _, body = payload.partition(b"\n")
    history = msgspec.json.decode(line, type=History)
    asked = make(decode(body), kind)
    reader.check_model(asked.model)
    try:
        made, facts = conversation(asked, history, system_inside=reader.system_inside)
        made = msgspec.structs.replace(made, effort=effort_shown(made.effort, reader.text.chat))
        job = reader.converse(made, clip=True)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    return msgspec.structs.replace(job, facts=msgspec.json.encode(facts))
