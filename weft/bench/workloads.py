"""The workloads for the comparison of engines, as data: every engine gets the same token ids.

Greedy, without end-of-text, so each request produces exactly ``output_tokens`` tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from weft.common.errors import ConfigError

Measure = Literal["output_rate", "token_seconds", "prompt_rate", "serving"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one shape. ``concurrency`` is None for a workload that runs at once, in process."""

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    measure: Measure
    """The main number: output tokens/s, seconds per token, prompt tokens/s, or latency over HTTP."""

    @property
    def about(self) -> str:
        """One line for help texts and tables."""
        how = "at once" if self.concurrency is None else f"over HTTP, {self.concurrency} at a time"
        many = f"{self.requests} requests" if self.requests > 1 else "1 request"
        return f"{many} of {self.prompt_tokens} + {self.output_tokens} tokens {how}"


WORKLOADS: dict[str, Workload] = {
    one.name: one
    for one in (
        Workload("W1", 32, 512, 128, None, "output_rate"),
        Workload("W2", 1, 32, 256, None, "token_seconds"),
        Workload("W3", 8, 2048, 1, None, "prompt_rate"),
        Workload("W4", 32, 256, 64, 8, "serving"),
    )
}


def safe_range(vocab_size: int) -> range:
    """Return the token ids that are ordinary text in practically every vocabulary.

    Vocabularies have bytes and control tokens at both ends, so a 32nd part is left out at either end. Raise
    ConfigError for a vocabulary too small to choose from.
    """
    edge = max(vocab_size // 32, 1)
    if vocab_size - 2 * edge < 2:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens is too small to draw prompts from")
    return range(edge, vocab_size - edge)


def random_ids(key: str, length: int, vocab_size: int) -> list[int]:
    """Return ``length`` ids of ``safe_range``, determined by ``key`` alone, on every Python version."""
    safe = safe_range(vocab_size)
    # Only random() is stable across Python versions.
    draw = random.Random(key).random
    return [safe.start + int(draw() * len(safe)) for _ in range(length)]


def prompts(workload: Workload, repetition: int, vocab_size: int) -> list[list[int]]:
    """Return [requests][prompt_tokens] ids. Another ``repetition`` shares no prefix, so caches don't help."""
    return [
        random_ids(f"{workload.name} {repetition} {number}", workload.prompt_tokens, vocab_size)
        for number in range(workload.requests)
    ]
