"""Invariants of a simulated cluster, and a token model that makes the invariants checkable.

A token is a function of prompt, seed, choice and position. So every process computes the same token, and each
stream can be compared with the expected tokens.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from weft.common.errors import RowError
from weft.types.messages import LogprobColumns, TokenEvent
from weft.types.plan import AllocSlot, LogprobRows, StepPlan, StepResult, column
from weft.types.sampling import TokenParams

HORIZON = 90.0
"""Virtual seconds within which every schedule must end."""
ANSWERED = 29.0
"""Virtual seconds within which every client must have its answer. A receiver alone gives up a transfer that
nobody has begun after 30 s: before, the API server must have found another engine."""
VOCABULARY = 40
_NO_DRAFTS = column([0] * 64)


class Violation(Exception):
    """A violated invariant."""


def require(holds: bool, what: str) -> None:
    """Raise Violation with the text ``what`` unless ``holds``."""
    if not holds:
        raise Violation(what)


def token_key(prompt: bytes, seed: int, choice: int) -> int:
    """Return the key of a sequence. All tokens are a function of the key and the position."""
    return zlib.crc32(prompt, seed * 131 + choice)


def token(key: int, position: int) -> int:
    """Return the token at ``position`` of the sequence with the key ``key``."""
    mixed = ((key ^ (position * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    return (mixed >> 11) % VOCABULARY


def output(key: int, num_prompt: int, params: TokenParams, max_model_len: int) -> tuple[list[int], str]:
    """Return all tokens of an undisturbed sequence, and the finish reason ("stop" or "length")."""
    tokens: list[int] = []
    while True:
        tokens.append(token(key, num_prompt + len(tokens)))
        if tokens[-1] in params.stop_ids:
            return tokens, "stop"
        if len(tokens) >= params.max_tokens or num_prompt + len(tokens) >= max_model_len:
            return tokens, "length"


class RankStep(NamedTuple):
    """The part of a plan that a rank needs. A rank computes from the step and from its slot table alone."""

    allocated: list[tuple[int, int]]
    """(slot, key) of each newly allocated slot."""
    sampled: list[tuple[int, int]]
    """(slot, position) of each sampled token."""
    tokens: int
    """Number of tokens computed in the step."""

    def run(self, slots: dict[int, int]) -> int:
        """Run the step on the slot table ``slots`` (slot -> key). Return the checksum of the sampled
        tokens."""
        slots.update(self.allocated)
        checksum = 1
        for slot, position in self.sampled:
            checksum = (checksum * VOCABULARY + token(slots[slot], position)) & 0xFFFFFFFF
        return checksum


class TokenModel:
    """A device that samples the tokens of ``token``. Reads only its slot table and the plan, like a
    worker."""

    def __init__(self, row_errors: Mapping[int, int], poison: Mapping[int, int]) -> None:
        """Create a model without sequences.

        ``row_errors`` maps a key to a position with non-finite logits. ``poison`` maps a key to a position:
        the process that computes the position dies.
        """
        self._row_errors = row_errors
        self._poison = poison
        self._slots: dict[int, tuple[int, list[int]]] = {}
        """Slot -> (key, known ids)."""

    def clear(self) -> None:
        """Empty all slots."""
        self._slots.clear()

    def run(self, plan: StepPlan) -> tuple[StepResult, RankStep, bool]:
        """Run ``plan`` on the slot table.

        Return (result, the same step for another rank, True if the process dies of it). Raise Violation for a
        wrong allocation.
        """
        step = RankStep([], [], 0)
        for op in plan.ops:
            if isinstance(op, AllocSlot):
                step.allocated.append((op.slot, self._allocate(op)))
        rows: list[int] = []
        tokens: list[int] = []
        offsets = [0]
        errors = []
        logprobs: list[tuple[int, int]] = []  # (prompt token, its position)
        logprob_offsets = [0]
        dies = False
        total = 0
        number = -1
        # Rows of the result follow the layout of the plan: prefill rows, then decode rows.
        for segment in (plan.prefill, plan.decode):
            if not segment.rows:
                continue
            columns = (segment.slot, segment.start, segment.count, segment.logits, segment.sample)
            for slot, start, count, logits, sample in zip(*(one.tolist() for one in columns), strict=True):
                number += 1
                total += count
                if not logits:
                    continue
                key, ids = self._slots[slot]
                end = start + count
                if sample:
                    # A continued sequence may recompute the position as input, so later samples count, too.
                    dies |= end >= self._poison.get(key, end + 1)
                    if end >= self._row_errors.get(key, end + 1):
                        errors.append((len(rows), RowError("logits are not finite").info()))
                    tokens.append(token(key, end))
                    step.sampled.append((slot, end))
                rows.append(number)
                offsets.append(len(tokens))
                logprobs += [(ids[p + 1], p + 1) for p in range(end - logits, end - sample)]
                logprob_offsets.append(len(logprobs))
        table = column(rows + offsets + tokens)
        begin, end = len(rows), len(rows) + len(offsets)
        result = StepResult(
            step=plan.step,
            rows=table[:begin],
            offsets=table[begin:end],
            tokens=table[end:],
            accepted=_NO_DRAFTS[: len(rows)],
            row_error=tuple(errors),
            prompt_logprobs=_logprobs(logprobs, logprob_offsets) if logprobs else None,
        )
        return result, step._replace(tokens=total), dies

    def _allocate(self, op: AllocSlot) -> int:
        """Fill a slot and return the key of its sequence. Raise Violation if the emitted tokens are wrong."""
        ids = op.token_ids.tolist()
        key = token_key(op.token_ids[: op.num_prompt].tobytes(), op.seed, op.choice)
        emitted = [token(key, position) for position in range(op.num_prompt, len(ids))]
        require(ids[op.num_prompt :] == emitted, "an instance goes on from output that was never made")
        self._slots[op.slot] = key, ids
        return key


def _logprobs(entries: list[tuple[int, int]], offsets: list[int]) -> LogprobRows:
    """Pack prompt logprobs. ``rank`` carries the positions, so a reader can check the order."""
    return LogprobRows(
        offsets=column(offsets),
        ids=column([token_id for token_id, _ in entries]).reshape(-1, 1),
        values=np.zeros((len(entries), 1), np.float32),
        rank=column([position for _, position in entries]),
    )


@dataclass(slots=True)
class Stream:
    """The output received by one reader for one sequence, beside the expected output."""

    sequence: int
    prompt: list[int]
    tokens: list[int]
    """All tokens of the sequence's output."""
    finish: str
    key: int
    wants_prompt: bool
    """True if prompt logprobs are due."""
    pinned: str | None = None
    count: int = 0
    """Number of tokens received."""
    prompt_positions: int = 0
    """Number of prompt logprobs received."""
    paused: bool = False
    closed: bool = False
    """True if the reader has ended the sequence."""
    end: str | None = None
    """Finish reason of the final event; None before."""
    links: set[int] = field(default_factory=set)
    """Links to the instances that still have the sequence, by number."""
    moved_over: int = 0
    """Link over which the prefill instance of the present attempt reported the handoff; 0 before."""
    lands_by: float = math.inf
    """Deadline after the loss of that prefill instance: without a token of the decode instance, the attempt
    ends."""
    images: bool = False
    """True if the prompt has images. Decode instances have no vision tower, and cannot compute the prompt."""
    computed: bool = False
    """True once a token of the present attempt came. By then the compute instance has all images."""
    ended_elsewhere: bool = False
    """True if an instance reported an end at the partner, and the partner's report is still to come."""
    received: bool = False
    """True once the decode instance reported a token in the present attempt."""
    losses: int = 0
    """Number of instances lost while at work on the sequence."""
    given_back: set[str] = field(default_factory=set)
    """Instances that refused or returned the sequence since the last token."""
    times_given_back: int = 0

    @property
    def open(self) -> bool:
        return self.end is None and not self.closed

    def left(self) -> None:
        """Forget the present attempt: the sequence left all instances, so a later loss does not count."""
        self.moved_over, self.lands_by = 0, math.inf
        self.received = self.computed = False

    def take(self, event: TokenEvent) -> None:
        """Check the next event against the expected output, and record the content.

        Raise Violation for any difference, and for an event while closed or paused.
        """
        # A reader gets no event after the end, and no tokens while not reading.
        name = f"sequence {self.sequence}"
        if not self.open:
            raise Violation(f"{name}: an event after its end ({self.end or 'closed'})")
        if self.paused and event.finish != "error":
            raise Violation(f"{name}: tokens while nobody reads it")
        if event.prompt_logprobs is not None:
            self._take_prompt(event.prompt_logprobs)
        new = list(event.token_ids)
        due = self.tokens[self.count : self.count + len(new)]
        # Tokens are a function of the sequence, so any other token is wrong.
        if new != due:
            raise Violation(f"{name}: tokens {new} at {self.count}, where {due} are due")
        if new:
            if self.wants_prompt and self.prompt_positions < len(self.prompt) - 1:
                raise Violation(f"{name}: a token before all prompt logprobs")
            self.count += len(new)
            self.given_back.clear()
        if event.finish is None:
            require(bool(new) or event.prompt_logprobs is not None, f"{name}: an event that says nothing")
            return
        self.end = event.finish
        if event.finish == "error":
            require(event.error is not None, f"{name}: an error that does not say which")
        elif self.count < len(self.tokens) or event.finish != self.finish:
            raise Violation(f"{name}: {event.finish} after {self.count} of {len(self.tokens)} tokens")

    def _take_prompt(self, columns: LogprobColumns) -> None:
        """Check and count prompt logprobs. Raise Violation for wrong positions or ids."""
        require(self.wants_prompt, f"sequence {self.sequence}: prompt logprobs that nobody asked for")
        ids, _, positions = columns.arrays()
        first = self.prompt_positions + 1
        due = list(range(first, first + columns.positions))
        got = f"sequence {self.sequence}: prompt logprobs of {positions.tolist()}, where {due} are due"
        require(positions.tolist() == due, got)
        require(ids[:, 0].tolist() == self.prompt[first : first + len(due)], got)
        self.prompt_positions += len(due)
