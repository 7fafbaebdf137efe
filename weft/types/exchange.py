"""The exchange of a step's rows with experts on other ranks, as data."""

from __future__ import annotations

import msgspec

FORMS = ("reduce", "low-latency", "gather", "throughput")
"""Forms of dispatch. If the replicas vote for different forms of one step, the form later in the tuple
wins.
"""


PADS = (1, 2, 4, *range(8, 65, 8))
"""Agreed sizes of replicas, in place of the exact maximum of tokens, up to the largest size."""


def padded(tokens: int) -> int:
    """Return the smallest of ``PADS`` not below ``tokens``, or ``tokens`` above the largest. Few different
    sizes occur, so steps can be captured.
    """
    return next((pad for pad in PADS if pad >= tokens), tokens)


class Exchange(msgspec.Struct, frozen=True):
    """The exchange of one step's rows. Values without an agreement are exchanged together with the rows."""

    form: str = ""
    """One of ``FORMS``; empty for the ranks' own rule, which is the same on all ranks."""
    rows: int = 0
    """Upper bound of the tokens of a replica in the step; 0 without an agreement of the replicas."""
    adapted: bool = False
    """True if rows of other replicas may have adapters of experts."""


UNAGREED = Exchange()
