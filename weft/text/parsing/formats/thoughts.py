"""Thoughts in tags: ``<think>...</think>`` and its relatives."""

from __future__ import annotations

from weft.text.parsing.declaration import OutputFormat, Thought

QWEN3 = OutputFormat(name="qwen3", thoughts=(Thought(open="<think>", close="</think>"),))
DEEPSEEK_R1 = OutputFormat(
    name="deepseek_r1", thoughts=(Thought(open="<think>", close="</think>", implied=True),)
)
FORMATS = (QWEN3, DEEPSEEK_R1)
