"""Llama 3 (JSON), Llama 3.2 (calls in Python syntax), and Llama 4 (both).

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}
    [f(a=1), g()]

An output of calls alone has no tags: a bracket at the start of a line may begin a call.
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
LLAMA4 = OutputFormat(
    name="llama4",
    calls=(
        *PYTHONIC.calls,
        LLAMA3_JSON.calls[0],
        Call(
            section=Section(head=("<|python_start|>", BLANK), tail=(BLANK, "<|python_end|>"), between=";"),
            arguments=_OBJECT,
            gap="; ",
        ),
    ),
)
FORMATS = (LLAMA3_JSON, PYTHONIC, LLAMA4)
