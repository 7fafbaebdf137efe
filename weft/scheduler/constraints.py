"""Sequences whose output a grammar constrains: where each of them is in it, and the masks of a step.

    add         the grammar is compiled elsewhere; the sequence awaits it
    constrain   its matcher is walked along the output that came with the Submit
    plan        a row of such a sequence that samples makes the plan ``constrained``
    masks       once all plans before it have committed: then each matcher is behind the sequence's last
                token. It is walked along the drafts that the row verifies, and back
    commit      tokens that are told go into the matcher; drafts that were proposed are kept for the masks of
                the row that verifies them

A matcher belongs to its sequence and is changed by commits alone, so preemption, lost ranks and a change of
slots leave it as it is. It stays at the head: ranks only see masks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np

from weft.common.errors import EngineDead, ErrorInfo, InvalidRequest, WeftError
from weft.common.log import get_logger
from weft.types.plan import StepPlan, StepResult, TokenMasks, column
from weft.types.sampling import TokenParams

log = get_logger(__name__)

WORD = 32
"""Tokens of a word of a mask."""


class TokenMatcher(Protocol):
    """``weft.grammar.base.Matcher``: where one sequence is in its grammar."""

    def accept(self, token: int) -> bool:
        """Takes the next token; False, and nothing changes, when the grammar does not allow it."""

    def rollback(self, tokens: int) -> None:
        """Takes back the last ``tokens`` that were accepted."""

    def fill(self, words: np.ndarray) -> None:
        """Writes which tokens may follow: int32 [ceil(vocabulary / 32)]."""

    def fill_each(self, matchers: Sequence[Any], words: np.ndarray) -> list[int]:
        """``fill`` of each of ``matchers`` into its row of ``words``; the numbers of those that failed."""

    @property
    def ended(self) -> bool:
        """Whether the output is complete, and only an end-of-turn id may follow."""


class Constraint:
    """One sequence's place in its grammar: behind its last token that was told."""

    def __init__(
        self, matcher: TokenMatcher, end_ids: Iterable[int], params: TokenParams, vocab_size: int
    ) -> None:
        """``matcher``: at the start of the output. ``end_ids``: those that it allows where the grammar may
        end. One that does not end the sequence (with ``ignore_eos``) is never allowed: where nothing else is
        left, the sequence ends by itself.
        """
        ends = frozenset(end_ids)
        self._matcher = matcher
        self._stops = frozenset(params.stop_ids)
        self._hidden = _cleared(ends - self._stops)
        self._ends_itself = not ends & self._stops
        self._params = params
        self._vocab_size = vocab_size
        self.drafts: Sequence[int] = ()
        """Those that its last committed row proposed: its next row verifies as many of them as it has room
        for."""
        self.failure: ErrorInfo | None = None
        """Why the sequence cannot go on, by its grammar."""

    @property
    def finished(self) -> bool:
        """Whether the output is complete, and no id can end the sequence."""
        try:
            return self._ends_itself and self._matcher.ended
        except Exception as error:
            self._fail(error)
            return False

    def walk(self, tokens: Iterable[int]) -> None:
        """Takes the output that came with the Submit. Sets ``failure`` where the grammar refuses it."""
        for number, token in enumerate(tokens):
            if not self._accept(token):
                why = f"the output so far does not match the grammar: its token {number} is not allowed"
                self.failure = self.failure or _refusal(why, "grammar_mismatch")
                return

    def take(self, token: int) -> None:
        """The next token was told. Sets ``failure`` where the grammar refuses it, unless it ends the
        sequence."""
        if not self._accept(token) and token not in self._stops and self.failure is None:
            self.failure = _refusal("a token was sampled that the grammar does not allow", "grammar_mismatch")

    def goes_on(self, token: int) -> bool:
        """``take`` of a token that ends nothing, where the grammar allows it and goes on behind it; False,
        and it was not taken."""
        if self.failure is not None or not self._accept(token):
            return False
        if self.finished:
            self._take_back(1)
            return False
        return self.failure is None

    def fill(self, masks: np.ndarray) -> int:
        """Writes the masks of a row that samples as many positions: int32 [positions, words], each behind one
        more draft. Returns how many of them can be reached; what lies behind the draft that the grammar
        refuses, or that ends the sequence, cannot.
        """
        if len(masks) - 1 > len(self.drafts):
            raise EngineDead("a row verifies drafts of which the head was not told")
        if self.failure is not None:
            return 0
        if len(masks) == 1:
            return int(self._try_fill(masks[0]))
        walked = reached = 0
        try:
            for place, words in enumerate(masks):
                if place and not self._follows(masks[place - 1], draft := int(self.drafts[place - 1])):
                    break
                if place:
                    if not self._matcher.accept(draft):
                        break
                    walked += 1
                self._fill(words)
                reached += 1
        except Exception as error:
            self._fail(error)
        self._take_back(walked)
        return 0 if self.failure is not None else reached

    def explain(self, tokens: Sequence[int], num_prompt: int) -> ErrorInfo | None:
        """Why nothing could be sampled behind ``tokens``; None when something was left by masks and lists."""
        if self.failure is not None:
            return self.failure
        vocab_size = self._vocab_size
        words = np.zeros(-(-vocab_size // WORD), np.int32)
        if not self._try_fill(words):
            return self.failure
        left = unpacked(words, vocab_size)
        place = len(tokens) - num_prompt
        if not left.any():
            return _refusal(f"the grammar allows no token at output token {place}", "no_token_allowed")
        to_blame = []
        for name, kept in _lists(self._params, tokens, place, vocab_size):
            if (left & ~kept).any():
                to_blame.append(name)
            left &= kept
        if left.any():
            return None
        return _refusal(
            f"the grammar and {' and '.join(to_blame)} together allow no token at output token {place}; "
            f"change {to_blame[0]}, or the grammar",
            "no_token_allowed",
            to_blame[0],
        )

    def _accept(self, token: int) -> bool:
        try:
            return self._matcher.accept(token)
        except Exception as error:
            self._fail(error)
            return False

    def _take_back(self, tokens: int) -> None:
        """A matcher that has failed may refuse this as well: what it said first is why the sequence ends."""
        if not tokens:
            return
        try:
            self._matcher.rollback(tokens)
        except Exception as error:
            if self.failure is None:
                self._fail(error)

    def _try_fill(self, words: np.ndarray) -> bool:
        try:
            self._fill(words)
        except Exception as error:
            self._fail(error)
            return False
        return True

    def _fill(self, words: np.ndarray) -> None:
        self._matcher.fill(words)
        if self._hidden is not None:
            places, kept = self._hidden
            words[places] &= kept

    def _follows(self, words: np.ndarray, token: int) -> bool:
        """Whether the sequence may go on behind ``token``, which has to be allowed by ``words``."""
        return token not in self._stops and bool(int(words[token // WORD]) >> token % WORD & 1)

    def _fail(self, error: Exception) -> None:
        """A matcher is another library's: what it raises ends its sequence, and nothing else."""
        log.warning("a grammar's matcher failed: %s", error, exc_info=not isinstance(error, WeftError))
        unknown = EngineDead("the grammar could not be followed", code="grammar_failed")
        self.failure = (error if isinstance(error, WeftError) else unknown).info()


def fill_each(constraints: Sequence[Constraint], words: np.ndarray) -> list[int]:
    """``Constraint.fill`` of rows that sample one position each: int32 [constraints, words], contiguous.
    Returns the numbers of those that can go on; other rows are arbitrary."""
    able = [number for number, one in enumerate(constraints) if one.failure is None]
    if len(able) < len(constraints):
        part = np.empty((len(able), words.shape[1]), np.int32)
        went = fill_each([constraints[number] for number in able], part) if able else []
        words[able] = part
        return [able[number] for number in went]
    if not constraints:
        return []
    matchers = [one._matcher for one in constraints]
    try:
        failed = matchers[0].fill_each(matchers, words)
    except Exception:  # of one of them, and nobody says whose
        failed = able
    for hidden, rows in _by_hidden(constraints):
        places, kept = hidden
        words[np.array(rows)[:, None], places] &= kept
    if not failed:
        return able
    # Whoever failed says why when it is asked by itself.
    wrong = {number for number in failed if not constraints[number]._try_fill(words[number])}
    return [number for number in able if number not in wrong]


@functools.lru_cache(maxsize=64)
def _cleared(hidden: frozenset[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """(places int64 [.], int32 [.]): the words of a mask that hold the bits of ``hidden``, and what leaves
    the others; None without any."""
    if not hidden:
        return None
    places = sorted({token // WORD for token in hidden})
    bits = [sum(1 << token % WORD for token in hidden if token // WORD == place) for place in places]
    return np.array(places, np.int64), ~np.array(bits, np.uint32).view(np.int32)


def _by_hidden(
    constraints: Sequence[Constraint],
) -> list[tuple[tuple[np.ndarray, np.ndarray], list[int]]]:
    """The constraints that hide ids, by what they hide."""
    groups: dict[int, tuple[tuple[np.ndarray, np.ndarray], list[int]]] = {}
    for number, one in enumerate(constraints):
        if (hidden := one._hidden) is not None:
            groups.setdefault(id(hidden), (hidden, []))[1].append(number)
    return list(groups.values())


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool [vocab_size]: the tokens that a mask allows."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    result: np.ndarray = bits[:vocab_size].astype(bool)
    return result


def _lists(
    params: TokenParams, tokens: Sequence[int], place: int, vocab_size: int
) -> list[tuple[str, np.ndarray]]:
    """What each parameter that forbids tokens leaves at output token ``place``: bool [vocab_size]."""

    def all_but(ids: Iterable[int]) -> np.ndarray:
        kept = np.ones(vocab_size, bool)
        kept[[token for token in ids if 0 <= token < vocab_size]] = False
        return kept

    made = []
    if params.min_tokens > place:
        made.append(("min_tokens", all_but(params.stop_ids)))
    if params.bad:
        ended = (word[-1] for word in params.bad if _completes(word, tokens))
        made.append(("bad_words", all_but(ended)))
    if params.allowed is not None:
        made.append(("allowed_token_ids", ~all_but(params.allowed)))
    return made


def _completes(word: Sequence[int], tokens: Sequence[int]) -> bool:
    before = len(word) - 1
    return not before or list(tokens[-before:]) == list(word[:-1])


def _refusal(message: str, code: str, param: str = "grammar") -> ErrorInfo:
    return InvalidRequest(message, param=param, code=code).info()


# ---- all rows of a step


class HasConstraint(Protocol):
    """A sequence, as far as it matters here."""

    constraint: Constraint | None


def masks_of(
    plan: StepPlan, vocab_size: int, gens: np.ndarray, constrained: np.ndarray, in_slot: np.ndarray
) -> TokenMasks:
    """The masks of ``plan``; all before it have committed.

    gens: int32 [slots], constrained: bool [slots], and in_slot [slots] the sequences: those that are running
    now. A row whose sequence has left its slot since the plan was made has none: what it samples is dropped.
    """
    # Few and plain operations: each is cold here, as the forward has had the caches since the last step.
    begins: list[int] = []
    samples: list[int] = []
    constraints: list[Constraint] = []
    first = 0
    for segment in (plan.prefill, plan.decode):
        if not segment.rows:
            continue
        own = constrained[segment.slot] & (gens[segment.slot] == segment.gen)
        sequences: list[HasConstraint] = in_slot[segment.slot].tolist()
        for sampled, mine, sequence in zip(segment.sample.tolist(), own.tolist(), sequences, strict=True):
            if mine and sampled:
                assert sequence.constraint is not None
                begins.append(first)
                samples.append(sampled)
                constraints.append(sequence.constraint)
            first += sampled
    if not constraints:
        return TokenMasks()
    words = np.empty((sum(samples), -(-vocab_size // WORD)), np.int32)
    if max(samples) == 1:
        reached = fill_each(constraints, words)
        if len(reached) < len(constraints):
            begins, words = [begins[number] for number in reached], words[reached]
        return TokenMasks(entries=column(begins), words=words.ravel())
    entries: list[int] = []
    used = 0
    for begin, sampled, constraint in zip(begins, samples, constraints, strict=True):
        count = constraint.fill(words[used : used + sampled])
        entries += range(begin, begin + count)
        used += count
    return TokenMasks(entries=column(entries), words=words[:used].ravel())


def keep_drafts(plan: StepPlan, result: StepResult, gens: np.ndarray, in_slot: np.ndarray) -> None:
    """Keeps the drafts that were proposed after ``plan`` at the sequences that will verify them."""
    begin = 0
    drafts = result.drafts.tolist()
    for segment in (plan.prefill, plan.decode):
        alive = (gens[segment.slot] == segment.gen).tolist()
        columns = (segment.slot.tolist(), segment.sample.tolist(), segment.next_k.tolist(), alive)
        for slot, samples, count, lives in zip(*columns, strict=True):
            if lives and samples and (constraint := in_slot[slot].constraint) is not None:
                constraint.drafts = drafts[begin : begin + count]
            begin += count
