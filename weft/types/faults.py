"""Faults that tests inject into ranks. No flag sets faults."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Phase: TypeAlias = Literal["load", "form", "stage", "collective", "rebalance", "sample", "read"]
"""The phase of a rank in which a fault happens.

load        before the weights are read
form        the slots are empty, and the rank is about to connect to the other ranks
stage       a step has arrived, and nothing of the step is launched
collective  in the middle of a step's forward pass, at the launch of a collective that other ranks have joined
rebalance   at the launch of a collective that moves experts: some experts have moved, others not yet
sample      the step is launched, its sampling is not
read        the step has ended, and its outcome is not reported yet
"""
Deed: TypeAlias = Literal["kill", "stop", "raise"]
"""kill: SIGKILL. stop: SIGSTOP, so the process stays and does nothing. raise: an exception."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault of ``rank``. Happens once, after ``after`` visits of ``phase``.

    With ``needs``, only visits of the phase after the file ``needs`` exists count.
    """

    rank: int
    phase: Phase
    deed: Deed
    after: int = 0
    mark: str
    """A file created when the fault happens, to prevent a repeat in a later process of the rank."""
    needs: str = ""
    """The mark of another fault. The other fault must happen first."""
