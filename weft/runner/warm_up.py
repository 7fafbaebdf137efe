"""Warm-up steps of a GPU, computed before serving, so that no request waits for kernel compilation or
loading.

A kernel is compiled once per variant: few or many rows of a tile, keys in splits or in one piece. So prompts
of all sizes are computed once at the start of a context, and once behind enough positions for splits. Work
beyond the logits of one row (sampler, drafters, towers) and communication are compiled at first use.
"""

from __future__ import annotations

from weft.types.plan import Segment, StepPlan, column

FAR = 4096
"""Start of the second kind of warm-up prompt: more positions than any split has."""


def plans(most: int, longest: int) -> list[StepPlan]:
    """Return the warm-up plans, each with one prompt row in slot 0.

    most: maximum tokens of a step; longest: maximum positions of a sequence.
    """
    most = min(most, longest)
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    made = list[StepPlan]()
    # The largest prompt runs first, so that smaller prompts reuse its memory.
    for size in reversed(sizes):
        for start in dict.fromkeys((0, min(FAR, longest - size))):
            segment = Segment(
                slot=column([0]),
                gen=column([0]),
                start=column([start]),
                count=column([size]),
                logits=column([1]),
                sample=column([1]),
                next_k=column([0]),
            )
            made.append(StepPlan(step=len(made), prefill=segment))
    return made
