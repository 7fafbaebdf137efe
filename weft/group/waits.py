"""How long ranks and heads of a group are waited for. Seconds."""

from __future__ import annotations

HELLO_S = 120.0
"""Seconds from starting a rank's process to its hello."""
LOAD_S = 3600.0
"""Seconds that ranks may take to load, and heads to come, as long as they show that they run."""
LAG = 1
"""How many steps the reports of the other ranks may be behind a result that counts."""
LOOK_MEETING_S, LOOK_S = 0.02, 1.0
"""Seconds between two looks at the leases of other heads: while they are waited for, and while steps run."""


def late(what: str, patience: float) -> str:
    """Why a rank is lost that did not do ``what`` in so many seconds."""
    return f"it did not {what} within {patience:g} s"
