"""Constraints of a grammar: masks along drafts against a token-by-token reference, and ends by a grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.scheduler.fake_runner import ROW_ERROR, VOCAB, kv_config, submit
from tests.scheduler.harness import Follower, Output, Rig
from tests.support.automata import Automaton, AutomatonMatcher, random_automaton
from weft.common.errors import EngineDead, InvalidRequest
from weft.grammar.base import Matcher
from weft.scheduler.constraints import Constraint, fill_each, masks_of, unpacked
from weft.types.grammar import Text
from weft.types.plan import Segment, StepPlan, StepResult, column
from weft.types.sampling import TokenParams

GRAMMAR = Text("anything")
WIDE = 70
"""A vocabulary whose size is not a multiple of the word size of masks."""
WORDS = -(-WIDE // 32)


def ids(mask: np.ndarray) -> set[int]:
    return set(np.flatnonzero(unpacked(mask, WIDE)).tolist())


def reachable(
    automaton: Automaton, tokens: list[int], drafts: list[int], params: TokenParams
) -> list[set[int]]:
    """Return the allowed tokens at each reachable position of a row, computed token by token."""
    made = []
    hidden = set(automaton.ends) - set(params.stop_ids)
    for draft in [*drafts, None]:
        allowed = automaton.allowed(tokens)
        assert allowed is not None
        made.append(allowed - hidden)
        if draft not in made[-1] or draft in params.stop_ids:
            return made
        tokens = [*tokens, draft]  # type: ignore[list-item]
    return made


def a_path(rng: random.Random, automaton: Automaton, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length and (allowed := automaton.allowed(tokens)):
        if not (left := sorted(allowed - set(automaton.ends))):
            break
        tokens.append(rng.choice(left))
    return tokens


@pytest.mark.requirement("G8")
@pytest.mark.parametrize("seed", range(300))
def test_masks_along_drafts_are_those_of_one_token_at_a_time(seed: int) -> None:
    rng = random.Random(seed)
    ends = tuple(rng.sample(range(WIDE), rng.randrange(0, 3)))
    automaton = random_automaton(rng, WIDE, ends, rng.randrange(2, 9))
    stops = rng.choice([ends, ends[:1], (), (*ends, 3)])
    params = TokenParams(stop_ids=tuple(sorted(set(stops))))
    matcher = AutomatonMatcher(automaton)
    constraint = Constraint(matcher, ends, params, WIDE)
    tokens = a_path(rng, automaton, rng.randrange(0, 12))
    constraint.walk(tokens)
    assert constraint.failure is None
    for _ in range(6):
        count = rng.randrange(0, 6)
        right = a_path_from(rng, automaton, tokens, count)
        drafts = [one if rng.random() < 0.8 else rng.randrange(WIDE) for one in right]
        drafts += [rng.randrange(WIDE) for _ in range(count - len(drafts))]
        constraint.drafts = [*drafts, 7, 7]  # a row may verify fewer drafts than were proposed
        masks = np.full((1 + count, WORDS), 0x5A5A5A5A, np.int32)
        expected = reachable(automaton, tokens, drafts, params)
        before = list(matcher.path)
        found = constraint.fill(masks)
        assert found == len(expected)
        assert [ids(mask) for mask in masks[:found]] == expected
        assert matcher.path == before, "the matcher was not rolled back"
        allowed = sorted(expected[0] - set(params.stop_ids))
        if not allowed:
            assert constraint.finished == (not expected[0])
            break
        constraint.take(token := rng.choice(allowed))
        tokens.append(token)
        assert constraint.failure is None


def a_path_from(rng: random.Random, automaton: Automaton, tokens: list[int], count: int) -> list[int]:
    made: list[int] = []
    while len(made) < count and (allowed := automaton.allowed([*tokens, *made])):
        made.append(rng.choice(sorted(allowed)))
    return made


def sequence(constraint: Constraint | None) -> Any:
    return SimpleNamespace(constraint=constraint)


def test_entries_are_numbered_as_the_results_tokens_and_rows_that_left_have_none() -> None:
    automaton = Automaton(({1: 1, 2: 1}, {3: 0}), frozenset())
    one, two = (Constraint(AutomatonMatcher(automaton), (), TokenParams(), WIDE) for _ in range(2))
    two.drafts = [1, 9]
    in_slot = np.array([sequence(one), sequence(None), sequence(two), sequence(one)], object)
    gens = column([1, 1, 1, 5])
    prefill = Segment(
        slot=column([1, 0, 3]), gen=column([1, 1, 1]), sample=column([1, 1, 1]), next_k=column([0, 0, 0])
    )
    decode = Segment(slot=column([1, 2]), gen=column([1, 1]), sample=column([2, 3]), next_k=column([2, 0]))
    plan = StepPlan(step=4, prefill=prefill, decode=decode, constrained=True)
    constrained = np.array([True, False, True, True])
    masks = masks_of(plan, WIDE, gens, constrained, in_slot)
    # Entries: 0, 1 of slot 0; 2 of a sequence that left; 3, 4 of slot 1; 5, 6, 7 of slot 2 (second draft
    # refused).
    assert masks.entries.tolist() == [1, 5, 6]
    assert [ids(mask) for mask in masks.words.reshape(3, -1)] == [{1, 2}, {1, 2}, {3}]
    masks.check(plan, WIDE)
    nobody = masks_of(plan, WIDE, column([0, 0, 0, 0]), constrained, in_slot)
    assert not len(nobody.entries)
    nobody.check(plan, WIDE)


def test_drafts_unknown_to_the_matcher_are_an_error() -> None:
    constraint = Constraint(Follower(), (), TokenParams(), WIDE)
    with pytest.raises(EngineDead, match="drafts that the engine does not know"):
        constraint.fill(np.zeros((2, WORDS), np.int32))


def test_many_masks_at_once_and_who_fails() -> None:
    """``fill_each`` equals ``fill`` for working matchers. A failed matcher returns an error and no mask."""
    rng = random.Random(5)
    automata = [random_automaton(rng, WIDE, (3, 4, 40)) for _ in range(6)]
    made = [
        Constraint(AutomatonMatcher(automaton), automaton.ends, TokenParams(stop_ids=stops), WIDE)
        for automaton, stops in zip(automata, [(), (3,), (), (3, 4), (40,), ()], strict=True)
    ]
    made.insert(2, Constraint(Broken("fill"), (), TokenParams(), WIDE))
    made.insert(4, Constraint(Follower(), (), TokenParams(), WIDE))
    made[4].failure = InvalidRequest("it had failed before").info()
    words = np.empty((len(made), WORDS), np.int32)
    assert fill_each(made, words) == [0, 1, 3, 5, 6, 7]
    assert made[2].failure is not None
    for number in (0, 1, 3, 5, 6, 7):
        alone = np.empty((1, WORDS), np.int32)
        assert made[number].fill(alone) == 1
        assert ids(words[number]) == ids(alone[0])
    made.insert(0, Constraint(Broken("each"), (), TokenParams(), WIDE))
    again = np.empty((len(made), WORDS), np.int32)
    assert fill_each(made, again) == [0, 1, 2, 4, 6, 7, 8]
    assert [ids(again[row]) for row in (1, 2, 4)] == [ids(words[row]) for row in (0, 1, 3)]
    assert fill_each([], np.empty((0, WORDS), np.int32)) == []
    assert fill_each([made[3], made[5]], words[:2]) == []


# ---- in a scheduler


class Fixed(Follower):
    """Allows the same ids at every position, and ends after ``ends_after`` tokens."""

    def __init__(self, allowed: set[int], ends: tuple[int, ...] = (), ends_after: int = 1000) -> None:
        super().__init__()
        self.allowed, self.ends, self.ends_after = allowed, ends, ends_after

    @property
    def ended(self) -> bool:  # type: ignore[override]
        return len(self.tokens) >= self.ends_after

    def fill(self, words: np.ndarray) -> None:
        bits = np.zeros(32 * len(words), np.uint8)
        bits[list(self.ends if self.ended else self.allowed)] = 1
        words[:] = np.packbits(bits, bitorder="little").view("<i4")


class Broken(Follower):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def fill(self, words: np.ndarray) -> None:
        if self.what == "fill":
            raise RuntimeError("a bug")
        super().fill(words)

    def fill_each(self, matchers: Sequence[Matcher], words: np.ndarray) -> list[int]:
        if self.what == "each":
            raise RuntimeError("a bug")
        return super().fill_each(matchers, words)

    def accept(self, token: int) -> bool:
        if self.what == "accept":
            raise RuntimeError("a bug")
        return super().accept(token) and self.what != "refuse"

    @property
    def ended(self) -> bool:  # type: ignore[override]
        if self.what == "ended":
            raise RuntimeError("a bug")
        return False


class Stuck(Follower):
    """A library's matcher with a limit of ``limit`` tokens. Rollback is impossible after the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def fill(self, words: np.ndarray) -> None:
        if len(self.tokens) >= self.limit:
            raise InvalidRequest("the grammar is too complex to follow")
        super().fill(words)

    def rollback(self, tokens: int) -> None:
        if len(self.tokens) >= self.limit:
            raise ValueError("cannot take back")
        super().rollback(tokens)


def rig_with(matcher: Any, end_ids: tuple[int, ...] = (), drafts: int = 0, **params: Any) -> Rig:
    """Return a rig with sequence 1 under ``matcher`` and sequence 2 without a grammar."""
    rig = Rig(kv_config(copies=1 + drafts), 2)
    for number, grammar in ((1, GRAMMAR), (2, None)):
        request = submit(number, [1, 2, 3], grammar=grammar, **(params if grammar else {}))
        rig.outputs[number] = Output(request)
        rig.collect(rig.scheduler.add(request, 0.0))
    rig.collect(rig.scheduler.constrain(1, matcher, end_ids))
    return rig


def fail_row(rig: Rig, sequence: int, at: int) -> None:
    """Make the sampler fail for ``sequence`` at output token ``at``, as if all logits were -inf."""
    launch = rig.runner.launch

    def failing(plan: StepPlan) -> StepResult:
        result = launch(plan)
        slots = [*plan.prefill.slot.tolist(), *plan.decode.slot.tolist()]
        for answer, row in enumerate(result.rows.tolist()):
            occupant = rig.runner.in_slot[slots[row]]
            mine = rig.scheduler._state.in_slot[slots[row]].id == sequence
            if mine and len(occupant.history) - occupant.op.num_prompt == at + 1:
                result = replace(result, row_error=((answer, ROW_ERROR),))
        return result

    rig.runner.launch = failing  # type: ignore[method-assign]


def test_a_sequence_blocked_its_grammar_and_nothing_else_waits_for_it() -> None:
    rig = Rig(kv_config(), 2)
    rig.outputs[1] = Output(submit(1, [1, 2], grammar=GRAMMAR, max_tokens=3))
    rig.collect(rig.scheduler.add(rig.outputs[1].request, 0.0, until=9.0))
    rig.submit(submit(2, [1, 2], max_tokens=3))
    rig.drain()
    assert rig.outputs[2].finish == "length"
    assert not rig.outputs[1].tokens
    assert rig.scheduler.blocked
    rig.collect(rig.scheduler.constrain(1, Follower(), ()))
    rig.drain()
    assert rig.outputs[1].finish == "length"
    assert rig.scheduler.stats().constrained_steps == 3


@pytest.mark.requirement("G9")
def test_a_grammar_that_does_not_come_in_time_ends_its_sequence() -> None:
    rig = Rig(kv_config(), 2)
    rig.outputs[1] = Output(submit(1, [1, 2], grammar=GRAMMAR))
    rig.collect(rig.scheduler.add(rig.outputs[1].request, 0.0, until=9.0))
    assert rig.scheduler.expire(8.9) == []
    (event,) = rig.scheduler.expire(9.0)
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert rig.scheduler.constrain(1, Follower(), ()) == []


def test_a_grammar_of_no_use_is_its_own_sequences_error() -> None:
    rig = rig_with(Follower())
    bad = InvalidRequest("no such keyword", param="response_format").info()
    (event,) = rig.scheduler.fail(1, bad)
    assert (event.finish, event.error) == ("error", bad)
    assert rig.scheduler.fail(1, bad) == []
    rig.drain()
    assert rig.outputs[2].finish == "length"
    assert rig.scheduler.stats().grammar_errors == 1


def test_output_that_came_with_the_submit_goes_into_the_matcher() -> None:
    automaton = Automaton(({4: 1}, {5: 2}, dict.fromkeys(range(VOCAB), 2)), frozenset())
    rig = Rig(kv_config(), 2)
    for number, emitted in ((1, [4, 5]), (2, [4, 6])):
        rig.outputs[number] = Output(submit(number, [1], grammar=GRAMMAR, emitted=emitted, max_tokens=6))
        rig.collect(rig.scheduler.add(rig.outputs[number].request, 0.0))
        rig.collect(rig.scheduler.constrain(number, AutomatonMatcher(automaton), ()))
    rig.drain()
    assert (rig.outputs[1].finish, len(rig.outputs[1].tokens)) == ("length", 4)
    error = rig.outputs[2].error
    assert error is not None
    assert (error.code, error.http_status) == ("grammar_mismatch", 400)
    assert "token 1 is not allowed" in error.message


@pytest.mark.parametrize(
    ("params", "allowed", "names"),
    [
        ({"min_tokens": 4, "stop_ids": (7,)}, {7}, "min_tokens"),
        ({"bad": ((7,), (8,))}, {7, 8}, "bad_words"),
        ({"bad": ((7,),), "min_tokens": 4, "stop_ids": (8,)}, {7, 8}, "min_tokens and bad_words"),
        ({"allowed": (1, 2)}, {7}, "allowed_token_ids"),
        ({}, set(), ""),
    ],
)
def test_a_mask_that_leaves_nothing_is_a_clear_error_of_its_sequence(
    params: dict[str, Any], allowed: set[int], names: str
) -> None:
    rig = rig_with(Fixed(allowed), **params)
    fail_row(rig, 1, 2)
    rig.drain()
    output = rig.outputs[1]
    assert output.error is not None
    assert (output.finish, output.error.code, output.error.http_status) == ("error", "no_token_allowed", 400)
    assert len(output.tokens) == 2
    assert "grammar" in output.error.message
    assert names in output.error.message
    assert output.error.param == (names.split(" and ")[0] or "grammar")
    assert rig.outputs[2].finish == "length"
    stats = rig.scheduler.stats()
    assert (stats.grammar_errors, stats.row_errors) == (1, 0)
    rig.check_idle()


def test_bad_words_of_several_ids_count_where_they_would_be_completed() -> None:
    constraint = Constraint(Fixed({7}), (), TokenParams(bad=((4, 7),)), WIDE)
    assert constraint.explain([1, 5], 1) is None
    found = constraint.explain([1, 4], 1)
    assert found is not None
    assert "bad_words" in found.message


def test_a_row_that_failed_for_another_reason_reports_that_reason() -> None:
    rig = rig_with(Fixed({7, 8}))
    fail_row(rig, 1, 2)
    rig.drain()
    assert rig.outputs[1].error is not None
    assert rig.outputs[1].error.code == "non_finite_logits"
    assert rig.scheduler.stats().row_errors == 1


@pytest.mark.parametrize("what", ["fill", "accept", "refuse", "ended"])
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_matcher_that_fails_ends_its_sequence_and_no_other(what: str, drafts: int) -> None:
    rig = rig_with(Broken(what), drafts=drafts)
    rig.drain()
    error = rig.outputs[1].error
    assert error is not None
    assert error.code == ("grammar_mismatch" if what == "refuse" else "grammar_failed")
    assert rig.outputs[1].tokens == []
    assert rig.outputs[2].finish == "length"
    rig.check_idle()


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_a_matcher_that_comes_to_its_limit_ends_its_sequence_and_no_other(drafts: int) -> None:
    """With drafts the matcher reaches the limit while masks of the drafts are filled, and cannot roll
    back."""
    rig = rig_with(Stuck(6), drafts=drafts, max_tokens=20)
    rig.drain()
    output = rig.outputs[1]
    assert output.error is not None
    assert (output.finish, output.error.message) == ("error", "the grammar is too complex to follow")
    assert output.error.http_status == 400
    assert 6 - drafts <= len(output.tokens) <= 6
    assert rig.outputs[2].finish == "length"
    rig.check_idle()


def test_a_finished_output_that_no_id_can_end_stops_by_itself() -> None:
    """The end id of the grammar is not a stop id of the sequence, as with ``ignore_eos``."""
    rig = rig_with(Fixed(set(range(VOCAB)), (7,), ends_after=3), (7,), max_tokens=9)
    rig.drain()
    assert (rig.outputs[1].finish, rig.outputs[1].stop_id) == ("stop", None)
    assert len(rig.outputs[1].tokens) == 3


def test_one_that_was_complete_when_it_came_ends_at_once() -> None:
    rig = Rig(kv_config(), 2)
    rig.outputs[1] = Output(submit(1, [1], grammar=GRAMMAR, emitted=[4, 5]))
    rig.collect(rig.scheduler.add(rig.outputs[1].request, 0.0))
    rig.collect(rig.scheduler.constrain(1, Fixed(set(), (7,), ends_after=2), (7,)))
    assert rig.outputs[1].finish == "stop"
    assert not rig.scheduler.has_work()


def test_an_end_id_that_does_not_end_the_sequence_is_never_allowed() -> None:
    matcher = Fixed({3, 7, 40}, (7, 40))
    constraint = Constraint(matcher, (7, 40), TokenParams(stop_ids=(40,)), WIDE)
    masks = np.zeros((1, WORDS), np.int32)
    assert constraint.fill(masks) == 1
    assert ids(masks[0]) == {3, 40}
    assert not constraint.finished
    matcher.ends_after = 0
    assert not constraint.finished, "40 ends it"


@pytest.mark.requirement("G9")
def test_masks_are_made_in_the_order_of_steps() -> None:
    rig = rig_with(Follower(), max_tokens=6)
    first, second = rig.scheduler.plan(0.0), rig.scheduler.plan(0.0)
    assert first is not None
    assert second is not None
    rig.scheduler.masks(first)
    with pytest.raises(EngineDead, match="commits of all earlier steps"):
        rig.scheduler.masks(second)


def test_a_plan_is_constrained_where_a_row_of_such_a_sequence_samples() -> None:
    rig = Rig(kv_config(), 1, long_prefill_token_threshold=3)
    rig.submit(submit(1, [1, 2, 3, 4, 5, 6, 7], grammar=GRAMMAR, max_tokens=2))
    rig.submit(submit(2, [9, 8], max_tokens=6))
    rig.drain()
    kinds = [plan.constrained for plan in rig.plans]
    assert kinds == [False, False, True, True, False, False]
