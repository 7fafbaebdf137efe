"""Mistral: a list of objects (tokenizers v3 to v7), or name and arguments (v11 and later).

[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]
[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    IDENTIFIER,
    NAME,
    Call,
    CallObject,
    JsonArguments,
    Optional,
    OutputFormat,
    ReasoningMarks,
    Section,
)

MISTRAL = OutputFormat(
    name="mistral",
    calls=(
        Call(
            head=(
                "[TOOL_CALLS]",
                BLANK,
                NAME,
                Optional(("[CALL_ID]", IDENTIFIER)),
                Optional(("[ARGS]",), written=True),
                BLANK,
            ),
            arguments=JsonArguments(),
            gap="",
        ),
        Call(
            section=Section(head=("[TOOL_CALLS]", BLANK, "[", BLANK), tail=(BLANK, "]"), between=","),
            arguments=CallObject(),
            gap=", ",
        ),
    ),
)
MISTRAL_REASONING = OutputFormat(
    name="mistral", reasoning=(ReasoningMarks(open="[THINK]", close="[/THINK]"),)
)
FORMATS = (MISTRAL,)
