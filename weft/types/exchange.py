"""How the rows of a step reach experts of other ranks: what a step carries of it, as data."""

from __future__ import annotations

import msgspec

FORMS = ("reduce", "low-latency", "gather", "throughput")
"""Forms of dispatch, in the order in which votes of replicas for one step are compared: the last wins."""


PADS = (1, 2, 4, *range(8, 65, 8))
"""What replicas agree on in place of the most tokens that one has, if the last of these holds them."""


def padded(tokens: int) -> int:
    """The least of ``PADS`` that holds ``tokens``; of more, those: few sizes are met, and can be captured."""
    return next((pad for pad in PADS if pad >= tokens), tokens)


class Exchange(msgspec.Struct, frozen=True):
    """The exchange of one step's rows. What no agreement says is exchanged with the rows."""

    form: str = ""
    """One of ``FORMS``; empty: the ranks' own rule, which is the same on all of them."""
    rows: int = 0
    """At least the most tokens that a replica has in the step; 0: replicas did not agree on it."""


UNAGREED = Exchange()
