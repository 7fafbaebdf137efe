"""Hermes, and Qwen 2.5 and 3: a JSON object in tags.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

Small models leave the tags out. A bare object at the start of a line is therefore a call too.
"""

from __future__ import annotations

from weft.text.parsing.declaration import LINE, Call, CallObject, OutputFormat

HERMES = OutputFormat(
    name="hermes",
    calls=(
        Call(head=("<tool_call>", LINE), arguments=CallObject(), tail=(LINE, "</tool_call>")),
        Call(arguments=CallObject(), line_start=True),
    ),
)
FORMATS = (HERMES,)
