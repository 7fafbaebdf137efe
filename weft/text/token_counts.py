"""Token counts of prompts and outputs, except plain totals."""

from __future__ import annotations

from weft.text.tokenizer import Tokenizer


def cache_creation(tokens: int, cached: int, block: int) -> int:
    """Return the number of prompt tokens newly in full cache blocks. ``tokens``: prompt tokens; ``cached``:
    tokens found in the cache; ``block``: tokens per block, 0 without caching."""
    return max(0, tokens // block * block - cached) if block else 0


def reasoning_tokens(tokenizer: Tokenizer, reasoning: str, output: int) -> int:
    """Return the number of reasoning tokens among the ``output`` tokens of a choice, by tokenizing the
    reasoning text."""
    return min(len(tokenizer.encode(reasoning)), output) if reasoning else 0
