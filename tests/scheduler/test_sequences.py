"""The life of one sequence: validation, ends, parallel samples, prompt logprobs, prefix hits, states."""

from __future__ import annotations

import itertools

import pytest

from tests.scheduler.fake_runner import BAD_SEED, ROW_ERROR, VOCAB, alone, kv_config, submit
from tests.scheduler.harness import Rig
from weft.common.errors import ContextLength, EngineDead, InvalidRequest
from weft.scheduler.sequence import (
    TRANSITIONS,
    Blocked,
    BlockedOnFirstSample,
    Ended,
    FetchedTables,
    Fetching,
    Running,
    Sequence,
    Waiting,
)
from weft.types.messages import Submit


def refused(rig: Rig, request: Submit) -> InvalidRequest:
    before = rig.scheduler.stats()
    with pytest.raises(InvalidRequest) as caught:
        rig.scheduler.add(request, 0.0)
    assert rig.scheduler.stats() == before
    return caught.value


@pytest.mark.parametrize(
    ("param", "request_"),
    [
        ("prompt", submit(1, [])),
        ("prompt", submit(1, [1, VOCAB])),
        ("prompt", submit(1, [-1, 3])),
        ("emitted_ids", submit(1, [1], emitted=[VOCAB])),
        ("logit_bias", submit(1, [1], logit_bias=((VOCAB, 1.0),))),
        ("logit_bias", submit(1, [1], logit_bias=((1, float("nan")),))),
        ("allowed_token_ids", submit(1, [1], allowed=(0, VOCAB))),
        ("allowed_token_ids", submit(1, [1], allowed=())),
        ("bad_words", submit(1, [1], bad=((1, VOCAB),))),
        ("bad_words", submit(1, [1], bad=((),))),
        ("stop_token_ids", submit(1, [1], stop_ids=(VOCAB,))),
        ("max_tokens", submit(1, [1], max_tokens=0)),
        ("min_tokens", submit(1, [1], max_tokens=2, min_tokens=3)),
        ("temperature", submit(1, [1], temperature=float("inf"))),
        ("top_p", submit(1, [1], top_p=0.0)),
        ("logprobs", submit(1, [1], logprobs=1025)),
        ("seed", submit(1, [1], seed=1 << 64)),
        ("choice", submit(1, [1], choice=-1)),
        ("owner", submit(1, [1], owner=1 << 64)),
        ("repetition_penalty", submit(1, [1], repetition_penalty=1e-39)),
    ],
)
def test_requests_beyond_the_models_abilities_are_refused(param: str, request_: Submit) -> None:
    assert refused(Rig(kv_config()), request_).param == param


def test_bytes_that_are_no_ids_are_refused() -> None:
    bad = Submit(sequence=1, request=1, seed=0, prompt_ids=b"abc", params=submit(1, [1]).params)
    assert refused(Rig(kv_config()), bad).param == "prompt"


def test_context_length() -> None:
    rig = Rig(kv_config(max_model_len=48))
    assert isinstance(refused(rig, submit(1, [1] * 48)), ContextLength)
    rig.submit(submit(1, [1] * 47, max_tokens=100))
    rig.submit(submit(2, [1] * 40, max_tokens=100))
    rig.drain()
    rig.check_outputs()
    assert [len(rig.outputs[n].tokens) for n in (1, 2)] == [1, 8]
    assert rig.outputs[1].finish == "length"


@pytest.mark.requirement("F45")
def test_live_ids_are_not_given_twice() -> None:
    rig = Rig(kv_config())
    rig.submit(submit(1, [1]))
    assert refused(rig, submit(1, [2])).param == "sequence"
    rig.drain()
    rig.submit(submit(1, [2]))
    rig.drain()
    rig.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_stop_id_ends_after_min_tokens(depth: int) -> None:
    free, _ = alone(submit(0, [7, 8], max_tokens=12), 48)
    stop = free[3]
    rig = Rig(kv_config(), depth)
    rig.submit(submit(0, [7, 8], max_tokens=12, stop_ids=(stop,)))
    rig.submit(submit(1, [7, 8], max_tokens=12, stop_ids=(stop,), min_tokens=5))
    rig.drain()
    rig.check_outputs()
    assert rig.outputs[0].tokens == free[: free.index(stop) + 1]
    assert (rig.outputs[0].finish, rig.outputs[0].stop_id) == ("stop", stop)
    assert stop not in rig.outputs[1].tokens[:5]
    rig.check_idle()


def test_emitted_ids_count_as_output() -> None:
    whole, _ = alone(submit(0, [5, 6], max_tokens=8), 48)
    rig = Rig(kv_config())
    rig.submit(submit(0, [5, 6], emitted=whole[:3], max_tokens=8))
    rig.submit(submit(1, [5, 6], emitted=whole[:8], max_tokens=8))
    rig.submit(submit(2, [5, 6], emitted=whole[:3], max_tokens=8, stop_ids=(whole[2],)))
    assert (rig.outputs[1].finish, rig.outputs[1].tokens) == ("length", [])
    assert (rig.outputs[2].finish, rig.outputs[2].stop_id) == ("stop", whole[2])
    assert rig.scheduler.stats().waiting == 1
    rig.drain()
    rig.check_outputs()
    assert rig.outputs[0].tokens == whole[3:]


@pytest.mark.requirement("B6", "F45")
@pytest.mark.parametrize("steps", range(6))
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_every_state_is_idempotent(steps: int, depth: int) -> None:
    rig = Rig(kv_config(), depth)
    rig.submit(submit(0, [1] * 40, max_tokens=8))
    rig.submit(submit(1, [2] * 10, max_tokens=3))
    rig.submit(submit(2, [2] * 10, max_tokens=3, request=1, choice=1))
    for _ in range(steps):
        rig.step()
    for sequence in (0, 2):
        rig.finish(sequence)
        assert rig.scheduler.finish(sequence) == []
    assert rig.scheduler.finish(99) == []
    rig.drain()
    rig.check_outputs()
    rig.check_idle()


@pytest.mark.requirement("F43")
def test_row_error_ends_that_row_only() -> None:
    rig = Rig(kv_config())
    rig.submit(submit(0, [1, 2], seed=BAD_SEED))
    rig.submit(submit(1, [1, 2]))
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert (rig.outputs[0].finish, rig.outputs[0].error) == ("error", ROW_ERROR)
    assert rig.scheduler.stats().row_errors == 1


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_parallel_samples_share_the_prompt(caching: bool, late: bool) -> None:
    rig = Rig(kv_config(caching=caching), 2)
    prompt = list(range(30))
    rig.submit(submit(0, prompt, max_tokens=8))
    if late:
        for _ in range(3):
            rig.step()
    for choice in (1, 2):
        rig.submit(submit(choice, prompt, request=0, choice=choice, max_tokens=8))
    most = 0
    while rig.scheduler.has_work():
        rig.step()
        rig.audit()
        most = max(most, 64 - rig.scheduler.stats().free_blocks[0])
    rig.check_outputs()
    rig.check_idle()
    assert [rig.outputs[n].num_cached for n in range(3)] == [0, 28, 28]
    assert most <= 7 + 3 * 3  # seven shared blocks, and a tail for each sequence
    assert rig.scheduler.stats().prefix_hits == 56


def test_parallel_samples_wait_for_the_prompt_and_block_nobody() -> None:
    rig = Rig(kv_config(), 1, long_prefill_token_threshold=6)
    rig.submit(submit(0, [1] * 20, max_tokens=3))
    rig.submit(submit(1, [1] * 20, request=0, choice=1, max_tokens=3))
    rig.submit(submit(2, [2] * 6, max_tokens=3))
    rig.step()
    assert rig.outputs[2].tokens  # a younger sequence is not delayed by the parallel sample
    assert rig.scheduler.stats().waiting == 1
    rig.drain()
    rig.check_outputs()
    assert rig.outputs[1].num_cached == 16


def test_without_caching_nothing_else_is_shared() -> None:
    rig = Rig(kv_config(caching=False))
    for number in range(3):
        rig.submit(submit(number, [1] * 20))
        rig.drain()
    assert rig.scheduler.stats().prefix_hits == 0
    assert [output.num_cached for output in rig.outputs.values()] == [0, 0, 0]


@pytest.mark.parametrize("caching", [True, False])
def test_when_the_first_sample_goes_a_parallel_sample_leads(caching: bool) -> None:
    rig = Rig(kv_config(caching=caching), 2, long_prefill_token_threshold=6)
    for choice in range(3):
        rig.submit(submit(choice, [1] * 20, request=0, choice=choice))
    rig.step()
    rig.finish(0)
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert rig.outputs[2].num_cached == 16


@pytest.mark.requirement("F33")
def test_equal_prefixes_are_shared_between_equal_salts_only() -> None:
    rig = Rig(kv_config())
    for number, salt in enumerate(("", "a", "a", "b", "")):
        rig.submit(submit(number, list(range(21)), salt=salt))
        rig.drain()
    rig.check_outputs()
    assert [output.num_cached for output in rig.outputs.values()] == [0, 0, 20, 0, 20]


def test_at_least_one_token_is_recomputed() -> None:
    rig = Rig(kv_config())
    for number in range(2):
        rig.submit(submit(number, list(range(20))))
        rig.drain()
    rig.check_outputs()
    assert rig.outputs[1].num_cached == 16


def test_generated_tokens_are_cached_as_a_prefix() -> None:
    rig = Rig(kv_config())
    rig.submit(submit(0, [1, 2, 3], max_tokens=14))
    rig.drain()
    rig.submit(submit(1, [1, 2, 3, *rig.outputs[0].tokens]))
    rig.drain()
    rig.check_outputs()
    assert rig.outputs[1].num_cached == 16


@pytest.mark.parametrize("threshold", [0, 1, 7])
@pytest.mark.parametrize("depth", [1, 2])
def test_prompt_logprobs_are_computed_not_cached(threshold: int, depth: int) -> None:
    rig = Rig(kv_config(), depth, long_prefill_token_threshold=threshold)
    prompt = list(range(20))
    rig.submit(submit(0, prompt))
    rig.drain()
    for choice in range(3):
        rig.submit(
            submit(choice + 1, prompt, request=9, choice=choice, prompt_logprobs=1 + choice, logprobs=choice)
        )
    rig.submit(submit(7, [3], prompt_logprobs=0))
    rig.drain()
    rig.check_outputs()
    assert [rig.outputs[n].num_cached for n in (1, 2, 3)] == [0, 16, 16]
    assert [ids[0] for ids in rig.outputs[1].prompt_logprob_ids] == prompt[1:]
    assert not rig.outputs[2].prompt_logprob_ids


def test_prompt_logprobs_are_delivered_once_across_preemption() -> None:
    rig = Rig(kv_config(blocks=14, max_model_len=48), 2, max_num_seqs=2, long_prefill_token_threshold=4)
    rig.submit(submit(0, [1] * 8, max_tokens=40))
    for _ in range(4):
        rig.step()
    rig.submit(submit(1, list(range(30)), max_tokens=3, prompt_logprobs=0))
    for _ in range(5):
        rig.step()
    victim = rig.scheduler._state.live[1]
    assert isinstance(victim.state, Running)
    assert 0 < victim.delivered < 29
    rig.scheduler._state.preempt(victim, victim.state)
    rig.drain()
    rig.check_outputs()
    rig.check_idle()
    assert [ids[0] for ids in rig.outputs[1].prompt_logprob_ids] == list(range(1, 30))


def test_states_change_by_the_table_alone() -> None:
    states = [
        BlockedOnFirstSample(),
        Blocked(),
        Fetching(FetchedTables(-2, 8)),
        Waiting(),
        Running(slot=0, gen=1, known=1),
        Ended("stop"),
    ]
    from array import array

    for before, after in itertools.product(states, states):
        sequence = Sequence(submit(0, [1]), array("i", [1]), 1, 4, 0)
        sequence.state = before
        if type(after) in TRANSITIONS[type(before)]:
            sequence.move(after)
            assert sequence.state is after
        else:
            with pytest.raises(EngineDead, match=f"from {type(before).__name__} to {type(after).__name__}"):
                sequence.move(after)
    assert set(TRANSITIONS) == {type(state) for state in states}
