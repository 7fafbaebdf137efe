"""One log line per request, for ``--log-requests``: ids, counts and times, but no text of a user."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from weft.common.log import get_logger

log = get_logger(__name__)


class RequestFacts(msgspec.Struct, kw_only=True):
    """Facts of one request, filled in over time."""

    request_id: str
    """Id in the answer's header ``x-request-id``."""
    client: int | None
    """Number of the API key; None for a server without keys."""
    body_type: str
    """Type of the request's body: a key of ``BODY_READERS``, such as ``chat``."""
    id: str = ""
    """Id in the answer's body."""
    prompt_tokens: int = 0
    output_tokens: int = 0


def log_end(facts: RequestFacts, model: str, first: float | None, took: float, end: Iterable[str]) -> None:
    """Log the end of a request. ``first``: seconds from arrival to the first token; ``took``: from arrival
    to the end. ``end``: the finish reason of each choice, or the code of an error."""
    log.info(
        "request %s x-request-id=%s key=%s kind=%s model=%s prompt_tokens=%d output_tokens=%d ttft=%s "
        "duration=%.3fs finish=%s",
        facts.id or "-",
        facts.request_id or "-",
        "-" if facts.client is None else facts.client,
        facts.body_type,
        model,
        facts.prompt_tokens,
        facts.output_tokens,
        "-" if first is None else f"{first:.3f}s",
        took,
        ",".join(end),
    )
