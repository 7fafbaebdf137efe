"""Reasoning in tags: ``<think>...</think>`` and similar tags. Some families also tag the answer.

Most templates or models open the reasoning. ``deepseek_r1`` starts inside the reasoning without an opening
tag: neither the first R1 nor its templates wrote an opening tag.
"""

from __future__ import annotations

from weft.text.parsing.declaration import AnswerMarks, OutputFormat, ReasoningMarks
from weft.text.parsing.formats import lists
from weft.text.parsing.formats.gemma import GEMMA4_REASONING
from weft.text.parsing.formats.glm import HY_V3_REASONING
from weft.text.parsing.formats.gpt_oss import GPT_OSS
from weft.text.parsing.formats.mistral import MISTRAL_REASONING
from weft.text.parsing.formats.solar import SOLAR_REASONING

QWEN3 = OutputFormat(name="qwen3", reasoning=(ReasoningMarks(open="<think>", close="</think>"),))
DEEPSEEK_R1 = OutputFormat(
    name="deepseek_r1", reasoning=(ReasoningMarks(open="<think>", close="</think>", implied=True),)
)
SEED_OSS = OutputFormat(
    name="seed_oss", reasoning=(ReasoningMarks(open="<seed:think>", close="</seed:think>"),)
)
_THINK = ReasoningMarks(open="<think>", close="</think>")
_RESPONSE = AnswerMarks(open="<response>", close="</response>")
ERNIE45 = OutputFormat(name="ernie45", reasoning=(_THINK,), answer=(_RESPONSE,))
GRANITE = OutputFormat(
    name="granite",
    reasoning=(
        _THINK,
        ReasoningMarks(open="Here is my thought process:", close="Here is my response:"),
    ),
    answer=(_RESPONSE,),
)
HUNYUAN_A13B = OutputFormat(
    name="hunyuan_a13b",
    reasoning=(_THINK,),
    answer=(AnswerMarks(open="<answer>", close="</answer>"),),
)
FORMATS = (
    QWEN3,
    DEEPSEEK_R1,
    ERNIE45,
    GEMMA4_REASONING,
    GPT_OSS,
    GRANITE,
    HUNYUAN_A13B,
    HY_V3_REASONING,
    MISTRAL_REASONING,
    SEED_OSS,
    SOLAR_REASONING,
    *lists.REASONING,
)
