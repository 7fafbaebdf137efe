"""Llama 3 (JSON) and Llama 3.2 and 4 (calls as Python writes them).

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    [f(a=1), g()]

Where the output is nothing but calls there are no tags: a bracket at the start of a line may begin one.
"""

from __future__ import annotations

from weft.text.parsing.declaration import BLANK, NAME, Call, CallObject, Keywords, OutputFormat, Section

_OBJECT = CallObject(arguments=("parameters", "arguments"))
LLAMA3_JSON = OutputFormat(
    name="llama3_json",
    calls=(
        Call(section=Section(between=";"), arguments=_OBJECT, gap="; ", line_start=True),
        Call(section=Section(head=("<|python_tag|>", BLANK), between=";"), arguments=_OBJECT, gap="; "),
    ),
)
PYTHONIC = OutputFormat(
    name="pythonic",
    calls=(
        Call(
            section=Section(head=("[", BLANK), tail=(BLANK, "]"), between=","),
            head=(NAME, "("),
            arguments=Keywords(),
            gap=", ",
            line_start=True,
        ),
        Call(
            section=Section(
                head=("<|python_start|>", BLANK, "[", BLANK),
                tail=(BLANK, "]", BLANK, "<|python_end|>"),
                between=",",
            ),
            head=(NAME, "("),
            arguments=Keywords(),
            gap=", ",
        ),
    ),
)
FORMATS = (LLAMA3_JSON, PYTHONIC)
