"""Hermes, and Qwen 2.5 and 3: a JSON object in tags.

<tool_call>
{"name": "f", "arguments": {"a": 1}}
</tool_call>
"""

from __future__ import annotations

from weft.text.parsing.declaration import LINE, Call, CallObject, OutputFormat

HERMES = OutputFormat(
    name="hermes",
    calls=(Call(head=("<tool_call>", LINE), arguments=CallObject(), tail=(LINE, "</tool_call>")),),
)
FORMATS = (HERMES,)
