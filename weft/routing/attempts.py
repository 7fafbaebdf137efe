"""How an attempt of a sequence begins, and whether another one may follow a refusal. No clock, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.routing.abilities import understood
from weft.routing.instance_table import InstanceTable
from weft.routing.instances import Instance
from weft.routing.ledger import LedgerEntry, is_refusal
from weft.routing.pairs import Route, serve, ticketed
from weft.types import messages as m


@dataclass(slots=True)
class Began:
    """The attempts that began: messages to send, in order, and counts."""

    submits: list[tuple[Instance, m.Submit]] = field(default_factory=list)
    paired: int = 0
    """Sequences that are sent to two instances."""
    local: int = 0
    """Sequences that are prefilled where they are decoded, for want of one that prefills."""
    encodes: Counter[str] = field(default_factory=Counter)
    """Images that are sent to instances that encode: "first" or "again", by the attempt."""


def begin(route: Route, group: Sequence[LedgerEntry], transfer: float) -> Began:
    """Begins the next attempt of each sequence of ``group``, which share a prompt, at the instances of
    ``route``. ``transfer``: seconds that one sequence's cache may take from one instance to the other.
    """
    compute, decode, encoders = route
    began = Began()
    for number, entry in enumerate(group):
        submit = entry.again()
        sequence = submit.sequence
        tokens = (len(submit.prompt_ids) + len(submit.emitted_ids)) // 4
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
            began.submits.append((instance, understood(its, instance)))
    return began


def may_retry(
    table: InstanceTable, local: bool, instance: Instance, entry: LedgerEntry, event: m.TokenEvent
) -> bool:
    """Return True if ``event`` says that ``instance`` has no room, and another one may have.

    ``local``: instances that decode compute prompts, too.
    """
    if entry.pinned is not None or not is_refusal(event):
        return False
    if instance.name in entry.encoders:  # where the prompt is computed there is room, so this one waits
        return True
    takers = table.takers(leaving=entry.submit.sequence)
    others = [i for i in takers if i is not instance and i.name not in entry.refused]
    return serve(others, local)
