"""The exchange of a step's rows with experts on other ranks, as data."""

from __future__ import annotations

import msgspec

FORMS = ("reduce", "low-latency", "gather", "throughput")
"""Forms of dispatch. If replicas vote for different forms of a step, the form later in the tuple is used."""

PADS = (1, 2, 4, *range(8, 65, 8))
"""Padded numbers of tokens per replica. Few different sizes occur, so that steps can be captured."""


def padded(tokens: int) -> int:
    """Return the smallest of ``PADS`` that is at least ``tokens``; ``tokens`` itself above the largest."""
    return next((pad for pad in PADS if pad >= tokens), tokens)


class Exchange(msgspec.Struct, frozen=True):
    """The exchange of one step's rows. Without an agreement, ranks exchange the values with the rows."""

    form: str = ""
    """One of ``FORMS``; empty for the ranks' own rule, which is the same on all ranks."""
    rows: int = 0
    """Upper bound of the tokens of a replica in the step; 0 without an agreement of the replicas."""
    adapted: bool = False
    """True if rows of other replicas may have adapters of experts."""


UNAGREED = Exchange()
