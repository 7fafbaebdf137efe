"""Sequences that end with an embedding and without a token."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest

from tests.scheduler.fake_runner import BAD_SEED, embedding, kv_config, submit
from tests.scheduler.harness import Rig
from tests.support.slow import mostly_slow
from weft.common.errors import ContextLength, InvalidRequest
from weft.types.grammar import Text
from weft.types.messages import Submit, TokenEvent, ids_from_bytes


class Embedder(Rig):
    """A rig that records the embeddings of sequences and checks the events with embeddings."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.ends: dict[int, TokenEvent] = {}

    def collect(self, events: list[TokenEvent]) -> None:
        super().collect(events)
        for event in events:
            if self.outputs[event.sequence].request.pooling:
                assert not event.token_ids
                self.ends[event.sequence] = event
                del self.outputs[event.sequence]
            else:
                assert not event.embedding

    def check(self, request: Submit) -> None:
        event = self.ends[request.sequence]
        if event.finish == "abort" or (event.error is not None and event.error.code == "engine_dead"):
            assert not event.embedding  # aborted, or lost too many times with the group
        elif request.seed == BAD_SEED:
            assert (event.finish, event.embedding) == ("error", b"")
            assert event.error is not None
            assert event.error.code == "non_finite_logits"
        else:
            assert event.finish == "stop"
            tokens = ids_from_bytes(request.prompt_ids).tolist()
            expected = np.array(embedding(tokens, request.pooling), np.float32)
            assert np.frombuffer(event.embedding, "<f4").tolist() == expected.tolist()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_it_ends_with_its_prompt(depth: int, chunk: int, pooling: str) -> None:
    rig = Embedder(kv_config(), depth, long_prefill_token_threshold=chunk)
    request = submit(0, list(range(20)), pooling=pooling)  # type: ignore[arg-type]
    rig.submit(request)
    rig.submit(submit(1, [3, 4]))
    rig.drain()
    rig.check(request)
    rig.check_outputs()
    rig.check_idle()
    stats = rig.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (22, 6)


def test_a_mean_reads_no_cache_and_both_fill_it() -> None:
    rig = Embedder(kv_config(), 1)
    prompt = list(range(20))
    for number, pooling in enumerate(["mean", "last", "mean"]):
        request = submit(number, prompt, pooling=pooling)  # type: ignore[arg-type]
        rig.submit(request)
        rig.drain()
        rig.check(request)
    assert [rig.ends[number].num_cached for number in range(3)] == [0, 16, 0]
    rig.submit(submit(3, [*prompt, 7]))
    rig.drain()
    assert rig.outputs[3].num_cached == 20


def test_a_prompt_may_be_as_long_as_the_context() -> None:
    """No token follows the prompt. The pool holds exactly one sequence of the longest length."""
    rig = Embedder(kv_config(blocks=12, slots=2), 2, max_num_seqs=2)
    longest = rig.kv.max_model_len
    requests = [submit(n, [n] * longest, pooling="last") for n in range(2)]
    for request in requests:
        rig.submit(request)
    rig.drain()
    for request in requests:
        rig.check(request)
    with pytest.raises(ContextLength, match=r"context is 48 tokens: shorten"):
        rig.scheduler.add(submit(9, [1] * (longest + 1), pooling="last"), 0.0)
    with pytest.raises(ContextLength, match="output included"):
        rig.scheduler.add(submit(9, [1] * longest), 0.0)


def test_output_options_of_embeddings_are_refused() -> None:
    rig = Embedder(kv_config(), 1)
    one = submit(0, [1, 2], pooling="last")
    for wrong in (
        msgspec.structs.replace(one, emitted_ids=one.prompt_ids),
        msgspec.structs.replace(one, grammar=Text("a")),
    ):
        with pytest.raises(InvalidRequest, match="an embedding has no output"):
            rig.scheduler.add(wrong, 0.0)


@mostly_slow("depth", [1, 2], [2])
@pytest.mark.parametrize("drafts", [0, 2])
def test_random_loads(depth: int, drafts: int) -> None:
    """Embedding sequences run beside others, with little memory, aborts and lost ranks."""
    preempted = again = 0
    for seed in range(12):
        rng = random.Random(seed)
        kv = kv_config(
            blocks=rng.choice([14, 40]),
            slots=4 * depth,
            caching=rng.random() < 0.7,
            window=rng.choice([None, 6]),
            states=rng.choice([0, 5]),
            copies=1 + drafts,
        )
        policy = rng.choice(["mixed", "exclusive"])
        chunk = rng.choice([0, 3])
        rig = Embedder(kv, depth, max_num_seqs=4, step_policy=policy, long_prefill_token_threshold=chunk)
        requests = []
        for number in range(50):
            prompt = [rng.randrange(2) for _ in range(rng.randint(1, 40))]
            pooling = rng.choice(["", "last", "mean"])
            bad = BAD_SEED if rng.random() < 0.1 else 1
            more = {"prompt_logprobs": rng.choice([-1, 1]), "max_tokens": rng.randint(1, 8)}
            request = submit(number, prompt, pooling=pooling, seed=bad, **more)  # type: ignore[arg-type]
            requests.append(request)
            rig.submit(request)
            for _ in range(rng.randint(0, 4)):
                rig.step()
                rig.audit()
            if rng.random() < 0.1:
                gone = rng.randrange(number + 1)
                if gone in rig.outputs:
                    rig.finish(gone)
            if rng.random() < 0.1:
                again += sum(bool(s.pooling) for s in rig.scheduler._state.running)
                rig.lose()
        rig.drain()
        rig.check_outputs()
        rig.check_idle()
        for request in requests:
            if request.pooling:
                rig.check(request)
        preempted += rig.scheduler.stats().preemptions
    assert preempted > 0
    assert again > 0
