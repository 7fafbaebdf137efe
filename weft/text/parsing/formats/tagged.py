"""Families that write each argument in tags of its own, as Qwen3-Coder does, with other tags around calls.

Seed-OSS:   <seed:tool_call>
            <function=f>
            <parameter=a>1</parameter>
            </function>
            </seed:tool_call>
MiniMax M2: <minimax:tool_call>
            <invoke name="f">
            <parameter name="a">1</parameter>
            </invoke>
            </minimax:tool_call>
Step 3:     <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="f">
            <steptml:parameter name="a">1</steptml:parameter>
            </steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>
"""

from __future__ import annotations

from weft.text.parsing.declaration import (
    BLANK,
    LINE,
    NAME,
    Call,
    Optional,
    OutputFormat,
    Parameters,
    Section,
)

SEED_OSS = OutputFormat(
    name="seed_oss",
    calls=(
        Call(
            head=("<seed:tool_call>", LINE, "<function=", NAME, ">"),
            arguments=Parameters(
                key_open="<parameter=", key_close=">", value_close="</parameter>", end="</function>"
            ),
            tail=(LINE, "</seed:tool_call>"),
        ),
    ),
)
MINIMAX_M2 = OutputFormat(
    name="minimax_m2",
    calls=(
        Call(
            section=Section(head=("<minimax:tool_call>", LINE), tail=(LINE, "</minimax:tool_call>")),
            head=('<invoke name="', NAME, '">'),
            arguments=Parameters(
                key_open='<parameter name="', key_close='">', value_close="</parameter>", end="</invoke>"
            ),
        ),
    ),
)
STEP3 = OutputFormat(
    name="step3",
    calls=(
        Call(
            section=Section(
                head=("<｜tool_calls_begin｜>", BLANK), tail=(BLANK, "<｜tool_calls_end｜>"), required=False
            ),
            head=(
                "<｜tool_call_begin｜>",
                BLANK,
                Optional(("function",), written=True),
                BLANK,
                "<｜tool_sep｜>",
                BLANK,
                '<steptml:invoke name="',
                NAME,
                '">',
            ),
            arguments=Parameters(
                key_open='<steptml:parameter name="',
                key_close='">',
                value_close="</steptml:parameter>",
                end="</steptml:invoke>",
            ),
            tail=(BLANK, "<｜tool_call_end｜>"),
        ),
    ),
)
FORMATS = (SEED_OSS, MINIMAX_M2, STEP3)
