"""Replicas whose layers need each other: a scheduler each, one step at a time, with the tokens of runs
alone."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.e0 import rig
from tests.parallel.exchange import spread_out
from tests.support.checkpoints import make_checkpoint
from tests.support.mtp_models import make_mtp_checkpoint
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.config.sections.all import SpeculationSection
from weft.engine.core import Balance, EngineCore
from weft.engine.expert_group import ExpertGroup, vote_of
from weft.group.types import GroupLost
from weft.layers.build import ExpertOptions
from weft.models.loader import load_model
from weft.parallel.agreement import AgreementGroup
from weft.parallel.group_comm import CommLost
from weft.parallel.mesh import Mesh, make_mesh
from weft.parallel.wakeup import LocalWakeups
from weft.types.layout import Layout
from weft.types.sampling import TokenParams

DEADLINE = deadline(120.0)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("domain")

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            folder = root / family
            made[family] = (
                make_mtp_checkpoint(folder, skilled=True)
                if family == "mtp"
                else make_checkpoint(folder, family)
            )
        return made[family]

    return make


class Replica:
    """The engine of one replica, stepped by a separate thread."""

    def __init__(
        self, number: int, folder: Path, mesh: Mesh, expert_group: ExpertGroup, **options: Any
    ) -> None:
        """Build the engine. ``experts``: how ranks divide experts; otherwise a stand-in exchanges rows.

        ``interval``: steps between two moves of experts.
        """
        spec = rig.spec_of(folder, int("speculation" in options))
        experts, interval = options.pop("experts", None), options.pop("interval", 0)
        divided: dict[str, Any] = {} if experts is None else {"mesh": mesh, "experts": experts}
        model = load_model(str(folder), spec, torch.float64, rig.CPU, progress=False, **divided)
        self.layers = [] if divided else spread_out(model, mesh.ep)  # type: ignore[arg-type]
        model.mesh = mesh
        overlap = options.pop("overlap", "off")
        made = rig.make_engine(folder, model=model, launcher=mesh.launcher, **options)  # type: ignore[arg-type]
        self.engine, self.runner = made
        self.engine.overlap.mode = overlap
        self.engine.expert_group = expert_group
        self.engine.balance = Balance(interval)
        self.number = number
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, str | None] = {}

    def take(self, events: Any) -> None:
        for event in events:
            self.tokens.setdefault(event.sequence, []).extend(event.token_ids)
            if event.finish is not None:
                self.ended[event.sequence] = event.finish


def serve(
    folder: Path,
    replicas: int,
    arrivals: list[list[tuple[float, Any]]],
    timeout: float = 60.0,
    between: Any = None,
    **options: Any,
) -> list[Any]:
    """Submit ``arrivals[i]`` to replica i at the given times (seconds).

    Return the replicas, or the error of each replica. ``between(replica, round)`` is called in every round.
    """
    layout = Layout(data=replicas, expert=True)
    store, wakeups = dist.HashStore(), LocalWakeups(replicas)
    total = sum(map(len, arrivals))
    made: list[Any] = [None] * replicas
    done = threading.Barrier(replicas)

    def run(number: int) -> None:
        mesh = make_mesh(layout, number)
        group = AgreementGroup(number, replicas, wakeups.of(number))
        try:
            mesh.connect(store, 0, timeout)
            group.connect(store, 0, timeout)
            replica = Replica(number, folder, mesh, ExpertGroup(group), **options)
            drive(replica, sorted(arrivals[number], key=lambda a: a[0]), between)
            made[number] = replica
            done.wait(timeout)
        except Exception as error:
            made[number] = error
            mesh.abort()
            group.abort()
            done.abort()

    finished = [0]
    lock = threading.Lock()

    def drive(replica: Replica, waiting: list[tuple[float, Any]], between: Any) -> None:
        began, rounds, counted = time.monotonic(), 0, 0
        while finished[0] < total or replica.engine.has_work():
            assert time.monotonic() - began < DEADLINE, "the domain hangs"
            rounds += 1
            while waiting and time.monotonic() - began >= waiting[0][0]:
                replica.engine.submit(waiting.pop(0)[1])
            if between is not None:
                between(replica, rounds)
            if replica.engine.has_work():
                replica.take(replica.engine.step())
            else:
                time.sleep(0.001)
            if (news := len(replica.ended) - counted) > 0:
                counted += news
                with lock:
                    finished[0] += news

    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(replicas)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE + 60)
        assert not thread.is_alive(), "a replica hangs"
    return made


def requests(count: int, seed: int = 0, most: int = 19) -> list[Any]:
    rng = random.Random(seed)
    made = []
    for number in range(count):
        prompt = [rng.randrange(3, 60) for _ in range(rng.randrange(1, 40))]
        params = TokenParams(temperature=rng.choice([0.0, 1.0]), max_tokens=rng.randrange(1, most + 1))
        made.append(rig.submit(number, prompt, params, request=number))
    return made


def alone(folder: Path, submits: list[Any], **options: Any) -> dict[int, list[int]]:
    engine, _ = rig.make_engine(folder, **options)
    return {n: a.tokens for n, a in rig.run(engine, [submits]).items()}


def checked(replicas: list[Any]) -> list[Replica]:
    failed = [replica for replica in replicas if isinstance(replica, Exception)]
    for error in sorted(failed, key=lambda error: isinstance(error, GroupLost | CommLost)):
        raise error  # a replica's own error first
    for replica in replicas:
        rig.check_idle(replica.engine)
        assert not replica.engine.has_work()
    return replicas


@pytest.mark.requirement("C1", "C13")
@mostly_slow(
    ("family", "depth"),
    [
        pytest.param(family, depth, marks=[] if depth == 1 + number % 2 else pytest.mark.grid)
        for number, family in enumerate(["qwen3_moe", "qwen3_next", "deepseek_v3", "deepseek_v4"])
        for depth in (1, 2)
    ],
    2,
)
def test_replicas_give_the_tokens_of_one(checkpoints: Any, family: str, depth: int) -> None:
    """Work comes here and there, at once and one after another; in between all replicas sleep."""
    folder, submits = checkpoints(family), requests(8)
    arrivals: list[list[tuple[float, Any]]] = [[(0.0, s) for s in submits[:5]], [(0.5, submits[5])]]
    arrivals[0].append((1.5, submits[6]))
    arrivals[1].append((2.0, submits[7]))
    replicas = checked(serve(folder, 2, arrivals, depth=depth))
    got = {n: tokens for replica in replicas for n, tokens in replica.tokens.items()}
    assert got == alone(folder, submits)
    stats = [replica.engine.stats() for replica in replicas]
    assert stats[0].steps == stats[1].steps
    assert stats[1].idle_steps > 0
    assert all(layer.calls == replicas[0].layers[0].calls for r in replicas for layer in r.layers)
    assert replicas[1].layers[0].empty > 0
    assert replicas[0].runner.deepest == depth


@pytest.mark.requirement("A10", "C1", "C7", "F44")
@mostly_slow(
    ("family", "form", "options"),
    [
        ("qwen3_moe", "low-latency", {"depth": 2}),
        ("deepseek_v4", "throughput", {}),
        ("deepseek_v3", "auto", {"interval": 4}),
        ("qwen3_moe", "gather", {"max_num_seqs": 2, "blocks": 12, "chunk": 7}),
        ("mtp", "low-latency", {"k": 2}),
    ],
    1,
)
def test_divided_experts_give_the_tokens_of_one(
    checkpoints: Any, family: str, form: str, options: dict[str, Any]
) -> None:
    """Every form of dispatch, idle replicas, chunks, preemption, drafts, and experts that move."""
    folder, submits, options = checkpoints(family), requests(7, seed=4), dict(options)
    if k := options.pop("k", 0):
        options["speculation"] = SpeculationSection(
            speculative_method="mtp", num_speculative_tokens=k, speculative_adaptive=False
        )
    arrivals = [[(0.0, s) for s in submits[:5]], [(0.3, submits[5]), (1.5, submits[6])]]
    moving = "interval" in options
    experts = ExpertOptions(dispatch=form, redundant=2 * moving, counts=moving)
    replicas = checked(serve(folder, 2, arrivals, experts=experts, **options))
    got = {n: tokens for replica in replicas for n, tokens in replica.tokens.items()}
    assert got == alone(folder, submits)
    assert sum(r.engine.stats().idle_steps for r in replicas) > 0
    layers = [replica.runner._model.experts for replica in replicas]
    assert len({one.rebalanced for one in layers}) == 1
    assert (layers[0].rebalanced > 1) == moving
    assert layers[0].placements == layers[1].placements


@pytest.mark.requirement("C2")
@pytest.mark.parametrize("k", [1, 3])
def test_drafting_passes_are_agreed(checkpoints: Any, k: int) -> None:
    """A drafter with an expert layer exchanges equally often in every replica, whichever replica drafts."""
    folder = checkpoints("mtp")
    section = SpeculationSection(
        speculative_method="mtp", num_speculative_tokens=k, speculative_adaptive=False
    )
    submits = requests(6, seed=1)
    arrivals = [[(0.0, s) for s in submits[:4]], [(0.3, s) for s in submits[4:]]]
    replicas = checked(serve(folder, 2, arrivals, speculation=section))
    got = {n: tokens for replica in replicas for n, tokens in replica.tokens.items()}
    assert got == alone(folder, submits)
    assert sum(sum(r.engine.stats().drafts_accepted) for r in replicas) > 0
    assert len({layer.calls for r in replicas for layer in r.layers[:-1]}) == 1
    assert replicas[0].layers[-1].calls == replicas[1].layers[-1].calls


@pytest.mark.slow
@pytest.mark.requirement("A16", "F44")
def test_bursts_here_and_there_and_preemption(checkpoints: Any) -> None:
    """More requests than slots, few blocks, chunks, several waves. All requests end with the right tokens."""
    folder, submits = checkpoints("qwen3_moe"), requests(24, seed=2, most=50)
    rng = random.Random(3)
    arrivals: list[list[tuple[float, Any]]] = [[], [], []]
    for submit in submits:
        arrivals[rng.randrange(3)].append((rng.choice([0.0, 0.4, 1.5, 3.0]), submit))
    options = {"max_num_seqs": 3, "blocks": 12, "chunk": 7}
    replicas = checked(serve(folder, 3, arrivals, **options))
    got = {n: tokens for replica in replicas for n, tokens in replica.tokens.items()}
    assert got == alone(folder, submits)
    assert sum(r.engine.stats().preemptions for r in replicas) > 0
    assert max(plan.rows for r in replicas for plan in r.runner.plans) <= 3


@pytest.mark.requirement("C2", "C13")
@pytest.mark.parametrize("idle", [False, True])
def test_micro_batches_are_agreed(checkpoints: Any, idle: bool) -> None:
    """One long prompt here, two short prompts (or nothing) there. All replicas split, or none."""
    long = rig.submit(0, [7 + n % 50 for n in range(70)], TokenParams(max_tokens=8), request=0)
    short = [rig.submit(n, [9, 8, 7, n], TokenParams(max_tokens=12), request=n) for n in (1, 2)]
    arrivals = [[(0.0, long)], [] if idle else [(0.0, s) for s in short]]
    replicas = checked(serve(checkpoints("qwen3_moe"), 2, arrivals, overlap="all"))
    got = {n: tokens for replica in replicas for n, tokens in replica.tokens.items()}
    assert got == alone(checkpoints("qwen3_moe"), [long] if idle else [long, *short])
    first, second = ([plan.micro_batches for plan in replica.runner.plans] for replica in replicas)
    assert first == second
    assert 2 in first
    assert 1 in first, "one row that decodes does not split"


@pytest.mark.requirement("C13")
def test_a_replica_that_raises_ends_the_step_everywhere(checkpoints: Any) -> None:
    def between(replica: Replica, rounds: int) -> None:
        if replica.number == 1 and replica.engine.stats().steps == 5:
            raise EngineDead("planted")

    long = [rig.submit(n, [5, 6, 7], TokenParams(max_tokens=60), request=n) for n in range(2)]
    arrivals = [[(0.0, long[0])], [(0.0, long[1])]]
    first, second = serve(checkpoints("qwen3_moe"), 2, arrivals, timeout=deadline(20), between=between)
    assert isinstance(first, EngineDead)
    assert second.message == "planted"


@pytest.mark.requirement("C13")
def test_a_slow_replica_is_waited_for(checkpoints: Any) -> None:
    def between(replica: Replica, rounds: int) -> None:
        if replica.number == 1 and replica.engine.stats().steps % 4 == 1:
            time.sleep(0.05)

    submits = requests(4, seed=5)
    arrivals = [[(0.0, s) for s in submits], []]
    replicas = checked(serve(checkpoints("qwen3_moe"), 2, arrivals, between=between, depth=2))
    assert replicas[0].tokens == alone(checkpoints("qwen3_moe"), submits)


def test_no_replica_steps_while_the_weights_differ(checkpoints: Any) -> None:
    """Replica 1 starts again with the weights of the start. Replica 0 computes nothing with experts of these
    weights, and goes on when replica 1 has caught up."""
    submits = requests(3, seed=6)
    seen: list[tuple[int, int]] = []

    def between(replica: Replica, rounds: int) -> None:
        engine = replica.engine
        if replica.number == 0:
            engine.weights._group = SimpleNamespace(version=1, name=None)  # type: ignore[assignment]
        elif rounds == 20:
            seen.append((engine.steps, len(replica.tokens)))
            engine.weights._group = SimpleNamespace(version=1, name=None)  # type: ignore[assignment]

    arrivals = [[(0.0, s) for s in submits[:2]], [(0.0, submits[2])]]
    replicas = checked(serve(checkpoints("qwen3_moe"), 2, arrivals, between=between, depth=2))
    assert seen == [(0, 0)]
    assert replicas[0].tokens | replicas[1].tokens == alone(checkpoints("qwen3_moe"), submits)


def test_a_plan_of_other_weights_is_given_up(checkpoints: Any) -> None:
    """Replica 1 changes the weights although replica 0 has a sequence: no replica runs the planned step."""

    def between(replica: Replica, rounds: int) -> None:
        if replica.number == 1 and replica.engine.steps == 1:
            replica.engine.weights._group = SimpleNamespace(version=1, name=None)  # type: ignore[assignment]

    arrivals = [[(0.0, requests(1, seed=7)[0])], []]
    for error in serve(checkpoints("qwen3_moe"), 2, arrivals, between=between, depth=1):
        assert isinstance(error, GroupLost)
        assert "different versions" in str(error)


@pytest.mark.requirement("C3")
def test_an_oversized_request_votes_for_its_chunk(checkpoints: Any) -> None:
    """The vote has one row with its tokens clamped to the step, never no row."""
    engine, _ = rig.make_engine(checkpoints("qwen3_moe"), chunk=16)
    assert isinstance(engine, EngineCore)
    votes = []

    class Listening(ExpertGroup):
        def held(self, weights: int) -> bool:
            return False

        def settle(self, plan, unfinished, idle, updates=(), weights=0):  # type: ignore[no-untyped-def, override]
            votes.append(vote_of(plan, unfinished))
            return plan

    group = AgreementGroup(0, 1, LocalWakeups(1))
    engine.expert_group = Listening(group)
    engine.submit(rig.submit(1, list(range(3, 60)), TokenParams(max_tokens=2), request=1))
    while engine.has_work():
        engine.step()
    assert [(vote.rows, vote.tokens) for vote in votes] == [(1, 16), (1, 16), (1, 16), (1, 9), (1, 1)]
    assert all(vote.unfinished for vote in votes)
