"""Instances, policies and open sequences: pure bookkeeping."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from weft.common.errors import ErrorInfo
from weft.control.fleet.instances import PROMPT_TOKENS, Instance, InstanceState
from weft.control.fleet.ledger import LedgerEntry
from weft.control.fleet.policy import (
    DEFAULT_BLOCK,
    MOVED_TOKENS,
    LeastLoad,
    PrefixAffinity,
    RoundRobin,
    RoutingPolicy,
    TwoChoices,
    hashes_of,
    make_policies,
)
from weft.kv.hashing import HashChain, salted_root
from weft.types.messages import (
    OLDEST,
    VERSION,
    CacheMiss,
    EngineStats,
    Heartbeat,
    LogprobColumns,
    Submit,
    TokenEvent,
    Welcome,
    ids_from_bytes,
    ids_to_bytes,
)
from weft.types.routes import Routes
from weft.types.sampling import TokenParams


def fleet_of(count: int) -> list[Instance]:
    return [Instance(str(number), order=number, state=InstanceState.UP) for number in range(count)]


def submit(sequence: int, prompt: list[int], **fields: object) -> Submit:
    params = TokenParams(max_tokens=100)
    return Submit(
        sequence=sequence, request=1, seed=7, prompt_ids=ids_to_bytes(prompt), params=params, **fields
    )  # type: ignore[arg-type]


def welcome(**fields: object) -> Welcome:
    return Welcome(
        versions=(OLDEST, VERSION),
        vocab_size=300,
        max_model_len=512,
        max_num_seqs=8,
        num_blocks=(64,),
        **fields,  # type: ignore[arg-type]
    )


NO_HASHES = hashes_of(b"", "")


def test_least_load_spreads_equal_work_evenly() -> None:
    instances, policy = fleet_of(3), LeastLoad()
    for sequence in range(30):
        policy.choose(instances, NO_HASHES).begin(sequence, 10)
    assert [len(i.open) for i in instances] == [10, 10, 10]
    for sequence in range(30, 40):
        policy.choose([instances[0], instances[2]], NO_HASHES).begin(sequence, 10)
    assert [len(i.open) for i in instances] == [15, 10, 15]


def test_a_long_prompt_counts_as_several_sequences_until_it_is_computed() -> None:
    instances, policy = fleet_of(2), LeastLoad()
    instances[0].begin(1, 8 * PROMPT_TOKENS)
    for sequence in range(2, 10):
        policy.choose(instances, NO_HASHES).begin(sequence, 0)
    assert [len(i.open) for i in instances] == [1, 8]
    instances[0].computed(1)
    instances[0].computed(1)
    assert policy.choose(instances, NO_HASHES) is instances[0]
    assert instances[0].load == 1


def test_heartbeats_tell_the_load_of_other_fronts() -> None:
    instances, policy = fleet_of(2), LeastLoad()
    instances[0].begin(1, 0)
    instances[0].heartbeat(Heartbeat(idle=False, stats=EngineStats(steps=3, running=4, waiting=2)), 1.0)
    assert (instances[0].elsewhere, instances[0].load) == (5, 6)
    for sequence in range(2, 8):
        assert policy.choose(instances, NO_HASHES) is instances[1]
        instances[1].begin(sequence, 0)
    instances[0].heartbeat(Heartbeat(idle=False, stats=EngineStats(steps=4, running=1)), 2.0)
    assert policy.choose(instances, NO_HASHES) is instances[0]


def test_the_books_close_whatever_the_order() -> None:
    (instance,), rng = fleet_of(1), random.Random(0)
    live: dict[int, int] = {}
    for _ in range(3000):
        sequence, kind = rng.randrange(50), rng.randrange(4)
        if kind == 0 and sequence not in live:
            live[sequence] = rng.randrange(1000)
            instance.begin(sequence, live[sequence])
        elif kind == 1:
            instance.computed(sequence)
            live.update({sequence: 0} if sequence in live else {})
        elif kind > 1:
            instance.end(sequence)
            live.pop(sequence, None)
        assert instance.open == live
        assert instance.prompt_tokens == sum(live.values())
    for sequence in range(50):
        instance.end(sequence)
    assert instance.load == 0


def test_progress() -> None:
    (one,) = fleet_of(1)
    one.heard = one.moved = 0.0

    def heartbeat(steps: int, idle: bool, now: float) -> None:
        one.heard = now
        one.heartbeat(Heartbeat(idle=idle, stats=EngineStats(steps=steps)), now)

    assert one.overdue(10, 9.9) is None
    assert "silent" in (one.overdue(10, 10) or "")
    heartbeat(5, True, 9)
    assert one.overdue(10, 18.9) is None
    heartbeat(5, False, 15)  # work came after the last idle heartbeat
    assert one.progressing(9, 18)
    assert not one.progressing(9, 19)
    heartbeat(5, False, 19.5)
    assert "no step" in (one.overdue(10, 19.5) or "")
    heartbeat(6, False, 20)
    assert one.overdue(10, 28.9) is None
    one.heard = 29
    assert one.overdue(10, 30.5) is not None, "tokens alone prove life, not steps"


@pytest.mark.requirement("F33")
def test_affinity_stays_with_the_cache_unless_waiting_costs_more() -> None:
    instances, policy = fleet_of(2), PrefixAffinity()
    prompt = ids_to_bytes(list(range(8 * DEFAULT_BLOCK)))
    talk = hashes_of(prompt, "")
    assert policy.choose(instances, talk) is instances[0]
    instances[0].chosen = 5
    longer = hashes_of(prompt + ids_to_bytes([1] * DEFAULT_BLOCK), "")
    assert policy.choose(instances, longer) is instances[0]
    assert (
        policy.choose(instances, hashes_of(prompt, "salted")) is instances[1]
    )  # another salt shares nothing
    busy = 1 + 8 * DEFAULT_BLOCK // PROMPT_TOKENS
    for sequence in range(busy):
        instances[0].begin(sequence, 0)
    assert policy.choose(instances, talk) is instances[1]
    for sequence in range(busy):
        instances[0].end(sequence)
    assert policy.choose(instances, talk) is instances[1]
    instances[1].chosen = 9
    for instance in instances:
        instance.welcome = welcome(incarnation=2)
    assert policy.choose(instances, talk) is instances[0]  # other processes: both caches are empty


@pytest.mark.requirement("G14")
def test_a_session_goes_on_where_it_was() -> None:
    """Exceptions: another instance has more of the prompt or a shorter queue, or the process has changed."""
    instances, policy = fleet_of(3), PrefixAffinity()
    asked = [hashes_of(ids_to_bytes([n] * 3), "") for n in range(9)]  # too short to be cached
    assert policy.choose(instances, asked[0], "s") is instances[0]
    instances[0].chosen = 5
    assert policy.choose(instances, asked[1]) is instances[1]
    assert policy.choose(instances, asked[1], "s") is instances[0]
    assert policy.choose(instances, asked[1], "other") is instances[1]
    instances[0].begin(1, 0)
    assert policy.choose(instances, asked[2], "s") is instances[0]
    instances[0].begin(2, 0)
    assert policy.choose(instances, asked[3], "s") is instances[1]  # the former home has a queue of two
    instances[0].end(1)
    instances[0].end(2)
    assert policy.choose(instances, asked[4], "s") is instances[1]
    long = hashes_of(ids_to_bytes(list(range(2 * DEFAULT_BLOCK))), "")
    instances[1].begin(3, 0)
    assert policy.choose(instances, long) is not instances[1]
    instances[1].end(3)
    where = policy.choose(instances, long)
    assert where is not instances[1]
    assert policy.choose(instances, long, "s") is where  # has the prompt
    home = where
    home.welcome = welcome(incarnation=7)
    home.chosen = 99
    assert policy.choose(instances, asked[5], "s") is not home


def test_the_hashes_are_those_of_the_cache_whatever_its_block_size() -> None:
    ids = array("i", range(100))
    for block in (16, 32):
        chain = HashChain(salted_root("salt"), block)
        assert hashes_of(ids.tobytes(), "salt")(block) == chain.grow(ids, len(ids))
    instances, policy = fleet_of(2), PrefixAffinity()
    for instance, block in zip(instances, (16, 32), strict=True):
        instance.welcome = welcome(incarnation=1, block_size=block)
    assert policy.choose(instances, hashes_of(ids.tobytes(), "")) is instances[0]
    instances[0].chosen = 9
    assert policy.choose(instances, hashes_of(ids.tobytes()[: 4 * 48], "")) is instances[0]


def test_round_robin_goes_round_whoever_is_there() -> None:
    instances, policy = fleet_of(3), RoundRobin()
    instances[0].begin(1, 10**6)
    chosen = [policy.choose(instances, NO_HASHES).name for _ in range(4)]
    chosen += [policy.choose([instances[0], instances[2]], NO_HASHES).name for _ in range(3)]
    assert chosen == ["0", "1", "2", "0", "2", "0", "2"]


def test_two_choices_take_the_less_loaded_of_two_and_repeat_themselves() -> None:
    instances = fleet_of(4)
    for number, instance in enumerate(instances):
        for sequence in range(number):
            instance.begin(sequence, 0)

    def chosen(seed: int) -> list[str]:
        policy = TwoChoices(seed)
        return [policy.choose(instances, NO_HASHES).name for _ in range(300)]

    names = chosen(1)
    assert names == chosen(1)
    assert names != chosen(2)
    assert set(names) == {"0", "1", "2"}  # the fullest is never the less loaded of two
    assert names.count("0") > names.count("1") > names.count("2") > 20
    assert TwoChoices(1).choose(instances[3:], NO_HASHES) is instances[3]


def test_a_cached_prompt_counts_less_where_it_need_not_be_computed() -> None:
    instances = fleet_of(2)
    prompt = hashes_of(ids_to_bytes(list(range(8 * PROMPT_TOKENS))), "")
    computes, decodes = make_policies("prefix")
    for policy in (computes, decodes):
        assert policy.choose(instances, prompt) is instances[0]
    assert MOVED_TOKENS > 8 * PROMPT_TOKENS
    instances[0].begin(1, 0)
    assert computes.choose(instances, prompt) is instances[0]
    assert decodes.choose(instances, prompt) is instances[1]


@pytest.mark.requirement("E12")
def test_every_policy_can_be_asked_for() -> None:
    names: dict[RoutingPolicy, type] = {
        "prefix": PrefixAffinity,
        "least-load": LeastLoad,
        "round-robin": RoundRobin,
        "two-choices": TwoChoices,
    }
    for name, kind in names.items():
        policies = make_policies(name, seed=3)
        assert type(policies.compute) is type(policies.decode) is kind
        assert policies.compute is not policies.decode


def tokens(sequence: int, *ids: int, **fields: object) -> TokenEvent:
    return TokenEvent(sequence=sequence, token_ids=ids, **fields)  # type: ignore[arg-type]


def test_one_instance_is_chosen_without_a_look_at_the_prompt() -> None:
    def never(block: int) -> list[bytes]:
        raise AssertionError("hashed")

    (only,) = fleet_of(1)
    assert PrefixAffinity().choose([only], never) is only


def test_a_sequence_goes_on_from_everything_that_came() -> None:
    entry = LedgerEntry(submit(1, [5, 6], emitted_ids=ids_to_bytes([7])))
    assert entry.next_attempt() == entry.submit
    for event in (tokens(1, 8, 9), tokens(1, 10)):
        assert entry.take(event) is event
    again = entry.next_attempt()
    assert ids_from_bytes(again.prompt_ids).tolist() == [5, 6]
    assert ids_from_bytes(again.emitted_ids).tolist() == [7, 8, 9, 10]
    assert (again.seed, again.params, again.attempt) == (7, TokenParams(max_tokens=100), 1)
    entry.take(tokens(1, 11))
    assert ids_from_bytes(entry.next_attempt().emitted_ids).tolist() == [7, 8, 9, 10, 11]
    assert entry.attempt == 2


def columns(first: int, count: int) -> LogprobColumns:
    ids = np.arange(first, first + count, dtype="<i4").repeat(2)
    return LogprobColumns(
        width=2,
        ids=ids.tobytes(),
        values=ids.astype("<f4").tobytes(),
        rank=ids[::2].tobytes(),
    )


def routes(start: int, count: int) -> Routes:
    return Routes(
        start=start, layers=1, top_k=2, ids=np.arange(2 * start, 2 * (start + count), dtype="<u2").tobytes()
    )


def test_routes_that_came_before_are_dropped() -> None:
    """An engine died. The next engine begins at the first missing position, or earlier."""
    entry = LedgerEntry(submit(1, list(range(8)), routes=2))
    assert entry.next_attempt().routes == 2
    entry.take(TokenEvent(sequence=1, token_ids=(20,), routes=routes(2, 6)))
    again = entry.next_attempt()
    assert (again.routes, len(again.emitted_ids)) == (8, 4)
    shown = entry.take(TokenEvent(sequence=1, token_ids=(21,), routes=routes(5, 4)))
    assert shown is not None
    assert shown.routes == routes(8, 1)


def test_routes_beside_known_prompt_logprobs_reach_the_client() -> None:
    """An engine died in a prompt. The next engine sends the same prompt logprobs and more routes."""
    entry = LedgerEntry(submit(1, list(range(8)), routes=0))
    entry.next_attempt()
    entry.take(TokenEvent(sequence=1, prompt_logprobs=columns(0, 4), routes=routes(0, 4)))
    entry.next_attempt()
    shown = entry.take(TokenEvent(sequence=1, prompt_logprobs=columns(0, 4), routes=routes(4, 2)))
    assert shown is not None
    assert (shown.prompt_logprobs, shown.routes) == (None, routes(4, 2))


def test_a_prefill_engine_is_needed_until_the_routes_of_the_prompt_are_there() -> None:
    entry = LedgerEntry(submit(1, list(range(8)), routes=0))
    entry.next_attempt()
    entry.held = [TokenEvent(sequence=1, token_ids=(20,))]
    assert entry.needs_sender
    entry.take(TokenEvent(sequence=1, token_ids=(20,), routes=routes(0, 8)))
    assert not entry.needs_sender


def test_the_reason_of_a_miss_is_requested_until_reported() -> None:
    """Otherwise each engine that continues the sequence reports a reason, counted as another prompt."""
    entry = LedgerEntry(submit(4, [10, 11], explain=True))
    assert entry.next_attempt().explain
    assert entry.next_attempt().explain
    entry.take(TokenEvent(sequence=4, token_ids=(20,), cache_miss=CacheMiss(reason="new", position=0)))
    again = entry.next_attempt()
    assert not again.explain
    assert ids_from_bytes(again.emitted_ids).tolist() == [20]


def test_prompt_logprobs_that_came_before_are_dropped() -> None:
    """An engine died between two pieces. The next engine sends all logprobs again, in other pieces."""
    entry = LedgerEntry(submit(1, list(range(20))))
    entry.next_attempt()
    shown = [entry.take(TokenEvent(sequence=1, prompt_logprobs=columns(0, 5)))]
    entry.next_attempt()
    for event in (
        TokenEvent(sequence=1, prompt_logprobs=columns(0, 3)),
        TokenEvent(sequence=1, prompt_logprobs=columns(3, 8)),
    ):
        shown.append(entry.take(event))
    entry.next_attempt()
    for event in (
        TokenEvent(sequence=1, prompt_logprobs=columns(0, 11)),
        TokenEvent(sequence=1, prompt_logprobs=columns(11, 8), token_ids=(3,)),
    ):
        shown.append(entry.take(event))
    made = [c.prompt_logprobs.arrays() for c in shown if c is not None and c.prompt_logprobs is not None]
    for part in range(3):
        flat = np.concatenate([arrays[part].reshape(len(arrays[2]), -1)[:, 0] for arrays in made])
        assert flat.tolist() == list(range(19))
    assert shown[1] is None
    failed = TokenEvent(sequence=1, finish="error", error=ErrorInfo(code="x", message="y"))
    assert entry.take(failed) is failed
