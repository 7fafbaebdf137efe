"""Solar Open: messages between ``<|begin|>assistant`` and ``<|end|>``, each with a mark for its kind.

<|think|>Weather is asked for.<|end|><|begin|>assistant<|content|>One moment.<|end|><|begin|>assistant
<|tool_calls|><|tool_call:begin|>0<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|><|calls|>
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    NAME,
    WRITTEN_IDENTIFIER,
    AnswerMarks,
    Call,
    JsonArguments,
    Optional,
    OutputFormat,
    ReasoningMarks,
    Section,
)

_NEXT = "<|begin|>assistant"


def _calls(opens: str) -> Call:
    return Call(
        section=Section(head=(opens, BLANK), tail=(BLANK, "<|calls|>")),
        head=(
            "<|tool_call:begin|>",
            Optional((WRITTEN_IDENTIFIER,), written=True),
            "<|tool_call:name|>",
            NAME,
            "<|tool_call:args|>",
            BLANK,
        ),
        arguments=JsonArguments(),
        tail=(BLANK, "<|tool_call:end|>"),
        gap="",
    )


# Behind the reasoning the mark of the message stands alone, because the end of the reasoning names the role.
SOLAR_OPEN = OutputFormat(
    name="solar_open", calls=(_calls("<|tool_calls|>"), _calls(_NEXT + "<|tool_calls|>"))
)
SOLAR_REASONING = OutputFormat(
    name="solar_open",
    reasoning=(ReasoningMarks(open="<|think|>", close="<|end|>" + _NEXT),),
    answer=(
        AnswerMarks(open="<|content|>", close="<|end|>", gap=""),
        AnswerMarks(open=_NEXT + "<|content|>", close="<|end|>", gap=""),
    ),
)
FORMATS = (SOLAR_OPEN,)
