"""GPT-OSS: messages in channels (OpenAI's harmony format).

<|channel|>analysis<|message|>Weather is asked for.<|end|><|start|>assistant<|channel|>commentary
to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from __future__ import annotations

from weft.text.parsing.declaration import Channels, OutputFormat

GPT_OSS = OutputFormat(
    name="gpt_oss",
    channels=Channels(
        start="<|start|>",
        role="assistant",
        channel="<|channel|>",
        constrain="<|constrain|>",
        message="<|message|>",
        ends=("<|end|>", "<|return|>", "<|call|>"),
        reasoning=("analysis",),
        texts=("final", "commentary"),
        kinds=("json", "code", "text"),
        calls="commentary",
        prefix="functions.",
    ),
)
FORMATS = (GPT_OSS,)
