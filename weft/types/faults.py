"""Faults that are planted in ranks to see what becomes of them. No flag sets any: tests do, as data."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Phase: TypeAlias = Literal["load", "form", "stage", "collective", "rebalance", "sample", "read"]
"""The phase that a rank is in.

load        before its weights are read
form        its slots are empty, and it is about to meet the others
stage       a step came, and nothing of it was launched
collective  in the middle of a step's forward pass, as a collective is launched: the others are in it
rebalance   as a collective is launched that moves experts: some have come, others are on their way
sample      the step was launched, its sampling was not
read        the step is done, and not reported yet
"""
Deed: TypeAlias = Literal["kill", "stop", "raise"]
"""kill: SIGKILL; stop: SIGSTOP, it stays there and does nothing; raise: an exception."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that happens to ``rank`` once, when it has been in ``phase`` ``after`` times (since
    ``needs`` is there, if it is given).
    """

    rank: int
    phase: Phase
    deed: Deed
    after: int = 0
    mark: str
    """A file that is made when it befalls, so that no later process of the rank has it again."""
    needs: str = ""
    """The mark of a fault that must have befallen before this one can."""
