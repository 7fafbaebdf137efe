"""GLM 4.5 and later, and Hunyuan 3: name, then keys and values in tags.

GLM:       <tool_call>f
           <arg_key>a</arg_key>
           <arg_value>1</arg_value>
           </tool_call>
Hunyuan 3: <tool_calls>
           <tool_call>f<tool_sep>
           <arg_key>a</arg_key>
           <arg_value>1</arg_value>
           </tool_call>
           </tool_calls>

Some tokenizers of Hunyuan 3 write every tag with a suffix: ``<tool_call:opensource>``.
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
    ReasoningMarks,
    Section,
)

SUFFIXES = ("", ":opensource")
"""Suffixes of the tags of Hunyuan 3."""


def _parameters(suffix: str = "") -> Parameters:
    return Parameters(
        key_open=f"<arg_key{suffix}>",
        key_close=f"</arg_key{suffix}>",
        value_open=f"<arg_value{suffix}>",
        value_close=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
    )


def _hunyuan(suffix: str) -> Call:
    return Call(
        section=Section(head=(f"<tool_calls{suffix}>", LINE), tail=(LINE, f"</tool_calls{suffix}>")),
        head=(f"<tool_call{suffix}>", BLANK, NAME, BLANK, Optional((f"<tool_sep{suffix}>",), written=True)),
        arguments=_parameters(suffix),
    )


GLM45 = OutputFormat(name="glm45", calls=(Call(head=("<tool_call>", BLANK, NAME), arguments=_parameters()),))
HY_V3 = OutputFormat(name="hy_v3", calls=tuple(map(_hunyuan, SUFFIXES)))
HY_V3_REASONING = OutputFormat(
    name="hy_v3",
    reasoning=tuple(
        ReasoningMarks(open=f"<think{suffix}>", close=f"</think{suffix}>") for suffix in SUFFIXES
    ),
)
FORMATS = (GLM45, HY_V3)
