"""What APIs tell of a prompt's and an output's tokens beside their number."""

from __future__ import annotations

from weft.text.tokenizer import Tokenizer


def cache_creation(tokens: int, cached: int, block: int) -> int:
    """Tokens of a prompt of which ``cached`` were found that are in full blocks of the cache afterwards, and
    were not before. ``block``: tokens of a block; 0 where nothing is cached.
    """
    return max(0, tokens // block * block - cached) if block else 0


def thought_tokens(tokenizer: Tokenizer, thought: str, output: int) -> int:
    """How many of the ``output`` tokens of a choice are thoughts: as many as their text takes."""
    return min(len(tokenizer.encode(thought)), output) if thought else 0
