"""Marks in published templates that end an assistant turn."""

from __future__ import annotations

import pytest

from tests.text.published.files import EOS, model, template_names

_CHATML = {"<|im_end|>"}
_GEMMA4 = {"<turn|>", "<|tool_response>"}
_GLM = {"<|user|>", "<|observation|>"}
_DEEPSEEK = {"<｜end▁of▁sentence｜>"}
_LLAMA = {"<|eot_id|>"}
ENDS: dict[str, set[str]] = {
    "models--Apertus-8B-Instruct": {"<|assistant_end|>", "<|tools_suffix|>"},
    "models--Apriel-1.6-15b-Thinker-fixed": {"<|end|>"},
    "models--Bielik-11B-v3.0-Instruct": _CHATML,
    "models--ByteDance-Seed-OSS": {"<seed:eos>"},
    "models--Cohere2MoE": {"<|END_ACTION|>", "<|END_TEXT|>"},
    "models--CohereForAI-c4ai-command-r-plus-tool_use": {"<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>"},
    "models--GLM-4.6": _GLM,
    "models--GLM-5.2": _GLM,
    "models--GigaChat3.1-10B-A1.8B": {"<|message_sep|>"},
    "models--HuggingFaceTB-SmolLM3-3B": _CHATML,
    "models--Kimi-K2-Instruct": _CHATML,
    "models--Kimi-K2-Thinking": _CHATML,
    "models--LFM2-8B-A1B": _CHATML,
    "models--LFM2.5-Instruct": _CHATML,
    "models--MiMo-VL": _CHATML,
    "models--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _CHATML,
    "models--Qwen-Qwen2.5-7B-Instruct": _CHATML,
    "models--Qwen-Qwen3-0.6B": _CHATML,
    "models--Qwen3-Coder": _CHATML,
    "models--Qwen3.5-4B": _CHATML,
    "models--Reka-Edge": {"<sep>"},
    "models--StepFun3.5-Flash": _CHATML,
    "models--deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": _DEEPSEEK,
    "models--deepseek-ai-DeepSeek-V3.1": _DEEPSEEK,
    "models--deepseek-ai-DeepSeek-V3.2": _DEEPSEEK,
    "models--deepseek-ai-DeepSeek-V4": _DEEPSEEK,
    "models--google-gemma-2-2b-it": {"<end_of_turn>"},
    "models--google-gemma-4-31B-it-interleaved": {"<turn|>"},
    "models--ibm-granite-granite-3.3-2B-Instruct": {"<|end_of_text|>"},
    "models--llama-cpp-deepseek-r1": _DEEPSEEK,
    "models--meta-llama-Llama-3.1-8B-Instruct": _LLAMA,
    "models--meta-llama-Llama-3.2-3B-Instruct": _LLAMA,
    "models--moonshotai-Kimi-K2": _CHATML,
    "models--openai-gpt-oss-120b": {"<|call|>", "<|return|>"},
    "models--unsloth-Apriel-1.5": {"<|end|>"},
    "mrs--deepseek_tool_call": _DEEPSEEK,
    "mrs--gemma3n": {"<end_of_turn>"},
    "mrs--nousresearch_hermes2_pro_tool_use": _CHATML,
    "mrs--smollm3": _CHATML,
    "tok--deepseek_v3": {*_DEEPSEEK, "<｜tool▁outputs▁begin｜>"},
    "tok--llama3": _LLAMA,
    "trl--cohere2": {"<|END_RESPONSE|>"},
    "trl--deepseek_r1_distill": {*_DEEPSEEK, "<｜tool▁outputs▁begin｜>"},
    "trl--diffusion_gemma": _GEMMA4,
    "trl--gemma4": _GEMMA4,
    "trl--gemma4_v2": {"<turn|>"},
    "trl--gemma4_v3": _GEMMA4,
    "trl--gemma4_v4": _GEMMA4,
    "trl--gemma4_v5": _GEMMA4,
    "trl--glm4moe": _GLM,
    "trl--idefics3": {"<end_of_utterance>"},
    "trl--lfm2": _CHATML,
    "trl--lfm2_2_5": _CHATML,
    "trl--lfm2_2_5_v2": _CHATML,
    "trl--lfm2_2_5_vl": _CHATML,
    "trl--llama3": _LLAMA,
    "trl--llava_next": {"</s>"},
    "trl--nemotron_3_5_lightning": _CHATML,
    "trl--nemotron_3_super": _CHATML,
    "trl--phi3": {"<|end|>"},
    "trl--qwen2_5_vl": _CHATML,
    "trl--qwen3_6": _CHATML,
    "trl--qwen3_8": _CHATML,
    "trl--qwen3_instruct_2507": _CHATML,
    "trl--smolvlm": {"<end_of_utterance>"},
}
"""End marks by template, besides the configured end. An absent template writes none: it writes the configured
end, or writes roles as plain words."""


@pytest.mark.parametrize("name", template_names(default=4))
def test_ends_of_turn_are_those_of_the_template(name: str) -> None:
    loaded = model(name)
    names = {number: text for text, number in loaded.tokenizer.special.items()}
    assert {names[number] for number in loaded.end_ids} == {EOS, *ENDS.get(name, set())}
