"""Reasoning settings of chat clients: many spellings, merged into one form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from weft.common.errors import InvalidRequest

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
V = TypeVar("V", str, int, bool)


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``thinking`` as written by clients of Anthropic, DeepSeek, GLM and Kimi."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: str | None = None
    """No effect, like the two fields below: chat shows reasoning in one form only."""
    clear_thinking: bool | None = None
    """No effect: the chat template decides which earlier reasoning the model sees."""
    keep: Any = None

    @property
    def switch(self) -> bool | None:
        """Reasoning on or off; None leaves the decision to the model."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``reasoning`` as written by clients of OpenRouter."""

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True to leave reasoning out of the answer."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """No effect: OpenAI's summary form. Here reasoning is shown unchanged."""


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """Reasoning settings of a request."""

    effort: str | None = None
    switch: bool | None = None
    """Reasoning on or off; None leaves the decision to the model."""
    budget: int | None = None
    """Maximum tokens of reasoning; then the reasoning is ended."""
    wish: bool = False
    """True if a model without reasoning accepts the budget, too."""
    shown: bool = True
    names: dict[str, str] = {}
    """Conversation parameter -> parameter name in the request."""


def one_of(asked: Sequence[tuple[str, V | None]]) -> tuple[str, V | None]:
    """Return the value given under several names, with its first name; ("", None) if none is given. Raises
    InvalidRequest for two different values."""
    given = [(name, value) for name, value in asked if value is not None]
    if not given:
        return "", None
    first, value = given[0]
    for name, other in given[1:]:
        if other != value:
            raise InvalidRequest(
                f"{first} and {name} have different values; send only one of the two", param=name
            )
    return first, value
