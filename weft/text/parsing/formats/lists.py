"""Families that write all calls of an output as one list between tags.

Apertus:      <|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>
Apriel:       <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>
Command A:    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>
Granite 3:    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]
LFM2:         <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    NAME,
    Arguments,
    Blank,
    Call,
    CallObject,
    JsonArguments,
    Keywords,
    OutputFormat,
    ReasoningMarks,
    Section,
    Syntax,
)


def _listed(
    name: str, opens: str, closes: str, arguments: Arguments, head: Syntax = (), tail: Syntax = ()
) -> OutputFormat:
    """Return a format with all calls in one list between ``opens`` and ``closes``."""
    ending = (BLANK, "]", BLANK, closes) if closes else (BLANK, "]")
    section = Section(head=(opens, BLANK, "[", BLANK), tail=ending, between=",")
    call = Call(section=section, head=head, arguments=arguments, tail=tail, gap=", ")
    return OutputFormat(name=name, calls=(call,))


APERTUS = _listed(
    "apertus",
    "<|tools_prefix|>",
    "<|tools_suffix|>",
    JsonArguments(),
    head=('{"', NAME, '"', BLANK, ":", Blank(" ")),
    tail=(BLANK, "}"),
)
APRIEL = _listed("apriel", "<tool_calls>", "</tool_calls>", CallObject())
COMMAND_A = _listed(
    "command_a",
    "<|START_ACTION|>",
    "<|END_ACTION|>",
    CallObject(name="tool_name", arguments=("parameters",), id="tool_call_id"),
)
GRANITE = _listed("granite", "<|tool_call|>", "", CallObject())
LFM2 = _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", Keywords(), head=(NAME, "("))
FORMATS = (APERTUS, APRIEL, COMMAND_A, GRANITE, LFM2)
REASONING = (
    OutputFormat(
        name="apertus", reasoning=(ReasoningMarks(open="<|inner_prefix|>", close="<|inner_suffix|>"),)
    ),
    OutputFormat(
        name="apriel",
        reasoning=(ReasoningMarks(open="Here are my reasoning steps:", close="[BEGIN FINAL RESPONSE]"),),
    ),
    OutputFormat(
        name="command_a", reasoning=(ReasoningMarks(open="<|START_THINKING|>", close="<|END_THINKING|>"),)
    ),
)
