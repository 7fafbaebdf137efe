"""What must hold whatever happens to a cluster, and the model that makes it checkable.

The token at a position is a function of prompt, seed, choice and position, so whoever computes it gets the
same one, and every stream can be compared with what it must be.
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

VOCABULARY = 40
_NO_DRAFTS = column([0] * 64)


class Violation(Exception):
    """An invariant does not hold."""


def require(holds: bool, what: str) -> None:
    """Raises Violation saying ``what`` is wrong unless it ``holds``."""
    if not holds:
        raise Violation(what)


def token_key(prompt: bytes, seed: int, choice: int) -> int:
    """What all tokens of a sequence are a function of."""
    return zlib.crc32(prompt, seed * 131 + choice)


def token(key: int, position: int) -> int:
    """The token at ``position`` of the sequence with this ``key``."""
    mixed = ((key ^ (position * 0x9E3779B1)) * 0x85EBCA6B) & 0xFFFFFFFF
    return (mixed >> 11) % VOCABULARY


def output(key: int, num_prompt: int, params: TokenParams, max_model_len: int) -> tuple[list[int], str]:
    """All tokens of a sequence that nobody disturbs, and how it ends."""
    tokens: list[int] = []
    while True:
        tokens.append(token(key, num_prompt + len(tokens)))
        if tokens[-1] in params.stop_ids:
            return tokens, "stop"
        if len(tokens) >= params.max_tokens or num_prompt + len(tokens) >= max_model_len:
            return tokens, "length"


class RankStep(NamedTuple):
    """What a rank needs of a plan: it computes from that and its slot table, and from nothing else."""

    allocated: list[tuple[int, int]]
    """(slot, key) of sequences that get a slot."""
    sampled: list[tuple[int, int]]
    """(slot, position) of tokens."""
    tokens: int
    """That are computed."""

    def run(self, slots: dict[int, int]) -> int:
        """Takes the step in. Returns the checksum of what it samples; ``slots``: slot -> key."""
        slots.update(self.allocated)
        checksum = 1
        for slot, position in self.sampled:
            checksum = (checksum * VOCABULARY + token(slots[slot], position)) & 0xFFFFFFFF
        return checksum


class TokenModel:
    """A device whose tokens are ``token``'s. It has a slot table as a worker does, and reads nothing else."""

    def __init__(self, row_errors: Mapping[int, int], poison: Mapping[int, int]) -> None:
        """``row_errors``: key -> position whose logits are not finite. ``poison``: key -> position at which
        whoever computes it dies.
        """
        self._row_errors = row_errors
        self._poison = poison
        self._slots: dict[int, tuple[int, list[int]]] = {}
        """Slot -> key, known ids."""

    def clear(self) -> None:
        """All slots are empty."""
        self._slots.clear()

    def run(self, plan: StepPlan) -> tuple[StepResult, RankStep, bool]:
        """The result of ``plan``, the same step for another rank, and whether the process dies of it."""
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
        ids = op.token_ids.tolist()
        key = token_key(op.token_ids[: op.num_prompt].tobytes(), op.seed, op.choice)
        emitted = [token(key, position) for position in range(op.num_prompt, len(ids))]
        require(ids[op.num_prompt :] == emitted, "an instance goes on from output that was never made")
        self._slots[op.slot] = key, ids
        return key


def _logprobs(entries: list[tuple[int, int]], offsets: list[int]) -> LogprobRows:
    """``rank`` holds positions, by which a stream is checked."""
    return LogprobRows(
        offsets=column(offsets),
        ids=column([token_id for token_id, _ in entries]).reshape(-1, 1),
        values=np.zeros((len(entries), 1), np.float32),
        rank=column([position for _, position in entries]),
    )


@dataclass(slots=True)
class Stream:
    """What one reader was told of one sequence, beside what it must be told."""

    sequence: int
    prompt: list[int]
    tokens: list[int]
    """All that it will make."""
    finish: str
    key: int
    wants_prompt: bool
    """Whether prompt logprobs are due."""
    pinned: str | None = None
    count: int = 0
    """Tokens that came."""
    prompt_positions: int = 0
    """Prompt logprobs that came."""
    paused: bool = False
    closed: bool = False
    """Whether its reader has ended it."""
    end: str | None = None
    """How it ended, by its own terminal event."""
    links: set[int] = field(default_factory=set)
    """Over which it was sent, of instances that have it."""
    moved_over: int = 0
    """The link over which the sender of its present attempt said that it has moved; 0 while it has not."""
    lands_by: float = math.inf
    """Where that instance is lost since: when it is given up, if the receiver tells no token."""
    images: bool = False
    """Whether its prompt has images. Instances that decode have no tower, and cannot compute the prompt."""
    computed: bool = False
    """Whether a token of its present attempt has come: then who computes its prompt has all its images."""
    ended_elsewhere: bool = False
    """Whether an instance said that it has ended at its partner, whose report is still to come."""
    landed: bool = False
    """Whether the receiver has told a token in that attempt."""
    losses: int = 0
    """Instances that were lost while they had it."""
    given_back: set[str] = field(default_factory=set)
    """Instances that refused it or gave it back since a token came."""
    times_given_back: int = 0

    @property
    def open(self) -> bool:
        return self.end is None and not self.closed

    def left(self) -> None:
        """Notes that the sequence left its instances: what is lost later of that attempt is no loss."""
        self.moved_over, self.lands_by = 0, math.inf
        self.landed = self.computed = False

    def take(self, event: TokenEvent) -> None:
        """Checks the next event. Raises Violation."""
        name = f"sequence {self.sequence}"
        if not self.open:
            raise Violation(f"{name}: an event after its end ({self.end or 'closed'})")
        if self.paused and event.finish != "error":
            raise Violation(f"{name}: tokens while nobody reads it")
        if event.prompt_logprobs is not None:
            self._take_prompt(event.prompt_logprobs)
        new = list(event.token_ids)
        due = self.tokens[self.count : self.count + len(new)]
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
        require(self.wants_prompt, f"sequence {self.sequence}: prompt logprobs that nobody asked for")
        ids, _, positions = columns.arrays()
        first = self.prompt_positions + 1
        due = list(range(first, first + columns.positions))
        got = f"sequence {self.sequence}: prompt logprobs of {positions.tolist()}, where {due} are due"
        require(positions.tolist() == due, got)
        require(ids[:, 0].tolist() == self.prompt[first : first + len(due)], got)
        self.prompt_positions += len(due)
