"""The many ways in which chat clients ask for thoughts, as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from weft.common.errors import InvalidRequest

Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
V = TypeVar("V", str, int, bool)


class ThinkingOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``thinking`` as Anthropic, DeepSeek, GLM and Kimi have it."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: int | None = None
    display: str | None = None
    """Chat has one form for thoughts, so this and the two below have no effect."""
    clear_thinking: bool | None = None
    """The chat template decides which earlier thoughts the model sees."""
    keep: Any = None

    @property
    def switch(self) -> bool | None:
        """On or off; None leaves it to the model."""
        return {"enabled": True, "disabled": False}.get(self.type)


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``reasoning`` as OpenRouter has it."""

    effort: Effort | None = None
    max_tokens: int | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """True leaves thoughts out of the answer."""
    summary: Literal["auto", "concise", "detailed"] | None = None
    """A form of OpenAI's: here thoughts are shown as they are."""


class Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants the model to think."""

    effort: str | None = None
    switch: bool | None = None
    """On or off; None leaves it to the model."""
    budget: int | None = None
    """Tokens of a thought after which it is ended."""
    wish: bool = False
    """Whether a model without thoughts takes the budget, too."""
    shown: bool = True
    names: dict[str, str] = {}
    """Parameters of a conversation by the names that the request has for them."""


def one_of(asked: Sequence[tuple[str, V | None]]) -> tuple[str, V | None]:
    """The one value that a request gives under several names, and its name. Raises InvalidRequest for two."""
    given = [(name, value) for name, value in asked if value is not None]
    if not given:
        return "", None
    first, value = given[0]
    for name, other in given[1:]:
        if other != value:
            raise InvalidRequest(f"{first} and {name} say different things; send one", param=name)
    return first, value
