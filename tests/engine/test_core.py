"""The step loop on a real model: isolation of bad rows, recycled buffers, aborts, traces."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path

import pytest
import torch

from tests.e0.rig import MAX_LEN, make_engine, model_of, run, submit
from tests.support.checkpoints import VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.common.errors import EngineDead, InvalidRequest, Overloaded
from weft.engine.core import Balance
from weft.overlap.overlap_policy import OverlapPolicy
from weft.runner.step_handle import StepHandle
from weft.runner.step_trace import StepTrace
from weft.scheduler.sequence import Sequence
from weft.types.messages import TokenEvent
from weft.types.plan import Rebalance, StepPlan, StepResult
from weft.types.sampling import TokenParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("core"), "llama")


def prompt(rng: random.Random, low: int = 2, high: int = 40) -> list[int]:
    return [rng.randrange(1, VOCAB) for _ in range(rng.randrange(low, high))]


def greedy(tokens: int, **more: object) -> TokenParams:
    return TokenParams(temperature=0.0, max_tokens=tokens, **more)  # type: ignore[arg-type]


def alone(folder: Path, ids: list[int], params: TokenParams, request: int) -> list[int]:
    engine, _ = make_engine(folder, caching=False, max_num_seqs=1)
    return run(engine, [[submit(1, ids, params, request=request)]])[1].tokens


@pytest.mark.requirement("F43")
@pytest.mark.parametrize("depth", [1, 2])
def test_a_row_that_is_not_finite_fails_its_own_request(folder: Path, depth: int) -> None:
    """The embedding of token 0 is NaN. Sequences with token 0 in the prompt fail, the others are
    unaffected."""
    model = make_checkpoint_with_bad_token(folder)
    engine, _ = make_engine(folder, depth=depth, model=model)
    rng = random.Random(1)
    good = [prompt(rng) for _ in range(6)]
    params = greedy(12, bad=((0,),))  # otherwise a healthy row may sample the bad token
    submits = [submit(i + 1, ids, params, request=i) for i, ids in enumerate(good)]
    submits.insert(3, submit(99, [4, 0, 5], greedy(12), request=99))
    answers = run(engine, [submits])
    engine.close()
    assert answers[99].ends == ["error"]
    assert answers[99].error.code == "non_finite_logits"
    assert engine.stats().row_errors == 1
    for i, ids in enumerate(good):
        assert answers[i + 1].tokens == alone(folder, ids, params, i)


def make_checkpoint_with_bad_token(folder: Path) -> torch.nn.Module:
    from weft.config.families import load_spec
    from weft.models.loader import load_model

    model = load_model(
        str(folder), load_spec(str(folder), None), torch.float64, torch.device("cpu"), progress=False
    )
    with torch.no_grad():
        model.embedding.weight[0] = float("nan")
    return model


@pytest.mark.requirement("B17")
def test_back_to_back_steps_over_poisoned_buffers(folder: Path) -> None:
    """Two steps are always in flight, returned buffers are overwritten at once, and rows come and go."""
    engine, runner = make_engine(folder, depth=2, chunk=5, max_num_seqs=6)
    rng = random.Random(2)
    asked = {i + 1: prompt(rng) for i in range(30)}
    arrivals = [[submit(i, ids, greedy(9), request=i)] for i, ids in asked.items()]
    answers = run(engine, arrivals)
    engine.close()
    assert runner.deepest == 2
    assert engine.stats().mixed_steps > 20
    for i in rng.sample(sorted(asked), 8):
        assert answers[i].tokens == alone(folder, asked[i], greedy(9), i)


@mostly_slow("depth", [1, 2], [2])
@mostly_slow("shape", ["mistral", "qwen2_windowed"], 1)
def test_windows_over_a_pool_of_hardly_more_than_one(tmp_path: Path, shape: str, depth: int) -> None:
    """Blocks leave windows, are reused, and are found by prefix. No sequence reads a foreign block."""
    own = make_checkpoint(tmp_path, shape)
    engine, _ = make_engine(own, blocks=30, window_blocks=6, chunk=7, depth=depth, max_num_seqs=4)
    rng = random.Random(7)
    prefix = [rng.randrange(1, VOCAB) for _ in range(24)]
    asked = {i: (prefix if i % 2 else prefix[:16]) + prompt(rng, 1, 16) for i in range(1, 11)}
    answers = run(engine, [[submit(i, ids, greedy(30), request=i)] for i, ids in asked.items()])
    engine.close()
    stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    for i in rng.sample(sorted(asked), 4):
        assert answers[i].tokens == alone(own, asked[i], greedy(30), i)


@pytest.mark.requirement("F42")
@pytest.mark.parametrize(
    "depth", [pytest.param(1, marks=pytest.mark.grid), pytest.param(2, marks=pytest.mark.slow)]
)
def test_soak_of_cancels_and_stops_on_a_small_pool(
    folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 requests share blocks for 1.5 sequences: one terminal event each, no leaked block, few
    preemptions."""
    engine, _ = make_engine(folder, blocks=MAX_LEN * 3 // 2 // 8, depth=depth, chunk=16)
    seen: dict[int, Sequence] = {}
    add = engine.scheduler.add

    def watching_add(one: object, now: float) -> list[TokenEvent]:
        events = add(one, now)  # type: ignore[arg-type]
        seen.update(engine.scheduler._state.live)
        return events

    monkeypatch.setattr(engine.scheduler, "add", watching_add)
    rng = random.Random(3 + depth)
    arrivals, cancel_at = [], {}
    for i in range(1, 201):
        ids = prompt(rng, 2, 60)
        stop = tuple(rng.sample(range(VOCAB), 6)) if rng.random() < 0.3 else ()
        params = TokenParams(
            temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(1, MAX_LEN - len(ids)), stop_ids=stop
        )
        arrivals.append([submit(i, ids, params, request=i)])
        if rng.random() < 0.3:
            cancel_at.setdefault(i - 1 + rng.randrange(0, 120), []).append(i)
    answers = run(
        engine, arrivals, lambda step: [e for i in cancel_at.pop(step, []) for e in engine.finish(i)]
    )
    engine.close()
    assert len(answers) == 200
    assert all(len(answer.ends) == 1 for answer in answers.values())
    ends = {answer.ends[0] for answer in answers.values()}
    assert ends == {"abort", "length", "stop"}
    assert engine.stats().preemptions > 0
    assert max(sequence.preemptions for sequence in seen.values()) <= 3
    assert len(seen) == 200


@pytest.mark.requirement("F45")
def test_finish_is_idempotent_and_unknown_ids_are_fine(folder: Path) -> None:
    engine, _ = make_engine(folder)
    assert engine.finish(7) == []
    engine.submit(submit(7, [1, 2], greedy(5), request=7))
    engine.step()
    assert [event.finish for event in engine.finish(7)] == ["abort"]
    assert engine.finish(7) == []
    assert run(engine, []) == {}
    engine.close()


def test_a_refused_submit_changes_nothing(folder: Path) -> None:
    engine, _ = make_engine(folder)
    with pytest.raises(InvalidRequest):
        engine.submit(submit(1, [VOCAB], greedy(5), request=1))
    with pytest.raises(InvalidRequest):
        engine.submit(submit(1, [], greedy(5), request=1))
    assert not engine.has_work()
    for i in range(1024 + engine.config.scheduler.max_num_seqs):
        engine.submit(submit(i, [1], greedy(1), request=i))
    with pytest.raises(Overloaded):
        engine.submit(submit(5000, [1], greedy(1), request=5000))
    engine.close()


def test_emitted_ids_continue_a_stream(folder: Path) -> None:
    """After an engine died, the API server sends prompt and emitted ids. The remaining tokens are equal."""
    rng = random.Random(4)
    ids = prompt(rng)
    params = TokenParams(temperature=1.0, frequency_penalty=0.5, max_tokens=20)
    whole = alone(folder, ids, params, 3)
    from weft.types.messages import ids_to_bytes

    engine, _ = make_engine(folder)
    again = submit(1, ids, params, request=3, emitted_ids=ids_to_bytes(whole[:11]))
    assert run(engine, [[again]])[1].tokens == whole[11:]
    engine.close()


@pytest.mark.requirement("B21")
def test_the_trace_names_each_steps_composition(folder: Path, tmp_path: Path) -> None:
    engine, runner = make_engine(folder, chunk=4)
    runner._trace = StepTrace(str(tmp_path / "trace.json"))
    rng = random.Random(5)
    run(engine, [[submit(i, prompt(rng, 6, 20), greedy(6), request=i)] for i in range(1, 5)])
    engine.close()
    origin, *events = json.loads((tmp_path / "trace.json").read_text())
    assert origin["args"]["unix_ns"] > 0
    assert len(events) == engine.stats().steps
    assert {event["name"] for event in events} >= {"step 1/4 + 0/0"}
    mixed = [e for e in events if e["args"]["prefill_rows"] and e["args"]["decode_rows"]]
    assert len(mixed) == engine.stats().mixed_steps > 0


def test_a_step_gap_stops_the_group(folder: Path) -> None:
    engine, runner = make_engine(folder)
    engine.submit(submit(1, [1, 2, 3], greedy(5), request=1))
    engine.step()
    runner._next_step = 77
    with pytest.raises(EngineDead, match="follows step"):
        engine.step()
    engine.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interrupted_wait_loses_nothing(folder: Path, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during a wait for a step: the step is read again, and the stream has the same tokens."""
    engine, runner = make_engine(folder, depth=depth)
    read, calls = runner.read, []

    def interrupted(handle: StepHandle) -> StepResult:
        calls.append(handle.plan.step)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(handle)

    monkeypatch.setattr(runner, "read", interrupted)
    engine.submit(submit(1, [1, 2, 3], greedy(10), request=1))
    tokens: list[int] = []
    while engine.has_work():
        try:
            tokens += [token for event in engine.step() for token in event.token_ids]
        except KeyboardInterrupt:
            assert len(calls) == 4
    assert len(calls) > len(set(calls))
    assert tokens == alone(folder, [1, 2, 3], greedy(10), 1)
    assert run(engine, []) == {}
    engine.close()


def test_an_interrupted_launch_ends_the_group(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted launch cannot be resumed. The group ends, and no caller waits forever."""
    engine, runner = make_engine(folder, depth=1)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner._sampler, "sample", interrupted)
    engine.submit(submit(1, [1, 2, 3], greedy(5), request=1))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    engine.submit(submit(2, [1, 2, 3], greedy(5), request=2))
    for _ in range(2):
        with pytest.raises(EngineDead, match="interrupted"):
            engine.step()
    engine.close()


def test_a_plan_that_was_never_launched_ends_the_group(folder: Path) -> None:
    engine, _ = make_engine(folder)
    engine.submit(submit(1, [1, 2, 3], greedy(5), request=1))
    assert engine.scheduler.plan(0.0) is not None
    engine.finish(1)
    assert engine.has_work()
    with pytest.raises(EngineDead, match="never launched"):
        engine.step()
    engine.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a file that is always full")
def test_a_full_disk_ends_the_trace_and_not_the_engine(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("weft"), "propagate", True)
    engine, runner = make_engine(folder, chunk=1)
    runner._trace = StepTrace("/dev/full")
    asked = [submit(i, [1] * 40, greedy(40), request=i) for i in range(1, 3)]
    answers = run(engine, [[one] for one in asked])
    engine.close()
    assert all(len(answer.tokens) == 40 for answer in answers.values())
    # A record may be captured several times on the way to the root logger.
    warned = {id(r): r.name for r in caplog.records if "trace ends" in r.message}
    assert list(warned.values()) == ["weft.runner.step_trace"]


def test_models_are_shared_between_engines(folder: Path) -> None:
    """The model holds no state between steps: two engines on one model interleave freely."""
    assert model_of(folder) is model_of(folder)
    engines = [make_engine(folder)[0] for _ in range(2)]
    rng = random.Random(6)
    prompts = [prompt(rng) for _ in engines]
    got: list[list[int]] = [[], []]
    for engine, ids in zip(engines, prompts, strict=True):
        engine.submit(submit(1, ids, greedy(10), request=1))
    while any(engine.has_work() for engine in engines):
        for tokens, engine in zip(got, engines, strict=True):
            for event in engine.step() if engine.has_work() else []:
                tokens.extend(event.token_ids)
    assert got == [alone(folder, ids, greedy(10), 1) for ids in prompts]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_plan_of_ops_alone_runs_between_others(folder: Path, depth: int) -> None:
    """The plan is validated, executed and committed, with and without rows in flight."""
    engine, runner = make_engine(folder, depth=depth)
    ids, params = [1, 2, 3, 4], greedy(8)

    def each_step(number: int) -> list[TokenEvent]:
        if number in (0, 3):
            engine.scheduler.enqueue(Rebalance())
        return []

    arrivals = [[], [submit(1, ids, params, request=1)]]
    answers = run(engine, arrivals, each_step)
    engine.scheduler.enqueue(Rebalance())
    while engine.has_work():
        assert engine.step() == []
    engine.close()
    moved = [plan for plan in runner.plans if Rebalance() in plan.ops]
    assert [plan.rows for plan in moved] == [0, 1, 0]
    assert engine.stats().idle_steps == 2
    assert engine.stats().steps == len(runner.plans)
    assert answers[1].tokens == alone(folder, ids, params, 1)


def test_a_plan_is_the_same_object_from_freeze_to_commit(folder: Path) -> None:
    """The plan is the same object from freeze to commit, with all plan rewrites active."""
    engine, runner = make_engine(folder, depth=2)
    engine.balance, engine.overlap = Balance(2), OverlapPolicy("all")
    engine.submit(submit(1, list(range(1, 40)), greedy(6), request=1))
    commit, committed = engine.scheduler.commit, []

    def listening(plan: StepPlan, result: StepResult, now: float) -> list[TokenEvent]:
        assert plan is engine.scheduler._state.in_flight[0]
        committed.append(plan)
        return commit(plan, result, now)

    engine.scheduler.commit = listening  # type: ignore[method-assign]
    while engine.has_work():
        engine.step()
    engine.close()
    assert len(committed) == len(runner.plans) > 4
    assert all(ours is theirs for ours, theirs in zip(committed, runner.plans, strict=True))
    assert {plan.micro_batches for plan in committed} == {1, 2}
    assert engine.balance.asked == sum(Rebalance() in plan.ops for plan in committed) > 0
