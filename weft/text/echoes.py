"""Thoughts in messages of the assistant that come back, in the forms that other servers and clients have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

THOUGHTS = ("reasoning_details", "thinking_blocks")
"""Fields with a list of thoughts: OpenRouter's and LiteLLM's."""
_PARTS = frozenset(["thinking", "think", "reasoning", "reasoning.text", "reasoning.summary"])
_HIDDEN = frozenset(["redacted_thinking", "reasoning.encrypted"])
"""Thoughts that only their maker can read."""
_TEXTS = ("thinking", "think", "text", "summary", "reasoning")


def thought_of(value: Any) -> str:
    """The text of a list of thoughts; "" for what is none."""
    if not isinstance(value, list):
        return ""
    return "".join(_text(part) for part in value if isinstance(part, Mapping))


def without_thoughts(content: list[Any]) -> tuple[list[Any], str]:
    """(the parts of a content that are no thoughts, the text of those that are)."""
    thoughts = [part for part in content if _is_thought(part)]
    if not thoughts:
        return content, ""
    return [part for part in content if not _is_thought(part)], thought_of(thoughts)


def _is_thought(part: Any) -> bool:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(kind, str) and kind in _PARTS | _HIDDEN


def _text(part: Mapping[str, Any]) -> str:
    """Mistral's thoughts are lists of parts again."""
    kind = part.get("type")
    if isinstance(kind, str) and kind in _HIDDEN:
        return ""
    for name in _TEXTS:
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            texts = [inner.get("text") for inner in value if isinstance(inner, Mapping)]
            return "".join(text for text in texts if isinstance(text, str))
    return ""
