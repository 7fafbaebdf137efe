"""Begin an attempt of a sequence, and decide whether another attempt may follow a refusal. No clock, no
socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.control.fleet.instance_table import InstanceTable
from weft.control.fleet.instances import Instance
from weft.control.fleet.ledger import LedgerEntry, is_refusal
from weft.control.fleet.pairs import Route, serve, ticketed
from weft.types import messages as m


@dataclass(slots=True)
class Began:
    """The attempts begun by one call: messages to send, in order, and counts."""

    submits: list[tuple[Instance, m.Submit]] = field(default_factory=list)
    paired: int = 0
    """Sequences sent to two instances."""
    local: int = 0
    """Sequences sent to a decode instance alone, for lack of a prefill instance."""
    encodes: Counter[str] = field(default_factory=Counter)
    """Images sent to encode instances. Key "first" for the first attempt of a sequence, else "again"."""


def begin(route: Route, group: Sequence[LedgerEntry], transfer: float) -> Began:
    """Begin the next attempt of each sequence in ``group`` at the instances of ``route``.

    The sequences share a prompt.

    ``transfer`` is the maximum number of seconds for one transfer. Changes the loads of the instances and, in
    the ledger entries, attempt, pair, places and encoders. The caller sends ``Began.submits``.
    """
    compute, decode, encoders = route
    began = Began()
    for number, entry in enumerate(group):
        submit = entry.again()
        sequence = submit.sequence
        tokens = (len(submit.prompt_ids) + len(submit.emitted_ids)) // 4
        # Only the first sequence adds the prompt to the load: the others share the computed blocks.
        compute.begin(sequence, 0 if number else tokens)
        if decode is not None:
            decode.begin(sequence, 0)
            entry.pair = (compute.name, decode.name)
            began.paired += 1
        elif compute.role == "decode" and entry.pinned is None:
            began.local += 1
        for instance, its in ticketed(route, submit, transfer, first=not number):
            if instance in encoders:
                instance.begin(sequence, sum(item.count for item in its.media))
                entry.encoders[instance.name] = None
                began.encodes["again" if entry.attempt else "first"] += len(its.media)
            entry.places[instance.name] = entry.attempt
            began.submits.append((instance, its))
    return began


def may_retry(
    table: InstanceTable, local: bool, instance: Instance, entry: LedgerEntry, event: m.TokenEvent
) -> bool:
    """Return True if ``event`` refuses the sequence for lack of room and another attempt may succeed.

    Another attempt needs another instance that has not refused the sequence. A refusal by an encode instance
    needs no other instance: the sequence waits for room. With ``local``, decode instances also compute
    prompts. Refusals of pinned sequences are final.
    """
    if entry.pinned is not None or not is_refusal(event):
        return False
    # the compute instance has accepted the prompt, so the sequence can wait for an encoder
    if instance.name in entry.encoders:
        return True
    takers = table.takers(leaving=entry.submit.sequence)
    others = [i for i in takers if i is not instance and i.name not in entry.refused]
    return serve(others, local)
