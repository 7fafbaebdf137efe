"""Families that write all calls of an output as one list between tags.

Apertus:      <|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>
Apriel:       <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>; Hunyuan A13B likewise
Command A:    <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {}}]<|END_ACTION|>
Command R:    Action:
              ```json
              [{"tool_name": "f", "parameters": {}}]
              ```
Granite 3:    <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]
LFM2:         <|tool_call_start|>[f(a=1), g()]<|tool_call_end|>
Nemotron:     <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>
OLMo 3:       <function_calls>
              f(a=1)
              g()
              </function_calls>
Phi-4-mini:   <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]<|/tool_call|>, functools[...], or one object
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    LINE,
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
_COHERE = CallObject(name="tool_name", arguments=("parameters",), id="tool_call_id")
COMMAND_A = _listed("command_a", "<|START_ACTION|>", "<|END_ACTION|>", _COHERE)
GRANITE = _listed("granite", "<|tool_call|>", "", CallObject())
COMMAND_R = OutputFormat(
    name="command_r",
    calls=(
        Call(
            section=Section(
                head=("Action:", LINE, "```json", LINE, "[", LINE),
                tail=(LINE, "]", BLANK, "```"),
                between=",",
            ),
            arguments=_COHERE,
            gap=", ",
        ),
    ),
)
NEMOTRON_JSON = _listed("nemotron_json", "<TOOLCALL>", "</TOOLCALL>", CallObject())
OLMO3 = OutputFormat(
    name="olmo3",
    calls=(
        Call(
            section=Section(head=("<function_calls>", LINE), tail=(LINE, "</function_calls>"), between="\n"),
            head=(NAME, "("),
            arguments=Keywords(),
        ),
    ),
)
_PHI4 = _listed("", "<|tool_call|>", "<|/tool_call|>", CallObject()).calls
PHI4_MINI = OutputFormat(
    name="phi4_mini_json",
    calls=(
        *_PHI4,
        Call(head=("<|tool_call|>", BLANK), arguments=CallObject(), tail=(BLANK, "<|/tool_call|>")),
        *_listed("", "functools", "", CallObject()).calls,
    ),
)
LFM2 = _listed("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", Keywords(), head=(NAME, "("))
FORMATS = (APERTUS, APRIEL, COMMAND_A, COMMAND_R, GRANITE, LFM2, NEMOTRON_JSON, OLMO3, PHI4_MINI)
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
