"""GigaChat 3: a JSON object behind a mark.

3.1:  <|function_call|>{"name": "f", "arguments": {"a": 1}}
3:    <|message_sep|>

      function call<|role_sep|>
      {"name": "f", "arguments": {"a": 1}}
"""

from __future__ import annotations

from weft.text.parsing.declaration import BLANK, LINE, Call, CallObject, OutputFormat

GIGACHAT3 = OutputFormat(
    name="gigachat3",
    calls=(
        Call(head=("<|function_call|>", BLANK), arguments=CallObject()),
        Call(head=("function call<|role_sep|>", LINE), arguments=CallObject()),
    ),
)
FORMATS = (GIGACHAT3,)
