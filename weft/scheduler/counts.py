"""The counters of a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counts:
    """Counters since start, named as in EngineStats."""

    steps: int = 0
    mixed_steps: int = 0
    idle_steps: int = 0
    prefill_rows: int = 0
    prefill_tokens: int = 0
    decode_rows: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    row_errors: int = 0
    recoveries: int = 0
    requeued: int = 0
    prefix_resets: int = 0
    forgotten_blocks: int = 0
    constrained_steps: int = 0
    routed_tokens: int = 0
    """Computed tokens whose experts were recorded for a request."""
    grammar_errors: int = 0
    drafts: list[int] = field(default_factory=list)
    """Number of verified drafts by draft position in the row."""
    drafts_accepted: list[int] = field(default_factory=list)
