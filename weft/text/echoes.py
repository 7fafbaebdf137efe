"""Read the reasoning in assistant messages sent back by clients, in the forms of other servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASONING = ("reasoning_details", "thinking_blocks")
"""Fields with a list of reasoning blocks: OpenRouter's and LiteLLM's."""
_PARTS = frozenset(["thinking", "think", "reasoning", "reasoning.text", "reasoning.summary"])
_HIDDEN = frozenset(["redacted_thinking", "reasoning.encrypted"])
"""Reasoning readable only by its provider."""
_TEXTS = ("thinking", "think", "text", "summary", "reasoning")


def reasoning_of(value: Any) -> str:
    """Return the text of a list of reasoning blocks; "" for anything else."""
    if not isinstance(value, list):
        return ""
    return "".join(_text(part) for part in value if isinstance(part, Mapping))


def without_reasoning(content: list[Any]) -> tuple[list[Any], str]:
    """Return (content parts without reasoning, text of the reasoning parts)."""
    reasoning = [part for part in content if _is_reasoning(part)]
    if not reasoning:
        return content, ""
    return [part for part in content if not _is_reasoning(part)], reasoning_of(reasoning)


def _is_reasoning(part: Any) -> bool:
    part_type = part.get("type") if isinstance(part, Mapping) else None
    return isinstance(part_type, str) and part_type in _PARTS | _HIDDEN


def _text(part: Mapping[str, Any]) -> str:
    """Return the text of one reasoning block, "" for hidden blocks and blocks without text.

    Mistral nests a list of parts inside.
    """
    part_type = part.get("type")
    if isinstance(part_type, str) and part_type in _HIDDEN:
        return ""
    for name in _TEXTS:
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            texts = [inner.get("text") for inner in value if isinstance(inner, Mapping)]
            return "".join(text for text in texts if isinstance(text, str))
    return ""
