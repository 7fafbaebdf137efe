"""Who gives up its slot for a sequence that waits while all slots are taken."""

from __future__ import annotations

from weft.scheduler.sequence import MOST_YIELDS, TURN, Running, Sequence
from weft.scheduler.state import SchedulerState


def crowding(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """The sequence that should give up its slot for ``sequence``, or None."""
    return _of_larger_share(state, sequence) or _of_longer_turn(state, sequence)


def _of_larger_share(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """The last in order of the share of the same priority that runs most.

    If that runs at least two more than the share of ``sequence``: then the difference falls, so that no
    two ever send each other away in turns. Nobody gives way so twice, and who is protected never does;
    nor one that was admitted in this plan: ranks do not know of it yet, and could not free its slot.
    """
    share, victim = sequence.share, None
    if share is None or not state.waiting.large:
        return None
    most = share.running + 1
    if len(state.running) - share.running <= most:
        return None
    for other in reversed(state.running):
        theirs = other.share
        if theirs is None or theirs.priority != share.priority or theirs.running <= most:
            continue
        known = isinstance(other.state, Running) and other.state.last_step >= 0
        if known and not other.yielded and not other.protected:
            victim, most = other, theirs.running
    return victim


def _of_longer_turn(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """The last in order that has had ``TURN`` tokens since it was admitted.

    Anybody of a lower priority, or of the same and a larger share (no sibling, nobody who would ask the slot
    back), for a newcomer, so that short and urgent requests get in where long ones have all slots; whoever
    of those came later for one that gave way. A newcomer that turns out to be long so returns the slot, and
    the order is first come, first served again: while one that gave way waits, it is first. Not without
    prefix caching, where all that it had would be computed again; nor one whose cache came by a room, which
    would be sent again.
    """
    share = sequence.share
    if share is None or not state.kv.enable_prefix_caching:
        return None
    slots, columns = state.order(), state.columns
    had = columns.num_computed[slots] - columns.known[slots]
    for other in state.in_slot[slots[had >= TURN][::-1]].tolist():
        if not sequence.newcomer and other.key < sequence.key:
            return None  # nor who comes before it
        if other.key[0] < sequence.key[0] or other.protected or other.yielded >= MOST_YIELDS:
            continue
        urgent = other.key[0] > sequence.key[0]
        if other.room is None and (urgent or other.share.running > share.running):
            result: Sequence = other
            return result
    return None
