"""Kimi K2: the model numbers the calls, and the id contains the name.

<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}
<|tool_call_end|><|tool_calls_section_end|>
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    NAMING_IDENTIFIER,
    Call,
    JsonArguments,
    Optional,
    OutputFormat,
    Section,
)

KIMI_K2 = OutputFormat(
    name="kimi_k2",
    calls=(
        Call(
            section=Section(
                head=("<|tool_calls_section_begin|>", BLANK),
                tail=(BLANK, "<|tool_calls_section_end|>"),
                required=False,
            ),
            head=(
                "<|tool_call_begin|>",
                BLANK,
                NAMING_IDENTIFIER,
                BLANK,
                Optional(("<|tool_call_argument_begin|>",), written=True),
                BLANK,
            ),
            arguments=JsonArguments(),
            tail=(BLANK, "<|tool_call_end|>"),
            gap="",
        ),
    ),
)
FORMATS = (KIMI_K2,)
