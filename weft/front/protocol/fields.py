"""Parameters of other servers and later APIs that Weft does not support, and values without effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

# fmt: off
UNSUPPORTED = frozenset((
    "functions", "function_call", "audio", "modalities", "web_search_options", "moderation",
    "guided_decoding_backend", "grammar", "json_schema", "regex", "ebnf", "use_beam_search",
    "length_penalty", "early_stopping", "chat_template", "documents", "mm_processor_kwargs",
    "kv_transfer_params", "truncate_prompt_tokens", "vllm_xargs", "logits_processors",
    "spaces_between_special_tokens", "return_tokens_as_token_ids", "lora_path", "typical_p",
    "mirostat_mode", "no_repeat_ngram_size", "cache_prompt", "suffix", "request_id", "bootstrap_host",
    "bootstrap_port", "bootstrap_room",
))
"""Unsupported parameters of both routes."""
# fmt: on
CHAT_ONLY = frozenset(
    (
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "reasoning_effort",
        "include_reasoning",
        "thinking_token_budget",
        "max_thinking_tokens",
        "thinking_budget",
        "thinking_budget_tokens",
        "enable_thinking",
        "thinking",
        "reasoning",
        "chat_template_kwargs",
    )
)
"""Chat parameters, refused in text completions."""


def is_one_of(*neutral: Any) -> Callable[[Any], bool]:
    """Return a predicate: True for a value equal to one of ``neutral``, without null fields. A boolean never
    equals a number, unlike in Python."""

    def is_neutral(value: Any) -> bool:
        if isinstance(value, dict):
            value = {name: one for name, one in value.items() if one is not None}
        return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)

    return is_neutral


def asks_no_processing(value: Any) -> bool:
    """Return True for settings of the image processor that are off, such as ``do_pan_and_scan: false``."""
    return isinstance(value, dict) and all(
        one is None or (one is False and name.startswith("do_pan")) for name, one in value.items()
    )


def asks_no_transfer(value: Any) -> bool:
    """Return True for KV transfer parameters that ask for no transfer: switches that are off, and empty
    values."""

    def is_off(name: str, one: Any) -> bool:
        return one is False if name.startswith("do_") else one in ([], {}, "")

    return isinstance(value, dict) and all(one is None or is_off(name, one) for name, one in value.items())


def asks_no_stream_options(value: Any) -> bool:
    """Return True for stream options that are all off. Some clients send such options without a stream."""
    names = ("include_usage", "include_obfuscation", "continuous_usage_stats")
    return isinstance(value, dict) and all(
        one is None or (one is False and name in names) for name, one in value.items()
    )


INSTEAD: dict[str, str] = {
    "kv_transfer_params": "Weft moves KV caches only between its own groups, behind one API server "
    "(weft serve --prefill P --decode D); send the whole request once, without kv_transfer_params",
}
"""Unsupported parameter -> what Weft does instead."""


#: Values without effect, dropped as if absent. Each is the default of a field in its own API (OpenAI's,
#: vLLM's, llama.cpp's), and equals Weft's behaviour. Values that ask for more than Weft's behaviour must
#: not be listed here.
NEUTRAL: dict[str, Callable[[Any], bool]] = {
    "tools": is_one_of([]),
    "functions": is_one_of([]),
    "function_call": is_one_of("none", "auto"),
    "response_format": is_one_of({"type": "text"}),
    "modalities": is_one_of(["text"]),
    "metadata": is_one_of({}),
    "user": is_one_of(""),
    "safety_identifier": is_one_of(""),
    "prompt_cache_key": is_one_of(""),
    "prompt_cache_retention": is_one_of(""),
    "suffix": is_one_of(""),
    "echo": is_one_of(False),
    "logprobs": is_one_of(False),
    "top_logprobs": is_one_of(0),
    "use_beam_search": is_one_of(False),
    "length_penalty": is_one_of(1),
    "early_stopping": is_one_of(False),
    "documents": is_one_of([]),
    "mm_processor_kwargs": asks_no_processing,
    "logits_processors": is_one_of([]),
    "spaces_between_special_tokens": is_one_of(True),
    "return_tokens_as_token_ids": is_one_of(False),
    "cache_salt": is_one_of(""),
    "vllm_xargs": is_one_of({}),
    "typical_p": is_one_of(1),
    "mirostat_mode": is_one_of(0),
    "no_repeat_ngram_size": is_one_of(0),
    "cache_prompt": is_one_of(True),
    "grammar": is_one_of(""),
    "kv_transfer_params": asks_no_transfer,
    "stream_options": asks_no_stream_options,
}

CHAT_NEUTRAL: dict[str, Callable[[Any], bool]] = {
    **NEUTRAL,
    "thinking_budget": is_one_of(-1),
    "thinking_budget_tokens": is_one_of(-1),
    "separate_reasoning": is_one_of(True),
    "stream_reasoning": is_one_of(True),
    "safe_prompt": is_one_of(False),
}
"""Values without effect in chat. A budget of -1 means no limit."""

ServiceTier: TypeAlias = Literal["auto", "default", "flex", "priority", "scale", "fast", "ultrafast"]
"""No effect: this server serves all tiers alike."""

HINTS: dict[str, Any] = {
    "cache_control": dict[str, Any],
    "keep_alive": int | float | str,
    "prediction": dict[str, Any],
    "prompt_cache_options": dict[str, Any],
    "provider": dict[str, Any],
    "service_tier": ServiceTier,
    "session_id": str,
    "store": bool,
    "usage": dict[str, Any],
    "verbosity": Literal["low", "medium", "high", "max"],
}
"""Parameters checked for their type but without effect. docs/http.md names each parameter."""

NO_TOOLS: dict[str, Callable[[Any], bool]] = {
    "tool_choice": is_one_of("none", "auto"),
    "parallel_tool_calls": is_one_of(True, False),
    "include_reasoning": is_one_of(True, False),
}
"""Values without effect for requests without tools and reasoning."""
