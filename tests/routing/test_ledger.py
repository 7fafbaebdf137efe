"""Registry, policies and ledger: pure bookkeeping."""

from __future__ import annotations

import random

import numpy as np
import pytest

from weft.common.errors import EngineDead, ErrorInfo
from weft.routing import policy as policies
from weft.routing.ledger import MOST_LOSSES, Ledger
from weft.routing.policy import CHUNK, LeastLoad, PrefixAffinity
from weft.routing.registry import PROMPT_TOKENS, Registry
from weft.types.messages import LogprobColumns, Submit, TokenEvent, ids_from_bytes, ids_to_bytes
from weft.types.sampling import TokenParams


def registry(count: int) -> Registry:
    made = Registry(count)
    for instance in made.instances:
        instance.up = True
    return made


def submit(sequence: int, prompt: list[int], **fields: object) -> Submit:
    params = TokenParams(max_tokens=100)
    return Submit(
        sequence=sequence, request=1, seed=7, prompt_ids=ids_to_bytes(prompt), params=params, **fields
    )  # type: ignore[arg-type]


def test_least_load_spreads_equal_work_evenly_and_leaves_the_dead_out() -> None:
    known, policy = registry(3), LeastLoad()
    for sequence in range(30):
        known.begin(policy.choose(known.up(), b"", "", 1).number, sequence, 10)
    assert [len(i.open) for i in known.instances] == [10, 10, 10]
    known.instances[1].up = False
    for sequence in range(30, 40):
        known.begin(policy.choose(known.up(), b"", "", 1).number, sequence, 10)
    assert [len(i.open) for i in known.instances] == [15, 10, 15]


def test_a_long_prompt_counts_as_several_sequences_until_it_is_computed() -> None:
    known, policy = registry(2), LeastLoad()
    known.begin(0, 1, 8 * PROMPT_TOKENS)
    for sequence in range(2, 10):
        known.begin(policy.choose(known.up(), b"", "", 1).number, sequence, 0)
    assert [len(i.open) for i in known.instances] == [1, 8]
    known.computed(1)
    known.computed(1)
    assert policy.choose(known.up(), b"", "", 1).number == 0
    assert known.instances[0].load == 1


def test_the_books_close_whatever_the_order() -> None:
    known, rng = registry(3), random.Random(0)
    live: set[int] = set()
    for step in range(3000):
        sequence = rng.randrange(50)
        kind = rng.randrange(4)
        if kind == 0:
            known.begin(rng.randrange(3), sequence, rng.randrange(1000))
            live.add(sequence)
        elif kind == 1:
            known.computed(sequence)
        else:
            known.end(sequence)
            live.discard(sequence)
        assert sum(len(i.open) for i in known.instances) == len(live), step
        assert all(i.waiting_tokens == sum(i.open.values()) for i in known.instances)
        assert all((known.home(s) is not None) == (s in live) for s in range(50))
    for sequence in range(50):
        known.end(sequence)
    assert [i.load for i in known.instances] == [0, 0, 0]


def test_affinity_stays_with_the_cache_unless_waiting_costs_more() -> None:
    known, policy = registry(2), PrefixAffinity()
    talk = ids_to_bytes(list(range(8 * CHUNK)))
    assert policy.choose(known.up(), talk, "", 1).number == 0
    known.instances[0].chosen = 5
    assert policy.choose(known.up(), talk + ids_to_bytes([1] * CHUNK), "", 1).number == 0
    assert policy.choose(known.up(), talk, "salted", 1).number == 1  # another salt shares nothing
    busy = 1 + 8 * CHUNK // PROMPT_TOKENS
    for sequence in range(busy):
        known.begin(0, sequence, 0)
    assert policy.choose(known.up(), talk, "", 1).number == 1
    for sequence in range(busy):
        known.end(sequence)
    policy.forget(0)
    policy.forget(1)
    known.begin(0, 99, 0)
    assert policy.choose(known.up(), talk, "", 1).number == 1


def tokens(sequence: int, *ids: int, **fields: object) -> TokenEvent:
    return TokenEvent(sequence=sequence, token_ids=ids, **fields)  # type: ignore[arg-type]


def test_one_instance_is_chosen_without_a_look_at_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policies, "chain", None)
    (only,) = registry(1).up()
    assert PrefixAffinity().choose([only], bytes(4 * CHUNK), "", 1) is only


def test_a_sequence_goes_on_from_everything_that_came() -> None:
    ledger = Ledger()
    ledger.open(submit(1, [5, 6], emitted_ids=ids_to_bytes([7])))
    assert ledger.take(tokens(2, 1)) is None
    for event in (tokens(1, 8, 9), tokens(1, 10)):
        assert ledger.take(event) is event
    again = ledger.again(1)
    assert ids_from_bytes(again.prompt_ids).tolist() == [5, 6]
    assert ids_from_bytes(again.emitted_ids).tolist() == [7, 8, 9, 10]
    assert (again.seed, again.params) == (7, TokenParams(max_tokens=100))
    ledger.take(tokens(1, 11))
    assert ids_from_bytes(ledger.again(1).emitted_ids).tolist() == [7, 8, 9, 10, 11]
    ledger.take(tokens(1, 12, finish="length"))
    assert 1 not in ledger
    assert len(ledger) == 0
    with pytest.raises(KeyError):
        ledger.again(1)


def test_a_sequence_loses_only_so_many_heads() -> None:
    ledger = Ledger()
    ledger.open(submit(1, [5]))
    for _ in range(MOST_LOSSES):
        assert ledger.again(1).emitted_ids == b""
    with pytest.raises(EngineDead, match="lost"):
        ledger.again(1)


def columns(first: int, count: int) -> LogprobColumns:
    ids = np.arange(first, first + count, dtype="<i4").repeat(2)
    return LogprobColumns(
        width=2,
        ids=ids.tobytes(),
        values=ids.astype("<f4").tobytes(),
        rank=ids[::2].tobytes(),
    )


def test_prompt_logprobs_that_came_before_are_dropped() -> None:
    """A head that died between two pieces: the next one sends all of them again, in other pieces."""
    ledger = Ledger()
    ledger.open(submit(1, list(range(20))))
    shown = [ledger.take(TokenEvent(sequence=1, prompt_logprobs=columns(0, 5)))]
    ledger.again(1)
    for event in (
        TokenEvent(sequence=1, prompt_logprobs=columns(0, 3)),
        TokenEvent(sequence=1, prompt_logprobs=columns(3, 8)),
    ):
        shown.append(ledger.take(event))
    ledger.again(1)
    for event in (
        TokenEvent(sequence=1, prompt_logprobs=columns(0, 11)),
        TokenEvent(sequence=1, prompt_logprobs=columns(11, 8), token_ids=(3,)),
    ):
        shown.append(ledger.take(event))
    made = [c.prompt_logprobs.arrays() for c in shown if c is not None and c.prompt_logprobs is not None]
    for part in range(3):
        flat = np.concatenate([arrays[part].reshape(len(arrays[2]), -1)[:, 0] for arrays in made])
        assert flat.tolist() == list(range(19))
    assert shown[1] is None
    failed = TokenEvent(sequence=1, finish="error", error=ErrorInfo(code="x", message="y"))
    assert ledger.take(failed) is failed
