"""Steps that a GPU computes before it serves, so that no request waits for a kernel to be compiled or loaded.

A kernel is compiled once for each form that a step may need: for few and many rows of a tile, with keys in
splits or in one piece. So prompts of all sizes are computed once, at the begin of a context and behind so
many positions that keys come in splits. What a step needs beyond the logits of one row (the sampler,
drafters, towers) is compiled when it is first met, and so is everything of ranks that meet.
"""

from __future__ import annotations

from weft.types.plan import Segment, StepPlan, column

FAR = 4096
"""Positions before a prompt that is not the first of its context: more than any split has."""


def plans(most: int, longest: int) -> list[StepPlan]:
    """Of one prompt row each, in slot 0.

    most: tokens of a step, at most; longest: positions of a sequence, at most.
    """
    most = min(most, longest)
    sizes = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    made = list[StepPlan]()
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
