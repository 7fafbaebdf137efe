"""Qwen3-Coder: each argument in a tag pair of its own.

    <tool_call>
    <function=f>
    <parameter=a>
    1
    </parameter>
    </function>
    </tool_call>

The model sometimes leaves the outer tags out.
"""

from __future__ import annotations

from weft.text.parsing.declaration import LINE, NAME, Call, OutputFormat, Parameters

_PARAMETERS = Parameters(
    key_open="<parameter=", key_close=">", value_close="</parameter>", end="</function>", newlines=True
)
_TAIL = (LINE, "</tool_call>")
QWEN3_CODER = OutputFormat(
    name="qwen3_coder",
    calls=(
        Call(head=("<tool_call>", LINE, "<function=", NAME, ">"), arguments=_PARAMETERS, tail=_TAIL),
        Call(head=("<function=", NAME, ">"), arguments=_PARAMETERS, tail=_TAIL),
    ),
)
FORMATS = (QWEN3_CODER,)
