"""Gemma 4 and FunctionGemma: keywords with quotes of their own.

Gemma 4:       <|tool_call>call:f{a:1,b:<|"|>text<|"|>,c:{d:[true]}}<tool_call|>
FunctionGemma: <start_function_call>call:f{a:1,b:<escape>text<escape>}<end_function_call>
"""

from __future__ import annotations

from weft.text.parsing.declaration import BLANK, NAME, Call, Keywords, OutputFormat, ReasoningMarks


def _noted(name: str, opens: str, closes: str, quote: str) -> OutputFormat:
    """Return the format with calls between ``opens`` and ``closes``, and strings between ``quote``."""
    spelled = Keywords(assign=":", end="}", between=",", quote=quote)
    call = Call(
        head=(opens, BLANK, "call:", NAME, BLANK, "{"), arguments=spelled, tail=(BLANK, closes), gap=""
    )
    return OutputFormat(name=name, calls=(call,))


GEMMA4 = _noted("gemma4", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTIONGEMMA = _noted("functiongemma", "<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4_REASONING = OutputFormat(
    name="gemma4", reasoning=(ReasoningMarks(open="<|channel>thought", close="<channel|>"),)
)
FORMATS = (GEMMA4, FUNCTIONGEMMA)
