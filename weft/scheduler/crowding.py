"""Who gives up its slot for a sequence that waits while all slots are taken."""

from __future__ import annotations

from weft.scheduler.sequence import MOST_YIELDS, TURN, Running, Sequence
from weft.scheduler.state import SchedulerState


def crowding(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """The sequence that should give up its slot for ``sequence``, or None."""
    return _of_larger_share(state, sequence) or _of_longer_turn(state, sequence)


def _of_larger_share(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """The last sequence, in order, of the share of the same priority that runs most; None if that share does
    not run at least two sequences more than the share of ``sequence``.

    With two more, the difference between the shares falls, so two shares never take a slot from each other in
    turns. Never a victim: a sequence that gave way before, a protected one, and one that was admitted in this
    plan (ranks do not know of it yet, and could not free its slot).
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
    """The last sequence, in order, that has had ``TURN`` tokens since it was admitted.

    For a newcomer: one of a lower priority, or one of the same priority whose share runs more sequences (so
    it is no sibling, and would not take the slot back). So short and urgent requests get in where long ones
    have all slots. For a sequence that gave way before: only one of those that also comes after it in order.
    So a newcomer that turns out to be long returns the slot, and the order is first come, first served again.

    None without prefix caching, where all that the victim had would be computed again. Never a sequence whose
    cache came by a room: it would have to be sent again.
    """
    share = sequence.share
    if share is None or not state.kv.enable_prefix_caching:
        return None
    slots, columns = state.order(), state.columns
    had = columns.num_computed[slots] - columns.known[slots]
    for other in state.in_slot[slots[had >= TURN][::-1]].tolist():
        if not sequence.newcomer and other.key < sequence.key:
            return None  # the rest come before ``sequence`` as well
        if other.key[0] < sequence.key[0] or other.protected or other.yielded >= MOST_YIELDS:
            continue
        urgent = other.key[0] > sequence.key[0]
        if other.room is None and (urgent or other.share.running > share.running):
            result: Sequence = other
            return result
    return None
