"""Readers for bodies of the Messages API."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.protocol.messages.messages_conversion import NAMES, conversation
from weft.front.protocol.messages.messages_request import CountRequest, MessagesRequest
from weft.front.protocol.parse import parse
from weft.front.protocol.turns import effort_shown, renamed

if TYPE_CHECKING:
    from weft.front.requests.reading import Job, Reader


def read_messages(reader: Reader, body: bytes) -> Job:
    """Read a request for a message. Raises WeftError."""
    return _read(reader, parse(body, MessagesRequest))


def read_count(reader: Reader, body: bytes) -> Job:
    """Read a request to count a prompt's tokens. The returned job must not be submitted. Raises WeftError."""
    return _read(reader, parse(body, CountRequest))


def _read(reader: Reader, asked: CountRequest) -> Job:
    """Return the job of a request. Raises InvalidRequest with names of this API."""
    asked = reader.named(asked)
    try:
        made, facts = conversation(
            asked, system_inside=reader.system_inside, keep_attribution=reader.keep_attribution
        )
        made = msgspec.structs.replace(
            made,
            effort=effort_shown(made.effort, reader.text.chat),
            # Agents send a budget to every model. A model without reasoning needs no budget.
            thinking_budget=made.thinking_budget if reader.text.output.reasoning_end else None,
        )
        # A cut at the end of the context is reported in stop_reason, so max_tokens may exceed the context.
        job = reader.converse(made, clip=True)
    except InvalidRequest as error:
        raise renamed(error, NAMES) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from None
    return msgspec.structs.replace(job, facts=msgspec.json.encode(facts))
