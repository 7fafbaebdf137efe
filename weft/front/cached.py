"""What the prefix cache did for a prompt, as APIs tell it."""

from __future__ import annotations


def cache_creation(tokens: int, cached: int, block: int) -> int:
    """Tokens of a prompt of which ``cached`` were found that are in full blocks of the cache afterwards, and
    were not before. ``block``: tokens of a block; 0 where nothing is cached.
    """
    return max(0, tokens // block * block - cached) if block else 0
