"""Completions with ``echo`` and ``max_tokens`` 0, as used by evaluation harnesses to score prompts.

The engine makes at least one token. This module removes the token from the answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from weft.common.errors import ErrorInfo
from weft.front.http.answers import Usage
from weft.front.http.streaming import StreamForm
from weft.front.requests.generation import Generation
from weft.front.requests.serving import AnswerShape
from weft.text.choice import TextDelta
from weft.text.logprobs import Logprobs


class PromptOnly(AnswerShape):
    """Answer shape for prompts only; each choice ends with "length".

    The output is removed from a generation's choices at their end, so no count includes the output.
    """

    def __init__(self, shape: AnswerShape, generation: Generation) -> None:
        self._shape = shape
        self._generation = generation

    def opening(self) -> list[Any]:
        return self._shape.opening()

    def weight(self, delta: TextDelta) -> int:
        return self._shape.weight(delta)

    def chunks(self, delta: TextDelta) -> list[Any]:
        """Return the chunks of a choice at its end, without output; [] before. Removes the output from the
        choice."""
        if delta.finish_reason is None:
            return []
        self._forget_output(delta.index)
        return self._shape.chunks(TextDelta(index=delta.index, finish_reason="length"))

    @property
    def form(self) -> StreamForm:
        return self._shape.form

    def failed(self, error: ErrorInfo) -> list[Any]:
        return self._shape.failed(error)

    def take(self, delta: TextDelta) -> None:
        self._shape.take(delta)

    def closing(self, usage: Usage) -> list[Any]:
        return self._shape.closing(self._generation.usage())

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Yield the answer's JSON, after the removal of the output from every choice. ``usage`` is counted
        again without the output."""
        for choice in self._generation.choices:
            self._forget_output(choice.index)
        yield from self._shape.whole(self._generation.usage())

    def _forget_output(self, index: int) -> None:
        """Remove text, tokens and logprobs of a choice's output, and set its finish reason to "length"."""
        choice = self._generation.choices[index]
        choice.text = ""
        choice.token_ids = []
        choice.logprobs = None if choice.logprobs is None else Logprobs(self._generation.tokenizer)
        choice.finish_reason = "length"
        choice.stop_reason = None
