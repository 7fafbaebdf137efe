"""Completions with ``echo`` and ``max_tokens`` 0, as evaluation harnesses score prompts.

The engine makes at least one token; here it is taken out of the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.front.generation import Generation
from weft.front.responses import Usage
from weft.front.serving import Shape
from weft.text.choice import Choice, Delta


def without_output(make: Callable[[Generation], Shape]) -> Callable[[Generation], Shape]:
    """``make`` a shape that shows prompts, and of choices only that each has ended, for "length"."""
    return lambda generation: _PromptOnly(make(generation), generation)


class _PromptOnly:
    """Takes the output out of a generation's choices when they have ended, so that nothing counts it."""

    def __init__(self, shape: Shape, generation: Generation) -> None:
        self._shape = shape
        self._generation = generation

    def opening(self) -> list[Any]:
        return self._shape.opening()

    def chunks(self, delta: Delta) -> list[Any]:
        if delta.finish_reason is None:
            return []
        _forget_output(self._generation.choices[delta.index])
        return self._shape.chunks(Delta(index=delta.index, finish_reason="length"))

    def closing(self, usage: Usage) -> list[Any]:
        return self._shape.closing(self._generation.usage())

    def whole(self, usage: Usage) -> Any:
        for choice in self._generation.choices:
            _forget_output(choice)
        return self._shape.whole(self._generation.usage())


def _forget_output(choice: Choice) -> None:
    choice.text = ""
    choice.token_ids = []
    choice.logprobs = None if choice.logprobs is None else []
    choice.finish_reason = "length"
    choice.stop_reason = None
