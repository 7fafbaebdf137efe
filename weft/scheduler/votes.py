"""What the replicas of a domain agree on before every step. Pure: votes in, the same decision out everywhere.

A replica votes about the step that it would launch. If any replica has one, all of them step: the others run
a plan without rows, so that collectives match. If no replica has a step or anything unfinished, the domain
sleeps. The next request begins a new wave: the replica that gets it wakes the others, which may not have read
the last decision yet. Waves are numbered, so a late wake-up for an old wave is ignored, and none is lost.

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
    """One replica's vote about one step. Every field becomes an int64."""

    version: int = VERSION
    epoch: int = 0
    step: int = 0
    """Steps launched in this epoch."""
    wave: int = 0
    unfinished: bool = False
    """Whether this replica has live sequences or steps in flight."""
    launch: bool = False
    """Whether this replica has a plan: with rows, or with ops alone."""
    rows: int = 0
    """Rows of the plan; 0 without one."""
    tokens: int = 0
    overlap: bool = True
    """Whether the plan should be split into two micro-batches, and can; true without a plan."""
    micro_batch_tokens: int = 0
    """Tokens of the larger micro-batch."""
    drafts: int = 0
    rebalance: bool = False
    """Whether it is this replica's time to move experts."""


FIELDS = tuple(Vote.__struct_fields__)
_ALIKE = ("version", "epoch", "step", "wave")


def to_row(vote: Vote) -> np.ndarray:
    """int64 [fields]."""
    return np.array([int(getattr(vote, name)) for name in FIELDS], np.int64)


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """The decision that follows from all votes."""

    launch: bool
    """Every replica launches the step."""
    sleep: bool
    """Nothing is left to do anywhere. Implies no launch."""
    agreed: Agreement


def decide(table: np.ndarray) -> Decision:
    """table: int64 [replicas, fields], the votes in order of replicas.

    Raises EngineDead, naming two replicas and their values, when they do not vote about the same step.
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
    launch = any(columns["launch"])
    overlap = any(rows) and all(yes or not own for yes, own in zip(columns["overlap"], rows, strict=True))
    agreed = Agreement(
        wave=columns["wave"][0],
        padded_tokens=padded(max(columns["micro_batch_tokens" if overlap else "tokens"])),
        tokens=tuple(columns["tokens"]),
        overlap=overlap,
        drafts=max(columns["drafts"]),
        rebalance=launch and any(columns["rebalance"]),
    )
    return Decision(launch=launch, sleep=not any(columns["unfinished"]) and not launch, agreed=agreed)


def most_drafts(plan: PlannedRows) -> int:
    """Most drafts that a row proposes after the plan."""
    return max(int(segment.next_k.max(initial=0)) for segment in (plan.prefill, plan.decode))


class Waves:
    """Whether one replica is awake. Pure.

    Wave n + 1 can be called only by a replica that knows of the end of wave n.
    """

    def __init__(self) -> None:
        self.wave = 0
        """Number of the present wave, or of the last one."""
        self.awake = False
        self._called = 0

    def begin(self) -> int | None:
        """There is work here. Returns the wave to wake others for; None when the domain is awake already."""
        if self.awake:
            return None
        self.wave += 1
        self._called = max(self._called, self.wave)
        self.awake = True
        return self.wave

    def heard(self, wave: int) -> None:
        """Handles a wake-up for ``wave`` from another replica. Raises EngineDead for an impossible number."""
        if wave > self.wave + 1:
            raise EngineDead(f"wave {wave} was called for during wave {self.wave}")
        self._called = max(self._called, wave)
        if not self.awake and wave > self.wave:
            self.wave = wave
            self.awake = True

    def sleep(self) -> None:
        """Ends the present wave, and begins the next one if a wake-up for it has come already."""
        self.awake = False
        if self._called > self.wave:
            self.wave = self._called
            self.awake = True
