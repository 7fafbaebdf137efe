"""Which declaration reads a model's output: by name, or by what the checkpoint's folder shows."""

from __future__ import annotations

from collections.abc import Mapping

from weft.common.errors import ConfigError
from weft.text.parsing.declaration import OutputFormat, combined
from weft.text.parsing.formats import CALLS, THOUGHTS


def choose(
    tool_call_parser: str, reasoning_parser: str, template: str | None, added: Mapping[str, int]
) -> OutputFormat | None:
    """The declaration of a model; None where nothing is told apart.

    ``template`` is the chat template, ``added`` the tokenizer's added tokens. Raises ConfigError for a name
    that is none.
    """
    calling = _named("tool_call_parser", tool_call_parser, CALLS)
    thinking = _named("reasoning_parser", reasoning_parser, THOUGHTS)
    if tool_call_parser == "auto" and "<tool_call>" in (template or ""):
        calling = CALLS["hermes"]
    if reasoning_parser == "auto" and ("<think>" in (template or "") or "<think>" in added):
        thinking = THOUGHTS["qwen3"]
    return combined(thinking, calling)


def _named(flag: str, name: str, known: Mapping[str, OutputFormat]) -> OutputFormat | None:
    if name in ("auto", "none"):
        return None
    if name not in known:
        choices = ", ".join(["auto", "none", *sorted(known)])
        raise ConfigError(f"--{flag.replace('_', '-')} must be one of {choices}", param=flag)
    return known[name]
