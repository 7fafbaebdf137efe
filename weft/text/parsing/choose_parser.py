"""Choice of the declaration for a model's output: by name, or from the files of the checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from weft.common.errors import ConfigError
from weft.text.parsing.declaration import OutputFormat, combined
from weft.text.parsing.formats import CALLS, REASONING
from weft.text.parsing.response_template import read_response_template

log = logging.getLogger(__name__)
_CALLS_BY_TEXT = (
    (("<|channel|>", "<|message|>"), "gpt_oss"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜",), "deepseek_v4"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<tool_sep>",), "hy_v3"),
    (("<tool_sep:opensource>",), "hy_v3"),
    (("<arg_key>",), "glm45"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|START_ACTION|>",), "command_a"),
    (("Action:", '"tool_name"'), "command_r"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [", "keep_past_thinking"), "lfm2"),
    (("<|tool_call>", "call:"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|function_call|>",), "gigachat3"),
    (("<|role_sep|>", "function call"), "gigachat3"),
    (("<tool_calls>[",), "apriel"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<function_calls>",), "olmo3"),
    (("<|tool_call:begin|>",), "solar_open"),
    (("<｜tool_calls_begin｜>",), "step3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<tool_call>",), "hermes"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("<|/tool|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("func_name1(",), "pythonic"),
    (("<|python_start|>",), "llama4"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|eom_id|>",), "llama3_json"),
    (('{"name": function name, "parameters"',), "llama3_json"),
)
"""(texts of a template, format of calls). The first row with all texts present wins. If no row matches the
template, the same rows are compared with the tokenizer's added tokens.
"""
_REASONING_BY_TEXT = (
    (("<|channel|>", "<|message|>"), "gpt_oss"),
    (("[THINK]",), "mistral"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>thought",), "gemma4"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<|START_THINKING|>",), "command_a"),
    (("<|inner_prefix|>",), "apertus"),
    (("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), "apriel"),
    (("<|think|>", "<|content|>"), "solar_open"),
    (("<think:opensource>",), "hy_v3"),
    (("Here is my thought process:",), "granite"),
    (("<think>", "<response>"), "granite"),
    (("<think>", "<answer>"), "hunyuan_a13b"),
    (("<think>",), "qwen3"),
    (("</think>", "keep_past_thinking"), "qwen3"),
    (("</think>",), "deepseek_r1"),
)
_BY_MODEL = {
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "gpt_oss": "gpt_oss",
    "kimi_k2": "kimi_k2",
    "kimi_linear": "kimi_k2",
    "glm4_moe": "glm45",
    "lfm2": "lfm2",
    "lfm2_moe": "lfm2",
    "llama4": "llama4",
    "smollm3": "hermes",
}
"""``model_type`` to format of calls, for templates without any sign of a format."""


class ModelHints(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a checkpoint's folder relevant to the output format."""

    template: str = ""
    """The chat template."""
    added: frozenset[str] = frozenset()
    """Texts of the tokenizer's added tokens."""
    model_type: str = ""
    response_template: Any = None
    """The ``response_template`` of tokenizer_config.json, in the form of transformers."""


def choose(tool_call_parser: str, reasoning_parser: str, hints: ModelHints) -> OutputFormat | None:
    """Return the declaration of a model, or None if the server separates nothing.

    Explicit names win over the checkpoint's ``response_template``, which wins over the template's texts. An
    unsupported ``response_template`` is logged and ignored. Raises ConfigError for an unknown name and for
    two formats in conflict.
    """
    calling = _named("tool_call_parser", tool_call_parser, CALLS)
    thinking = _named("reasoning_parser", reasoning_parser, REASONING)
    own = None
    if hints.response_template is not None and "auto" in (tool_call_parser, reasoning_parser):
        own = read_response_template(hints.response_template)
        if own is None:
            log.info(
                "the model's response_template is not fully supported; the chat template selects the parsers"
            )
    # Each of the two parsers is chosen alone, so a response_template may decide only one of the two.
    if tool_call_parser == "auto":
        calling = own if own is not None and own.calls else _calls_of(hints)
    if reasoning_parser == "auto":
        thinking = own if own is not None and own.reasoning else _reasoning_of(hints)
    try:
        made = combined(thinking, calling)
    except ValueError as error:
        raise ConfigError(
            f"--tool-call-parser and --reasoning-parser cannot be combined: {error}", param="tool_call_parser"
        ) from None
    return None if made is None else _as_written(made, hints)


def _calls_of(hints: ModelHints) -> OutputFormat | None:
    """Return the format of calls by template, model type or added tokens, in this order; None if unknown."""
    for texts, name in _CALLS_BY_TEXT:
        if all(text in hints.template for text in texts):
            return CALLS[name]
    if hints.model_type in _BY_MODEL:
        return CALLS[_BY_MODEL[hints.model_type]]
    for texts, name in _CALLS_BY_TEXT:
        if hints.added.issuperset(texts):
            return CALLS[name]
    return None


def _reasoning_of(hints: ModelHints) -> OutputFormat | None:
    """Return the format of reasoning by template or added tokens, in this order; None if unknown."""
    for texts, name in _REASONING_BY_TEXT:
        if all(text in hints.template for text in texts):
            return REASONING[name]
    for texts, name in _REASONING_BY_TEXT:
        if hints.added.issuperset(texts):
            return REASONING[name]
    return None


def _as_written(made: OutputFormat, hints: ModelHints) -> OutputFormat:
    """Return ``made`` with the spellings of the model's own template first.

    The first spelling counts for grammars, for a forced end of the reasoning, and for a reasoning block that
    the prompt has opened.
    """

    def known(text: str) -> bool:
        return text in hints.template or text in hints.added

    calls = made.calls
    # Mistral's two spellings begin alike; the tokenizer version decides.
    if calls and calls is CALLS["mistral"].calls:
        calls = calls if known("[ARGS]") else tuple(reversed(calls))
    elif calls and not known(calls[0].triggers[0]):
        # Every template has brackets, so a bracket says nothing.
        calls = tuple(sorted(calls, key=lambda call: call.line_start or not known(call.triggers[0])))
    reasoning = tuple(sorted(made.reasoning, key=lambda marks: not known(marks.open)))
    return msgspec.structs.replace(made, calls=calls, reasoning=reasoning)


def _named(flag: str, name: str, known: Mapping[str, OutputFormat]) -> OutputFormat | None:
    """Return the format of an explicit name; None for "auto" and "none".

    Raises ConfigError for an unknown name.
    """
    if name in ("auto", "none"):
        return None
    if name not in known:
        choices = ", ".join(["auto", "none", *sorted(known)])
        raise ConfigError(f"--{flag.replace('_', '-')} must be one of {choices}", param=flag)
    return known[name]
