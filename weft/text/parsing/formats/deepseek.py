"""DeepSeek V3 and R1, V3.1, V3.2, V4.

V3:    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
       ```json
       {"a": 1}
       ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
V3.1:  <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>
       <｜tool▁calls▁end｜>
V3.2:  <｜DSML｜function_calls>
       <｜DSML｜invoke name="f">
       <｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>
       </｜DSML｜invoke>
       </｜DSML｜function_calls>
V4:    the same in <｜DSML｜tool_calls>
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    LINE,
    NAME,
    Call,
    JsonArguments,
    Optional,
    OutputFormat,
    Parameters,
    Section,
)

_CALLS = Section(head=("<｜tool▁calls▁begin｜>", BLANK), tail=(BLANK, "<｜tool▁calls▁end｜>"), required=False)
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"
DEEPSEEK_V3 = OutputFormat(
    name="deepseek_v3",
    calls=(
        Call(
            section=_CALLS,
            head=(_CALL, "function", _SEP, NAME, LINE, Optional(("```json",), written=True), LINE),
            arguments=JsonArguments(),
            tail=(LINE, "```", BLANK, _CALL_END),
        ),
    ),
)
DEEPSEEK_V31 = OutputFormat(
    name="deepseek_v31",
    calls=(
        Call(
            section=_CALLS,
            head=(_CALL, NAME, _SEP, BLANK),
            arguments=JsonArguments(),
            tail=(BLANK, _CALL_END),
            gap="",
        ),
    ),
)


def _dsml(name: str, section: str) -> OutputFormat:
    """Return the format with calls in DSML tags inside ``section``."""
    return OutputFormat(
        name=name,
        calls=(
            Call(
                section=Section(head=(f"<｜DSML｜{section}>", LINE), tail=(LINE, f"</｜DSML｜{section}>")),
                head=('<｜DSML｜invoke name="', NAME, '">'),
                arguments=Parameters(
                    key_open='<｜DSML｜parameter name="',
                    key_close='"',
                    string_flag=' string="',
                    value_open='">',
                    value_close="</｜DSML｜parameter>",
                    end="</｜DSML｜invoke>",
                ),
            ),
        ),
    )


DEEPSEEK_V32 = _dsml("deepseek_v32", "function_calls")
DEEPSEEK_V4 = _dsml("deepseek_v4", "tool_calls")
FORMATS = (DEEPSEEK_V3, DEEPSEEK_V31, DEEPSEEK_V32, DEEPSEEK_V4)
