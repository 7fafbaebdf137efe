"""Sequences with a grammar: the position of each sequence in the grammar, and the masks of a step.

    add         the grammar is compiled elsewhere; the sequence is blocked
    constrain   the matcher is walked along the output of the Submit
    plan        a sampling row of such a sequence makes the plan ``constrained``
    masks       after all earlier plans have committed: each matcher is behind the last committed token.
                The matcher is walked along the drafts that the row verifies, and back
    commit      committed tokens advance the matcher; proposed drafts are stored for the masks of the row
                that verifies the drafts

A matcher belongs to a sequence. Only commits change the matcher, so preemption, lost ranks and a change of
slots do not matter. The matcher stays in the engine process: ranks receive only masks.
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
"""Tokens per word of a mask."""


class TokenMatcher(Protocol):
    """The position of a sequence in a grammar. See ``weft.grammar.base.Matcher``."""

    def accept(self, token: int) -> bool:
        """Accept the next token. Return False, without any change, if the grammar does not allow the
        token."""

    def rollback(self, tokens: int) -> None:
        """Undo the last ``tokens`` accepted tokens."""

    def fill(self, words: np.ndarray) -> None:
        """Write the mask of possible next tokens, one bit per token, into ``words``: int32 [ceil(vocabulary /
        32)]."""

    def fill_each(self, matchers: Sequence[Any], words: np.ndarray) -> list[int]:
        """Fill one row of ``words`` for each of ``matchers``. Return the indices of failed matchers."""

    @property
    def ended(self) -> bool:
        """True if the output is complete and only an end-of-turn id may follow."""


class Constraint:
    """The position of one sequence in a grammar: behind the last committed token."""

    def __init__(
        self, matcher: TokenMatcher, end_ids: Iterable[int], params: TokenParams, vocab_size: int
    ) -> None:
        """Create the constraint with ``matcher`` at the start of the output.

        ``end_ids``: ids allowed by the matcher where the grammar may end. An end id without effect on the
        sequence (``ignore_eos``) is never allowed. If such ids are the only possible end, a complete output
        ends the sequence without an end id.
        """
        ends = frozenset(end_ids)
        self._matcher = matcher
        self._stops = frozenset(params.stop_ids)
        self._hidden = _cleared(ends - self._stops)
        self._ends_itself = not ends & self._stops
        self._params = params
        self._vocab_size = vocab_size
        self.drafts: Sequence[int] = ()
        """Drafts proposed by the last committed row. The next row verifies a prefix of the drafts."""
        self.failure: ErrorInfo | None = None
        """Why the grammar ends the sequence; None while the sequence can continue."""

    @property
    def finished(self) -> bool:
        """True if the output is complete and no id can end the sequence. A failing matcher sets
        ``failure``."""
        try:
            return self._ends_itself and self._matcher.ended
        except Exception as error:
            self._fail(error)
            return False

    def walk(self, tokens: Iterable[int]) -> None:
        """Accept the output of the Submit. Set ``failure`` if the grammar refuses a token."""
        for number, token in enumerate(tokens):
            if not self._accept(token):
                why = f"the output so far does not match the grammar: its token {number} is not allowed"
                self.failure = self.failure or _refusal(why, "grammar_mismatch")
                return

    def take(self, token: int) -> None:
        """Accept the next committed token. Set ``failure`` if the grammar refuses a token other than a stop
        id."""
        if not self._accept(token) and token not in self._stops and self.failure is None:
            self.failure = _refusal("a token was sampled that the grammar does not allow", "grammar_mismatch")

    def accept_and_continue(self, token: int) -> bool:
        """Accept ``token``, which is no stop id, and return True if the grammar can continue after the token.

        Return False if the grammar refuses the token or is complete after the token: the token is then not
        accepted. Also return False if the matcher failed: ``failure`` is then set.
        """
        if self.failure is not None or not self._accept(token):
            return False
        if self.finished:
            self._rollback(1)
            return False
        return self.failure is None

    def fill(self, masks: np.ndarray) -> int:
        """Write the masks of one row, int32 [positions, words]; each mask follows one more draft.

        Return how many masks are reachable. Masks after a refused draft, or after the end of the sequence,
        are not reachable. The matcher returns to the committed position. A failing matcher sets ``failure``:
        return 0. Raises EngineDead if drafts are missing.
        """
        if len(masks) - 1 > len(self.drafts):
            raise EngineDead("a row verifies drafts that the engine does not know")
        if self.failure is not None:
            return 0
        if len(masks) == 1:
            return int(self._try_fill(masks[0]))
        # Walk along the drafts: mask, check the draft against the mask, accept the draft, next mask.
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
        self._rollback(walked)
        return 0 if self.failure is not None else reached

    def explain(self, tokens: Sequence[int], num_prompt: int) -> ErrorInfo | None:
        """Return why no token could be sampled behind ``tokens``; None if masks and lists left a token."""
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
        # Apply the lists one by one: blame each parameter with an effect.
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
        """Return True if the matcher accepts ``token``. An exception of the matcher sets ``failure``."""
        try:
            return self._matcher.accept(token)
        except Exception as error:
            self._fail(error)
            return False

    def _rollback(self, tokens: int) -> None:
        """Undo ``tokens``. After an earlier failure, a failing rollback keeps the first error."""
        if not tokens:
            return
        try:
            self._matcher.rollback(tokens)
        except Exception as error:
            if self.failure is None:
                self._fail(error)

    def _try_fill(self, words: np.ndarray) -> bool:
        """Fill one mask. Return False, with ``failure`` set, on an exception of the matcher."""
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
        """Return True if the sequence may continue behind ``token``: allowed by ``words`` and no stop id."""
        return token not in self._stops and bool(int(words[token // WORD]) >> token % WORD & 1)

    def _fail(self, error: Exception) -> None:
        """Record an exception of the matcher. The matcher is foreign code: the exception ends only one
        sequence."""
        log.warning("a grammar's matcher failed: %s", error, exc_info=not isinstance(error, WeftError))
        unknown = EngineDead("the grammar matcher failed", code="grammar_failed")
        self.failure = (error if isinstance(error, WeftError) else unknown).info()


def fill_each(constraints: Sequence[Constraint], words: np.ndarray) -> list[int]:
    """Fill masks of rows with one position each, like ``Constraint.fill``: int32 [constraints, words],
    contiguous.

    Return the indices of rows with a mask. Other rows of ``words`` are arbitrary. A failing matcher sets
    ``failure`` of the constraint.
    """
    able = [number for number, one in enumerate(constraints) if one.failure is None]
    if len(able) < len(constraints):
        part = np.empty((len(able), words.shape[1]), np.int32)
        filled = fill_each([constraints[number] for number in able], part) if able else []
        words[able] = part
        return [able[number] for number in filled]
    if not constraints:
        return []
    matchers = [one._matcher for one in constraints]
    try:
        failed = matchers[0].fill_each(matchers, words)
    except Exception:  # one matcher failed, and the exception does not name the matcher
        failed = able
    for hidden, rows in _by_hidden(constraints):
        places, kept = hidden
        words[np.array(rows)[:, None], places] &= kept
    if not failed:
        return able
    # Fill the failed rows one by one: each failing matcher then records an error.
    wrong = {number for number in failed if not constraints[number]._try_fill(words[number])}
    return [number for number in able if number not in wrong]


@functools.lru_cache(maxsize=64)
def _cleared(hidden: frozenset[int]) -> tuple[np.ndarray, np.ndarray] | None:
    """Return (word indices int64 [n], masks int32 [n]) that clear the bits of the ids ``hidden``; None if
    ``hidden`` is empty."""
    if not hidden:
        return None
    places = sorted({token // WORD for token in hidden})
    bits = [sum(1 << token % WORD for token in hidden if token // WORD == place) for place in places]
    return np.array(places, np.int64), ~np.array(bits, np.uint32).view(np.int32)


def _by_hidden(
    constraints: Sequence[Constraint],
) -> list[tuple[tuple[np.ndarray, np.ndarray], list[int]]]:
    """Group the constraints with hidden ids by the hidden ids: [((word indices, masks), constraint
    indices)]."""
    # `_cleared` is cached, so equal sets usually have the same object
    groups: dict[int, tuple[tuple[np.ndarray, np.ndarray], list[int]]] = {}
    for number, one in enumerate(constraints):
        if (hidden := one._hidden) is not None:
            groups.setdefault(id(hidden), (hidden, []))[1].append(number)
    return list(groups.values())


def unpacked(words: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return the allowed tokens of a mask as bool [vocab_size]."""
    bits = np.unpackbits(np.ascontiguousarray(words, "<i4").view(np.uint8), bitorder="little")
    result: np.ndarray = bits[:vocab_size].astype(bool)
    return result


def _lists(
    params: TokenParams, tokens: Sequence[int], place: int, vocab_size: int
) -> list[tuple[str, np.ndarray]]:
    """Return (parameter, bool [vocab_size] of allowed tokens) for each parameter that forbids tokens.

    ``place``: number of output tokens before the token to sample.
    """

    def all_but(ids: Iterable[int]) -> np.ndarray:
        kept = np.ones(vocab_size, bool)
        kept[[token for token in ids if 0 <= token < vocab_size]] = False
        return kept

    lists = []
    if params.min_tokens > place:
        lists.append(("min_tokens", all_but(params.stop_ids)))
    if params.bad:
        ended = (word[-1] for word in params.bad if _completes(word, tokens))
        lists.append(("bad_words", all_but(ended)))
    if params.allowed is not None:
        lists.append(("allowed_token_ids", ~all_but(params.allowed)))
    return lists


def _completes(word: Sequence[int], tokens: Sequence[int]) -> bool:
    """Return True if the last id of ``word``, sampled behind ``tokens``, would complete ``word``."""
    before = len(word) - 1
    return not before or list(tokens[-before:]) == list(word[:-1])


def _refusal(message: str, code: str, param: str = "grammar") -> ErrorInfo:
    return InvalidRequest(message, param=param, code=code).info()


# ---- all rows of a step


class HasConstraint(Protocol):
    """A sequence, as far as masks need one."""

    constraint: Constraint | None


def masks_of(
    plan: StepPlan, vocab_size: int, gens: np.ndarray, constrained: np.ndarray, in_slot: np.ndarray
) -> TokenMasks:
    """Return the masks of ``plan``. All earlier plans must have committed.

    gens: int32 [slots]. constrained: bool [slots]. in_slot: object [slots], the running sequences. If the
    sequence has left the slot since planning, the row gets no mask: the sampled token is dropped.
    """
    # Few and plain operations: caches are cold here, because the forward pass ran since the last step.
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
            first += sampled  # entries count sampled positions of all rows, constrained or not
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
    """Store the drafts proposed after ``plan`` in the constraints of the verifying sequences."""
    begin = 0  # result.drafts [all proposed drafts], row after row in plan order
    drafts = result.drafts.tolist()
    for segment in (plan.prefill, plan.decode):
        alive = (gens[segment.slot] == segment.gen).tolist()
        columns = (segment.slot.tolist(), segment.sample.tolist(), segment.next_k.tolist(), alive)
        for slot, samples, count, lives in zip(*columns, strict=True):
            if lives and samples and (constraint := in_slot[slot].constraint) is not None:
                constraint.drafts = drafts[begin : begin + count]
            begin += count
