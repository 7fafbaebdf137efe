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
"""

from __future__ import annotations

from weft.text.parsing.declaration import LINE, NAME, Call, OutputFormat, Parameters, Section

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
FORMATS = (SEED_OSS, MINIMAX_M2)
