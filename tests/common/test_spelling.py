"""Suggestions are for misspellings: another model is none."""

from __future__ import annotations

import pytest

from weft.common.errors import ConfigError
from weft.common.spelling import misspelt
from weft.config.families import FAMILIES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Qwen3MoEForCausalLM", "Qwen3MoeForCausalLM"),
        ("DeepSeekV3ForCausalLM", "DeepseekV3ForCausalLM"),
        ("LLamaForCausalLm", "LlamaForCausalLM"),
        ("MixtralForCasualLM", "MixtralForCausalLM"),
        ("Qwen35ForCausalLM", "Qwen3_5ForCausalLM"),
        ("Qwen3VlForConditionalGeneratoin", "Qwen3VLForConditionalGeneration"),
        ("MiniMaxM3ForCausalLM", None),
        ("GraniteHForCausalLM", None),
        ("KimiK3ForConditionalGeneration", None),
        ("Qwen4ForCausalLM", None),
        ("Gemma5ForConditionalGeneration", None),
        ("Step3p7FlashForCausalLM", None),
        ("DeciLMForCausalLM", None),
        ("x", None),
        ("", None),
    ],
)
def test_a_few_letters_and_never_a_digit(name: str, meant: str | None) -> None:
    assert misspelt(name, FAMILIES) == meant
    with pytest.raises(ConfigError) as raised:
        FAMILIES.get(name)
    assert ("Did you mean" in raised.value.message) == (meant is not None)
    assert "There are: ApertusForCausalLM" in raised.value.message


def test_the_nearest_of_several() -> None:
    assert misspelt("tokens", ["token", "tokenise", "tokems"]) == "tokems"
    assert misspelt("stpe", ["step", "stop"]) == "step"
    assert misspelt("abc", ["xyc", "abd"]) == "abd"
