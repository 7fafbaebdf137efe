"""From what a conversation asks to how its output is read, and what it may be."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from weft.common.errors import InvalidRequest
from weft.front.conversation import Conversation
from weft.text.chat import ChatPrompt
from weft.text.model import TextModel
from weft.text.parsing.parser import OutputSpec
from weft.types.grammar import Grammar


class ReadAs(msgspec.Struct, frozen=True, kw_only=True):
    """How an output is read, and the grammar that it is held to, with the parameter that asks for it."""

    output: OutputSpec
    grammar: Grammar | None = None
    param: str = ""


def read_as(text: TextModel, asked: Conversation, prompt: ChatPrompt) -> ReadAs:
    """Raises InvalidRequest for what the model's format cannot do."""
    output = OutputSpec(
        tools=asked.tools.callable,
        tool_calls=bool(asked.tools.callable),
        reasoning=True,
        in_reasoning=prompt.in_reasoning,
        parallel=asked.tools.parallel,
    )
    if asked.constraint is None:
        return ReadAs(output=output)
    return ReadAs(output=output, grammar=asked.constraint.grammar, param=asked.constraint.param)


def variables_of(asked: Conversation, text: TextModel) -> dict[str, Any] | None:
    """Variables for the chat template: the effort's, and the request's own, which win."""
    if asked.effort is None:
        return asked.template
    thinks = text.output.tells_thoughts
    return {**effort_variables(asked.effort, text.chat.source or "", thinks), **(asked.template or {})}


def effort_variables(effort: str, source: str, thinks: bool = True) -> dict[str, Any]:
    """What a chat template makes of ``reasoning_effort``.

    Templates have a variable of that name, or one that switches thinking on and off. Where there is neither,
    only what the model does by itself can be asked for: medium, and none of one that does not think. Raises
    InvalidRequest otherwise.
    """
    found: dict[str, Any] = {}
    if _mentions(source, "reasoning_effort"):
        found["reasoning_effort"] = effort
    for name in ("enable_thinking", "thinking"):
        if _mentions(source, name):
            found[name] = effort != "none"
    if not found and effort != "medium" and (thinks or effort != "none"):
        raise InvalidRequest(
            "this model's chat template has no variable for reasoning_effort: only medium, what the model "
            "does by itself, can be asked for",
            param="reasoning_effort",
        )
    return found


def _mentions(source: str, name: str) -> bool:
    """Whether a template reads a variable: not a field of something, and not a word in quotes."""
    return re.search(rf"(?<![\w.'\"]){name}(?![\w'\"])(?!\s*=[^=])", source) is not None
