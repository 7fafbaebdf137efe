"""Grammars of whole outputs: calls and answers in the spelling of a model family, behind the reasoning.

For a reasoning model, the output starts with free text up to the closing tag of the reasoning. The prompt or
the model may open the reasoning. Calls have the spelling of the family's templates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Items
from typing import Literal, TypeAlias

from weft.common.errors import InvalidRequest
from weft.text.parsing.declaration import (
    Blank,
    Call,
    CallObject,
    Channels,
    Identifier,
    Keywords,
    Name,
    OutputFormat,
    Parameters,
    Section,
    Syntax,
)
from weft.text.parsing.json_text import quoted
from weft.text.parsing.parameter_grammar import keyword_parts, parameter_parts
from weft.text.parsing.parser import Tool
from weft.types.grammar import (
    FreeText,
    Grammar,
    GrammarSequence,
    JsonSchema,
    OneOf,
    Regex,
    Repeated,
    Text,
    Triggered,
)

ToolChoice: TypeAlias = Literal["auto", "required"]
_BETWEEN = Regex(r"[ \n]{0,2}")
"""White space between the reasoning and the next part."""
_NUMBER = Regex(r"[0-9]{1,3}")
_MAX_CALLS = 128
"""Maximum calls of one output under a grammar."""


class OutputGrammars:
    """Makes the grammars of one declaration."""

    def __init__(self, declared: OutputFormat) -> None:
        self._declared = declared
        self._channels = declared.channels if declared.channel_calls else None

    def calls(
        self, tools: Items[Tool], choice: ToolChoice, *, parallel: bool, reasoning: bool, in_reasoning: bool
    ) -> Grammar | None:
        """Return the grammar of an output with calls; None if any output is allowed.

        Any output is allowed if no tool is strict and no call is required. Raises InvalidRequest if the
        format has no calls or cannot express a strict schema.
        """
        if choice == "auto" and not any(tool.strict for tool in tools):
            return None
        if not tools or not self._declared.tells_calls:
            raise InvalidRequest(
                "the server does not know the tool call format of this model; start the server with "
                "--tool-call-parser",
                param="tool_choice" if choice == "required" else "tools",
            )
        if self._channels is not None:
            made = self._channel_calls(self._channels, tools, choice)
        elif choice == "required":
            made = self._required(self._declared.calls[0], tools, parallel=parallel)
        else:
            made = self._strict(tools, parallel=parallel)
        # A call inside the reasoning would escape the grammar, so the reasoning must not contain a trigger.
        triggers = [
            trigger
            for call in self._declared.ways(strict=True)
            for trigger in call.triggers
            if not call.line_start
        ]
        return self.behind_reasoning(
            made, reasoning=reasoning, in_reasoning=in_reasoning, without=tuple(dict.fromkeys(triggers))
        )

    def answer(self, part: Grammar, *, reasoning: bool, in_reasoning: bool) -> Grammar:
        """Return the grammar of an output with content ``part``."""
        used = self._declared.channels
        if used is not None:
            part = GrammarSequence((Text(used.channel + used.texts[0] + used.message), part))
        marked = tuple(
            GrammarSequence((Text(marks.open + marks.gap), part, Text(marks.gap + marks.close)))
            for marks in self._declared.answer
        )
        part = OneOf((part, *marked)) if marked else part
        return self.behind_reasoning(part, reasoning=reasoning, in_reasoning=in_reasoning)

    def behind_reasoning(
        self, part: Grammar, *, reasoning: bool, in_reasoning: bool, without: tuple[str, ...] = ()
    ) -> Grammar:
        """Return ``part`` behind the reasoning of the family, if any.

        ``in_reasoning``: the prompt has opened the reasoning. The reasoning contains none of ``without``: a
        call inside the reasoning would not follow the grammar. Channel formats ignore ``without``.
        """
        used = self._declared.channels
        if used is not None:
            end = GrammarSequence((FreeText(ends=(used.ends[0],)), Text(used.start + used.role)))
            opening = used.channel + used.reasoning[0] + used.message
            return self._after(end, opening, part, reasoning=reasoning, in_reasoning=in_reasoning)
        if not self._declared.reasoning:
            return part
        reasoning_marks = self._declared.reasoning[0]
        end = GrammarSequence((FreeText(ends=(reasoning_marks.close,), without=without), _BETWEEN))
        return self._after(end, reasoning_marks.open, part, reasoning=reasoning, in_reasoning=in_reasoning)

    def _after(
        self, end: Grammar, opening: str, part: Grammar, *, reasoning: bool, in_reasoning: bool
    ) -> Grammar:
        """Return ``part`` behind a reasoning block.

        The block is required if the prompt has opened the block, optional if ``reasoning``, else absent.
        """
        if in_reasoning:
            return GrammarSequence((end, part))
        if not reasoning:
            return part
        reasoning_marks = GrammarSequence((Text(opening), end))
        return GrammarSequence((Repeated(part=reasoning_marks, most=1), part))

    # -- calls

    def _required(self, call: Call, tools: Items[Tool], *, parallel: bool) -> Grammar:
        """Return the grammar of at least one call and no other text."""
        section = call.section or Section()
        one = _one_call(call, tools)
        calls = Repeated(part=one, between=call.gap, least=1, most=_MAX_CALLS if parallel else 1)
        head = "".join(texts_written(section.head))
        tail = "".join(texts_written(section.tail))
        parts: list[Grammar] = [*([Text(head)] if head else []), calls, *([Text(tail)] if tail else [])]
        return parts[0] if len(parts) == 1 else GrammarSequence(tuple(parts))

    def _strict(self, tools: Items[Tool], *, parallel: bool) -> Grammar:
        """Return the grammar of any text in which each trigger, of any spelling, starts a valid call."""
        first = self._declared.calls[0]
        if first.line_start:
            bracket = first.triggers[0]
            line = rf"[^\s\{bracket}<][^\n]*"  # a line that does not begin with a bracket or a tag
            other = Regex(rf"{line}(?:\n[ \t\r]*(?:{line})?)*")
            return OneOf((self._required(first, tools, parallel=parallel), other, Text("")))
        # Spellings with the same trigger are alternatives behind that trigger.
        begins: dict[str, list[Grammar]] = {}
        ways = self._declared.ways(strict=True)
        for call in ways:
            for trigger in call.triggers:
                outer = call.section is not None and trigger in call.section.head
                whole = self._required(call, tools, parallel=parallel) if outer else _one_call(call, tools)
                begins.setdefault(trigger, []).append(_without(whole, trigger))
        sections = any(call.section is not None for call in ways)
        most = None if parallel and not sections else 1
        if len(begins) == 1:
            ((trigger, parts),) = begins.items()
            return Triggered(trigger=trigger, parts=tuple(parts), most=most)
        one = OneOf(
            tuple(
                GrammarSequence(
                    (FreeText(ends=(trigger,), without=tuple(begins.keys() - {trigger})), *_either(parts))
                )
                for trigger, parts in begins.items()
            )
        )
        return GrammarSequence((Repeated(part=one, most=most), FreeText(without=tuple(begins))))

    def _channel_calls(self, used: Channels, tools: Items[Tool], choice: ToolChoice) -> Grammar:
        """Return the grammar of calls in channels: a required call, or free text with valid calls."""
        kind = f" {used.constrain}json{used.message}"
        if choice == "required":
            opening = f"{used.channel}{used.calls} to={used.prefix}"
            one = OneOf(tuple(GrammarSequence((Text(tool.name + kind), _arguments(tool))) for tool in tools))
            return GrammarSequence((Text(opening), one))
        between = (kind, f"{used.channel}{used.calls}{kind}")
        parts = tuple(
            GrammarSequence((Text(tool.name), OneOf(tuple(map(Text, between))), _arguments(tool)))
            for tool in tools
        )
        return Triggered(trigger=f" to={used.prefix}", parts=parts)


def _one_call(call: Call, tools: Items[Tool]) -> Grammar:
    """Return the grammar of one call of any of ``tools``."""
    before, after = head_texts(call)
    spelled = call.arguments
    bodies: list[Grammar] = []
    for tool in tools:
        if isinstance(spelled, Parameters):
            body = parameter_parts(spelled, tool)
        elif isinstance(spelled, Keywords):
            body = keyword_parts(spelled, tool)
        else:
            body = (_arguments(tool),)
        bodies.append(GrammarSequence((*_with_number(tool.name + after), *body)))
    tail = ("}" if isinstance(spelled, CallObject) else "") + "".join(texts_written(call.tail))
    parts: list[Grammar] = [*_with_number(before), OneOf(tuple(bodies))]
    return GrammarSequence((*parts, *([Text(tail)] if tail else [])))


def _with_number(text: str) -> tuple[Grammar, ...]:
    """Return the grammar of ``text``; the character ``\\1`` stands for a number, see ``texts_written``."""
    first, numbered, rest = text.partition("\1")
    number: tuple[Grammar, ...] = (_NUMBER, Text(rest)) if numbered else ()
    return (*((Text(first),) if first else ()), *number)


def _either(parts: list[Grammar]) -> tuple[Grammar]:
    return (parts[0] if len(parts) == 1 else OneOf(tuple(parts)),)


def head_texts(call: Call) -> tuple[str, str]:
    """Return the text before the name and the text behind the name."""
    before, _, after = "".join(texts_written(call.head)).partition("\0")
    if isinstance(call.arguments, CallObject):
        spelled = call.arguments
        before += "{" + quoted(spelled.name) + ': "'
        after = f'", {quoted(spelled.arguments[0])}: '
    return before, after


def texts_written(items: Syntax) -> list[str]:
    """Return the text of a grammar for ``items``. NUL stands for the name, and the character ``\\1`` for a
    number.
    """
    texts: list[str] = []
    for item in items:
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, Blank):
            texts.append(item.written)
        elif isinstance(item, Name):
            texts.append("\0")
        elif isinstance(item, Identifier):
            texts.append("functions.\0:\1" if item.holds_name else "\1" if item.written else "")
        elif item.written:
            texts += texts_written(item.items)
    return texts


def _arguments(tool: Tool) -> JsonSchema:
    """Return the grammar of a tool's arguments as a JSON object."""
    return JsonSchema(schema=json.dumps(tool.arguments, ensure_ascii=False))


def _without(grammar: Grammar, trigger: str) -> Grammar:
    """Return ``grammar`` without ``trigger`` at the start of its first text."""
    if isinstance(grammar, Text):
        return Text(grammar.text.removeprefix(trigger))
    assert isinstance(grammar, GrammarSequence)
    first, *rest = grammar.parts
    left = _without(first, trigger)
    return GrammarSequence(tuple(rest)) if left == Text("") else GrammarSequence((left, *rest))
