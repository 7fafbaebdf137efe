"""GLM 4.5 and later: name, then keys and values in tags.

<tool_call>f
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

from weft.text.parsing.declaration import BLANK, NAME, Call, OutputFormat, Parameters

GLM45 = OutputFormat(
    name="glm45",
    calls=(
        Call(
            head=("<tool_call>", BLANK, NAME),
            arguments=Parameters(
                key_open="<arg_key>",
                key_close="</arg_key>",
                value_open="<arg_value>",
                value_close="</arg_value>",
                end="</tool_call>",
            ),
        ),
    ),
)
FORMATS = (GLM45,)
