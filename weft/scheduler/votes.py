"""The agreement of expert-parallel replicas before every step. Pure: equal votes, equal decisions.

A replica votes about the replica's next step. If any replica has a step, all replicas step: the others run a
plan without rows, to match collectives. If no replica has a step or unfinished work, the group sleeps. The
next request begins a new wave: the replica with the request wakes the others, which may not have read the
last decision yet. Waves are numbered, so a late wake-up for an old wave is ignored and no wake-up is lost.

Replicas compute with experts of each other, so no replica steps while the versions of the weights differ: a
replica that starts again has the weights of the start until an API server brings the replica up to date.

    replica 0   ... step, step, sleep ............... wave 2: step ...
    replica 1   ... step, step, sleep, request: begin(2), step ...
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from weft.common.errors import EngineDead
from weft.types.exchange import padded
from weft.types.plan import Agreement, PlannedRows

VERSION = 3


class Vote(msgspec.Struct, frozen=True, kw_only=True):
    """The vote of one replica about one step. Every field becomes an int64."""

    version: int = VERSION
    epoch: int = 0
    step: int = 0
    """Number of steps launched in the epoch."""
    wave: int = 0
    unfinished: bool = False
    """True if the replica has live sequences or steps in flight."""
    launch: bool = False
    """True if the replica has a plan, with rows or with slot updates only."""
    rows: int = 0
    """Number of rows of the plan; 0 without a plan."""
    tokens: int = 0
    overlap: bool = True
    """True if the plan should and can be split into two micro-batches; True without a plan."""
    micro_batch_tokens: int = 0
    """Number of tokens of the larger micro-batch."""
    drafts: int = 0
    rebalance: bool = False
    """True if the replica's schedule requests a move of experts now."""
    adapted: bool = False
    """True if a row has an adapter that changes experts."""
    updates: int = 0
    """Bytes of the replica's updates of adapters, which a second collective sends to the other replicas."""
    weights: int = 0
    """Version of the replica's weights."""


FIELDS = tuple(Vote.__struct_fields__)
_ALIKE = ("version", "epoch", "step", "wave")


def to_row(vote: Vote) -> np.ndarray:
    """Return the vote as int64 [fields]."""
    return np.array([int(getattr(vote, name)) for name in FIELDS], np.int64)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision from all votes."""

    launch: bool
    """True if every replica launches a step."""
    sleep: bool
    """True if no replica has anything left to do. Implies ``launch`` is False."""
    agreed: Agreement
    held: bool = False
    """True if the replicas have weights of different versions. Implies ``launch`` is False."""
    broken: bool = False
    """True if a replica has a plan although the group is ``held``: the plan was made, and can't be run."""
    updates: tuple[int, ...] = ()
    """Bytes of the updates of adapters, by replica."""
    others: dict[int, bytes] = {}
    """Updates of adapters of the other replicas that have updates. Set after the second collective."""


def decide(table: np.ndarray) -> Decision:
    """Return the decision for ``table``, int64 [replicas, fields], the votes in replica order.

    Raises EngineDead, with two replicas and their values, if the votes are about different steps.
    """
    columns = dict(zip(FIELDS, table.T.tolist(), strict=True))
    for name in _ALIKE:
        values: Sequence[int] = columns[name]
        for replica, value in enumerate(values):
            if value != values[0]:
                raise EngineDead(
                    f"replicas are not at the same step: {name} {values[0]} in replica 0, "
                    f"{value} in replica {replica}"
                )
    rows = columns["rows"]
    held, planned = len(set(columns["weights"])) > 1, any(columns["launch"])
    launch = planned and not held
    # A replica without rows does not object to overlap, but at least one replica must have rows.
    overlap = any(rows) and all(yes or not own for yes, own in zip(columns["overlap"], rows, strict=True))
    agreed = Agreement(
        wave=columns["wave"][0],
        padded_tokens=padded(max(columns["micro_batch_tokens" if overlap else "tokens"])),
        tokens=tuple(columns["tokens"]),
        overlap=overlap,
        drafts=max(columns["drafts"]),
        rebalance=launch and any(columns["rebalance"]),
        adapted=any(columns["adapted"]),
    )
    sleep = not any(columns["unfinished"]) and not planned
    return Decision(
        launch=launch,
        sleep=sleep,
        agreed=agreed,
        held=held,
        broken=held and planned,
        updates=tuple(columns["updates"]),
    )


def most_drafts(plan: PlannedRows) -> int:
    """Return the maximum number of drafts proposed in a row after the plan."""
    return max(int(segment.next_k.max(initial=0)) for segment in (plan.prefill, plan.decode))


class Waves:
    """The sleep state of one replica. Pure.

    A replica can call wave n + 1 only after the end of wave n is known.
    """

    def __init__(self) -> None:
        self.wave = 0
        """Number of the present wave, or of the last wave while asleep."""
        self.awake = False
        self._called = 0

    def begin(self) -> int | None:
        """Wake up for local work. Return the wave for which others must be woken; None if already awake."""
        if self.awake:
            return None
        self.wave += 1
        self._called = max(self._called, self.wave)
        self.awake = True
        return self.wave

    def wake(self, wave: int) -> None:
        """Handle a wake-up for ``wave`` from another replica. Raises EngineDead for an impossible number."""
        if wave > self.wave + 1:
            raise EngineDead(f"wave {wave} was called for during wave {self.wave}")
        self._called = max(self._called, wave)
        if not self.awake and wave > self.wave:
            self.wave = wave
            self.awake = True

    def sleep(self) -> None:
        """End the present wave. Begin the next wave if the wake-up has arrived already."""
        self.awake = False
        if self._called > self.wave:
            self.wave = self._called
            self.awake = True
