"""The declarations of all families, by the flag values of other servers."""

from __future__ import annotations

from weft.text.parsing.declaration import OutputFormat
from weft.text.parsing.formats import (
    deepseek,
    gemma,
    gigachat,
    glm,
    gpt_oss,
    hermes,
    kimi,
    lists,
    llama,
    mistral,
    qwen3_coder,
    reasoning,
    solar,
    tagged,
)

_FAMILIES = (
    *(deepseek, gemma, gigachat, glm, gpt_oss, hermes, kimi, lists, llama, mistral, qwen3_coder),
    *(solar, tagged),
)
_CALL_ALIASES = {
    "qwen": "hermes",
    "ernie45": "hermes",
    "exaone4": "hermes",
    "granite4": "hermes",
    "smollm3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "step3p5": "qwen3_coder",
    "glm47": "glm45",
    "hunyuan_a13b": "apriel",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "gpt_oss",
}
_REASONING_ALIASES = {
    "deepseek_v3": "qwen3",
    "exaone4": "qwen3",
    "glm45": "qwen3",
    "kimi_k2": "qwen3",
    "minimax_m2": "qwen3",
    "nemotron_v3": "qwen3",
    "olmo3": "qwen3",
    "smollm3": "qwen3",
    "step3": "qwen3",
    "step3p5": "qwen3",
    "openai_gptoss": "gpt_oss",
    "openai": "gpt_oss",
}


def _named(formats: list[OutputFormat], aliases: dict[str, str]) -> dict[str, OutputFormat]:
    known = {one.name: one for one in formats}
    return {**known, **{alias: known[name] for alias, name in aliases.items()}}


CALLS = _named([one for family in _FAMILIES for one in family.FORMATS], _CALL_ALIASES)
"""Values of ``--tool-call-parser``."""
REASONING = _named([*reasoning.FORMATS], _REASONING_ALIASES)
"""Values of ``--reasoning-parser``."""
