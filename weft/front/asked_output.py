"""From what a conversation asks to how its output is read, and what it may be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from weft.common.errors import InvalidRequest
from weft.front.conversation import Conversation
from weft.front.effort import effort_variables, switch_variables
from weft.front.held_schemas import advised, all_firm, blamed, form_held, tools_held, tools_open
from weft.text.chat import ChatPrompt
from weft.text.model import TextModel
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec, Tool
from weft.types.grammar import Grammar, JsonSchema, OneOf

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
    answer is held to its format; with tools the output is calls, or an answer in the format. A required call
    wins over a format, because the output is then no answer. Raises InvalidRequest for what cannot be held
    to.
    """
    calling = bool(spec.tools) and asked.tools.mode == "required"
    if calling or asked.constraint is None:
        if not calling and not any(tool.strict for tool in spec.tools):
            return None
        return _calls(model, spec, "required" if calling else "auto", check)
    param = asked.constraint.param

    def answered(form: Grammar) -> Grammar:
        grammar = model.answer_grammar(form, in_reasoning=spec.in_reasoning)
        check(grammar, param)
        return grammar

    form = asked.constraint.grammar
    try:
        answer = answered(form)
    except InvalidRequest as error:
        if asked.constraint.strict or not isinstance(form, JsonSchema):
            raise advised(error, form) from None
        answer = answered(form_held(form, param, error))
    if not spec.tools:
        return answer
    calls = _calls(model, spec, "required", check)
    assert calls is not None
    both = OneOf((calls, answer))
    check(both, param)
    return both


def _calls(
    model: ModelOutput, spec: OutputSpec, choice: Literal["auto", "required"], check: Check
) -> Grammar | None:
    """The grammar of calls; None where they may be anything. Where a grammar cannot hold to the schema of a
    tool that is not strict, the schema loses what cannot be held, or as a last resort all of it."""

    def made(tools: Sequence[Tool]) -> Grammar | None:
        grammar = model.call_grammar(tools, choice, parallel=spec.parallel, in_reasoning=spec.in_reasoning)
        if grammar is not None:
            check(grammar, "tools")
        return grammar

    for relaxed in (tuple, tools_held, tools_open):
        try:
            return made(relaxed(spec.tools))
        except InvalidRequest as error:
            refusal = error
            if all_firm(spec.tools):
                break
    raise blamed(refusal, spec.tools) from None


def variables_of(asked: Conversation, text: TextModel) -> dict[str, Any] | None:
    """Variables for the chat template: of the effort, of the switch, and the request's own, which win."""
    source, thinks = text.chat.source or "", text.output.tells_thoughts
    made = {} if asked.effort is None else effort_variables(asked.effort, source, thinks)
    if asked.thinks is not None:
        made |= switch_variables(asked.thinks, source, thinks)
    return {**made, **(asked.template or {})} if made else asked.template
