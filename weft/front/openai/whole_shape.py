"""Answers that are never streamed: of requests that end with the prompt."""

from __future__ import annotations

from typing import Any

from weft.common.errors import ErrorInfo, InvalidRequest
from weft.front.http.answers import Usage, error_response
from weft.front.http.streaming import StreamForm
from weft.front.requests.serving import AnswerShape
from weft.text.choice import TextDelta

NUMBER_BYTES = 24
"""Maximum bytes of a number in JSON."""


class WholeShape(AnswerShape):
    """Part of an ``AnswerShape`` without a stream."""

    form = StreamForm()

    def opening(self) -> list[Any]:
        return []

    def weight(self, delta: TextDelta) -> int:
        return 0

    def chunks(self, delta: TextDelta) -> list[Any]:
        return []

    def closing(self, usage: Usage) -> list[Any]:
        return []

    def failed(self, error: ErrorInfo) -> list[Any]:
        return [error_response(error)]

    def take(self, delta: TextDelta) -> None:
        """Do nothing: the choices keep everything for the whole answer."""


def check_size(size: int, most: int, param: str | None, smaller: str) -> None:
    """Raise InvalidRequest for an answer of about ``size`` bytes, above ``most`` (``--max-response-bytes``).

    ``smaller``: a further way to a smaller answer, for the message.
    """
    if size > most:
        raise InvalidRequest(
            f"the answer would have about {size} bytes; this server's limit is {most} "
            f"(--max-response-bytes): send fewer inputs per request, or {smaller}",
            param=param,
            code="response_too_large",
        )
