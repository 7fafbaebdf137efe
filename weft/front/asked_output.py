"""From what a conversation asks to how its output is read, and what it may be."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from weft.common.errors import InvalidRequest
from weft.front.conversation import Conversation
from weft.text.chat import ChatPrompt
from weft.text.model import TextModel
from weft.text.parsing.grammars import loosened
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec, Tool
from weft.types.grammar import Grammar, OneOf

Check = Callable[[Grammar, str], None]
"""Raises InvalidRequest, naming the parameter, for a grammar that does not compile."""


def output_of(asked: Conversation, prompt: ChatPrompt) -> OutputSpec:
    """How the output is read."""
    return OutputSpec(
        tools=asked.tools.callable,
        tool_calls=bool(asked.tools.callable),
        reasoning=True,
        in_reasoning=prompt.in_reasoning,
        parallel=asked.tools.parallel,
    )


def grammar_of(model: ModelOutput, asked: Conversation, spec: OutputSpec, check: Check) -> Grammar | None:
    """What the whole output may be, thought included; None where it may be anything.

    Where calls are required, or the arguments of strict tools asked for, calls are held to the tools. An
    answer is held to its format; with tools the output is calls, or an answer in the format. Raises
    InvalidRequest for what cannot be held to.
    """
    calling = bool(spec.tools) and asked.tools.mode == "required"
    if asked.constraint is None:
        if not calling and not any(tool.strict for tool in spec.tools):
            return None
        return _calls(model, spec, "required" if calling else "auto", check)
    param = asked.constraint.param
    if calling:
        raise InvalidRequest(
            f"{param} asks for an answer, and tool_choice for a call; send one of them", param=param
        )
    answer = model.answer_grammar(asked.constraint.grammar, in_reasoning=spec.in_reasoning)
    check(answer, param)
    if not spec.tools:
        return answer
    both = OneOf((_calls(model, spec, "required", check), answer))
    check(both, param)
    return both


def _calls(
    model: ModelOutput, spec: OutputSpec, choice: Literal["auto", "required"], check: Check
) -> Grammar:
    """The grammar of calls. Where a backend cannot hold to the schema of a tool that is not strict, its
    arguments are any object."""

    def made(tools: Sequence[Tool]) -> Grammar:
        grammar = model.call_grammar(tools, choice, parallel=spec.parallel, in_reasoning=spec.in_reasoning)
        assert grammar is not None
        check(grammar, "tools")
        return grammar

    try:
        return made(spec.tools)
    except InvalidRequest:
        if all(tool.strict or not tool.parameters for tool in spec.tools):
            raise
        return made(loosened(spec.tools))


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
