"""Reasoning in tags: ``<think>...</think>`` and similar tags.

Most templates or models open the reasoning. ``deepseek_r1`` starts inside the reasoning without an opening
tag: neither the first R1 nor its templates wrote an opening tag.
"""

from __future__ import annotations

from weft.text.parsing.declaration import OutputFormat, ReasoningMarks
from weft.text.parsing.formats import lists
from weft.text.parsing.formats.gemma import GEMMA4_REASONING
from weft.text.parsing.formats.gpt_oss import GPT_OSS
from weft.text.parsing.formats.mistral import MISTRAL_REASONING

QWEN3 = OutputFormat(name="qwen3", reasoning=(ReasoningMarks(open="<think>", close="</think>"),))
DEEPSEEK_R1 = OutputFormat(
    name="deepseek_r1", reasoning=(ReasoningMarks(open="<think>", close="</think>", implied=True),)
)
SEED_OSS = OutputFormat(
    name="seed_oss", reasoning=(ReasoningMarks(open="<seed:think>", close="</seed:think>"),)
)
FORMATS = (QWEN3, DEEPSEEK_R1, SEED_OSS, GEMMA4_REASONING, MISTRAL_REASONING, GPT_OSS, *lists.REASONING)
