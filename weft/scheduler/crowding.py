"""Choose the running sequence that gives up its slot for a waiting sequence when all slots are taken."""

from __future__ import annotations

from weft.scheduler.sequence import MOST_YIELDS, TURN, Running, Sequence
from weft.scheduler.state import SchedulerState
from weft.types.priority import BATCH_PRIORITY


def choose_victim(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """Return the running sequence that must give up its slot for ``sequence``; None if no running sequence
    must."""
    return (
        batch_victim(state, sequence)
        or _victim_of_larger_share(state, sequence)
        or _victim_of_longer_turn(state, sequence)
    )


def batch_victim(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """Return the last running sequence of a batch, if ``sequence`` belongs to no batch; else None.

    A sequence of a batch gives way at once, any number of times, protected or not. Not a victim: a sequence
    admitted in this plan (the ranks do not know the slot yet), and a sequence with KV from a transfer.
    """
    if sequence.key[0] >= BATCH_PRIORITY:
        return None
    for other in reversed(state.running):
        if other.key[0] < BATCH_PRIORITY:
            return None  # the running sequences are in order of priority
        if other.transfer is None and state.planned(other):
            return other
    return None


def online_work(state: SchedulerState) -> tuple[bool, bool]:
    """Return (an online sequence runs or waits, batches run while an online prompt waits or is prefilled).

    Online: not of a batch.
    """
    waits = bool(state.waiting) and state.waiting.first().key[0] < BATCH_PRIORITY
    runs = bool(state.running) and state.running.first().key[0] < BATCH_PRIORITY
    if not (batches := num_batch(state)):
        return waits or runs, False
    prompt = waits or bool(state.columns.prefilling(state.order()[:-batches]).any())
    return waits or runs, prompt


def num_batch(state: SchedulerState) -> int:
    """Return the number of slots of batches, which are the last in scheduling order."""
    count = 0
    for sequence in reversed(state.running):
        if sequence.key[0] < BATCH_PRIORITY:
            break
        count += isinstance(sequence.state, Running)
    return count


def _victim_of_larger_share(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """Return the last sequence of the largest share with the same priority; None if the difference is too
    small.

    The largest share must run at least two sequences more than the share of ``sequence``. Then the difference
    falls with the handover, so two shares never take a slot from each other in turns. Not a victim: a
    sequence preempted for others before, a protected sequence, and a sequence admitted in this plan (the
    ranks do not know the slot yet).
    """
    share, victim = sequence.share, None
    if share is None or not state.waiting.large:
        return None
    most = share.running + 1
    # Even a share with all other sequences would not be larger by two.
    if len(state.running) - share.running <= most:
        return None
    for other in reversed(state.running):
        theirs = other.share
        if theirs is None or theirs.priority != share.priority or theirs.running <= most:
            continue
        if state.planned(other) and not other.yielded and not other.protected:
            victim, most = other, theirs.running
    return victim


def _victim_of_longer_turn(state: SchedulerState, sequence: Sequence) -> Sequence | None:
    """Return the last sequence, in scheduling order, that produced ``TURN`` tokens since admission; or None.

    Short and urgent requests thus get slots while long requests have all slots. For a newcomer: a sequence of
    a lower priority, or of the same priority from a share with more running sequences. Parallel samples
    belong to the same share and are no victims, so a slot is not taken back at once. For a sequence preempted
    for others before: also later in scheduling order. A long newcomer thus returns the slot, and the order is
    first come, first served again.

    None without prefix caching, because the victim would recompute everything. A sequence with KV from a
    transfer is no victim, because the KV would have to be sent again.
    """
    share = sequence.share
    if share is None or not state.kv.enable_prefix_caching:
        return None
    slots, columns = state.order(), state.columns
    produced = columns.num_computed[slots] - columns.known[slots]  # output tokens since the admission
    for other in state.in_slot[slots[produced >= TURN][::-1]].tolist():
        if not sequence.newcomer and other.key < sequence.key:
            return None  # all further candidates precede `sequence` as well
        if other.key[0] < sequence.key[0] or other.protected or other.yielded >= MOST_YIELDS:
            continue
        urgent = other.key[0] > sequence.key[0]
        if other.transfer is None and (urgent or other.share.running > share.running):
            result: Sequence = other
            return result
    return None
