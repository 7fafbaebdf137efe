"""From a conversation request to the output's parser settings and grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import Conversation
from weft.front.protocol.effort import effort_variables, switch_variables
from weft.front.protocol.held_schemas import advised, all_firm, blamed, form_held, tools_held, tools_open
from weft.text.chat import ChatPrompt
from weft.text.model import TextModel
from weft.text.parsing.output import ModelOutput
from weft.text.parsing.parser import OutputSpec, Tool
from weft.types.grammar import Grammar, JsonSchema, OneOf

Check = Callable[[Grammar, str], None]
"""Raises InvalidRequest, with the parameter's name, for a grammar that does not compile."""


def output_of(asked: Conversation, prompt: ChatPrompt) -> OutputSpec:
    """Return the parser settings for the output."""
    return OutputSpec(
        tools=asked.tools.callable,
        tool_calls=bool(asked.tools.callable),
        reasoning=True,
        in_reasoning=prompt.in_reasoning,
        parallel=asked.tools.parallel,
    )


def grammar_of(model: ModelOutput, asked: Conversation, spec: OutputSpec, check: Check) -> Grammar | None:
    """Return the grammar of the whole output, reasoning included; None for unconstrained output.

    Calls follow the tools' schemas if calls are required, or if a tool is strict. An answer follows its
    format. With tools and a format, the output is either calls, or an answer in the format. Required calls
    win over a format, because then the output is no answer. Raises InvalidRequest for a constraint that
    cannot be enforced.
    """
    calling = bool(spec.tools) and asked.tools.mode == "required"
    # Without a format, or with required calls: the grammar of calls alone.
    if calling or asked.constraint is None:
        if not calling and not any(tool.strict for tool in spec.tools):
            return None
        return _calls(model, spec, "required" if calling else "auto", check)
    param = asked.constraint.param

    def answered(form: Grammar) -> Grammar:
        """Return the grammar of an answer in ``form``, reasoning included. Raises InvalidRequest for a
        grammar that does not compile."""
        grammar = model.answer_grammar(form, in_reasoning=spec.in_reasoning)
        check(grammar, param)
        return grammar

    form = asked.constraint.grammar
    try:
        answer = answered(form)
    except InvalidRequest as error:
        if asked.constraint.strict or not isinstance(form, JsonSchema):
            raise advised(error, form) from None
        # A loose schema gets a second attempt, without the keywords that a grammar cannot enforce.
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
    """Return the grammar of calls; None for unconstrained calls. Up to three attempts are made: full
    schemas, schemas without unsupported keywords, and any object as arguments. A tool that is strict keeps
    its schema in every attempt. Raises InvalidRequest that names the tools at fault if no attempt
    compiles."""

    def made(tools: Sequence[Tool]) -> Grammar | None:
        """Return the checked grammar of calls of ``tools``; None for unconstrained calls. Raises
        InvalidRequest."""
        grammar = model.call_grammar(tools, choice, parallel=spec.parallel, in_reasoning=spec.in_reasoning)
        if grammar is not None:
            check(grammar, "tools")
        return grammar

    # Three attempts: full schemas, schemas without unsupported keywords, any object as arguments.
    for relaxed in (tuple, tools_held, tools_open):
        try:
            return made(relaxed(spec.tools))
        except InvalidRequest as error:
            refusal = error
            if all_firm(spec.tools):
                break
    raise blamed(refusal, spec.tools) from None


def variables_of(asked: Conversation, text: TextModel) -> dict[str, Any] | None:
    """Return the chat template's variables: from the effort, from the reasoning switch, and from the
    request. The request's own variables win. Return None if the request has no variables, no effort and no
    reasoning switch."""
    source, thinks = text.chat.source or "", text.output.tells_thoughts
    made = {} if asked.effort is None else effort_variables(asked.effort, source, thinks)
    if asked.thinks is not None:
        made |= switch_variables(asked.thinks, source, thinks)
    return {**made, **(asked.template or {})} if made else asked.template
