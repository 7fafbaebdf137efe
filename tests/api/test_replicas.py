"""``LLM`` over replicas in separate processes gives the outputs of a single engine."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.loras import make_adapter
from tests.support.slowness import deadline
from weft import LLM, AsyncLLM, SamplingParams
from weft.common.errors import ConfigError, EngineDead, InvalidRequest
from weft.config.hub import bundled_models
from weft.engine.server.replicas import summed
from weft.types.messages import SECONDS, EngineStats, Measures, TransferStats

COMMON: dict[str, Any] = {
    "dtype": "float64",
    "device": "cpu",
    "threads": 1,
    "kv_cache_memory": "64M",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "seed": 1,
    "rank_timeout": deadline(60.0),
}
FOUR = {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
PROMPTS = [f"Tom has {n} apples and buys {n + 3} more. How many apples does he have?" for n in range(2, 8)]
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=9, n=2, logprobs=1, ignore_eos=True, seed=5),
]


def params() -> list[SamplingParams]:
    return [PARAMS[number % 2] for number in range(len(PROMPTS))]


def tokens(outputs: Any) -> list[list[list[int]]]:
    return [[choice.token_ids for choice in output.outputs] for output in outputs]


def instances(llm: LLM) -> list[Any]:
    return list(llm._core.thread.links.instances)  # type: ignore[union-attr]


def processes(llm: LLM) -> list[Any]:
    groups = llm._core.engines._groups  # type: ignore[union-attr]
    return [process for group in groups for process in group._running.values()]


@pytest.fixture(scope="module")
def expected() -> Any:
    made: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in made:
            with LLM(model, **COMMON) as alone:
                made[model] = tokens(alone.generate(PROMPTS, params(), use_tqdm=False))
        return made[model]

    return of


@pytest.mark.grid
def test_independent_replicas(expected: Any) -> None:
    """The replicas share nothing; sequences of a killed replica continue at the other."""
    with LLM("spool-text", data_parallel_size=2, **COMMON) as llm:
        for _ in range(2):  # an idle replica sends no messages that pile up
            assert tokens(llm.generate(PROMPTS, params(), use_tqdm=False)) == expected("spool-text")
        stats = llm.stats()
        assert stats.running == stats.waiting == stats.idle_steps == 0
        assert stats.generation_tokens == 2 * (3 * 16 + 3 * 2 * 9)
        assert all(one.stats.generation_tokens > 0 for one in instances(llm))
        with pytest.raises(InvalidRequest):
            llm.generate("x", SamplingParams(max_tokens=10_000), use_tqdm=False)
        assert isinstance(llm.deterministic, bool)
        victim = processes(llm)[1]
        busy = instances(llm)[1].open
        thread = threading.Thread(target=kill_when, args=(victim.kill, busy))
        thread.start()
        made = llm.generate(PROMPTS, params(), use_tqdm=False)
        thread.join(deadline(60))
        assert tokens(made) == expected("spool-text")
        assert victim.poll() is not None
        assert tokens(llm.generate(PROMPTS[:2], params()[:2], use_tqdm=False)) == expected("spool-text")[:2]
        ended = processes(llm)
    assert all(process.poll() is not None for process in ended)
    with pytest.raises(EngineDead):
        llm.stats()


@pytest.mark.slow
def test_settings_refused_by_replicas_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="status 2 before it was ready"):
        LLM("spool-text", data_parallel_size=2, attention_backend="no-such-backend", **COMMON)


def kill_when(kill: Any, busy: Any) -> None:
    until = time.monotonic() + deadline(60)
    while len(busy) < 3 and time.monotonic() < until:
        time.sleep(0.001)
    kill()


@pytest.mark.requirement("C1")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="plain", marks=pytest.mark.grid),
        {
            "steps_in_flight": 2,
            "speculative_method": "mtp",
            "num_speculative_tokens": 2,
            "speculative_adaptive": False,
        },
    ],
)
def test_replicas_that_share_experts(expected: Any, more: dict[str, Any]) -> None:
    settings = {**COMMON, **more, "data_parallel_size": 2, "enable_expert_parallel": True}
    with LLM("spool-mla", **settings) as llm:
        assert tokens(llm.generate(PROMPTS, params(), use_tqdm=False)) == expected("spool-mla")
        assert tokens(llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)) == expected("spool-mla")[:1]
        stats = llm.stats()
        assert stats.idle_steps > 0
        if more:
            assert sum(stats.drafts_accepted) > 0


@pytest.mark.grid
def test_a_worker_of_one_replica_dies(expected: Any) -> None:
    """Two replicas of two ranks: the expert-parallel group forms again in both, and all sequences
    continue.
    """
    with LLM("spool-mla", **FOUR, **COMMON) as llm:
        assert tokens(losing_a_worker(llm)) == expected("spool-mla")
        assert tokens(llm.generate(PROMPTS[:1], PARAMS[0], use_tqdm=False)) == expected("spool-mla")[:1]


def worker_of(engine: int) -> int:
    """Return the process of the first worker of the second replica. ``engine``: its engine process.

    Forked processes (``tests.support.forked``) have the parent of the engine process.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
            parent = parent_of(int(folder.name))
        except OSError:  # the process has ended meanwhile
            continue
        if b" of head 1" in title and parent in (engine, parent_of(engine)):
            found.append(int(folder.name))
    (worker,) = found
    return worker


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def losing_a_worker(llm: LLM, **more: Any) -> Any:
    """Return the outputs of all prompts. Meanwhile a worker of one of two replicas dies."""
    worker = worker_of(processes(llm)[1].pid)
    busy = instances(llm)[1].open
    thread = threading.Thread(target=kill_when, args=(lambda: os.kill(worker, signal.SIGKILL), busy))
    thread.start()
    made = llm.generate(PROMPTS, params(), use_tqdm=False, **more)
    thread.join(deadline(60))
    stats = llm.stats()
    assert (stats.recoveries, stats.running) == (2, 0)
    return made


@pytest.mark.grid
def test_a_worker_dies_under_adapters_of_experts(tmp_path: Path) -> None:
    """All ranks get the adapters of both replicas again, in their places, and the factors of DoRA."""
    base = Path(bundled_models()["spool-mla"])
    targets = r"layers\.[0-3]\.(mlp\.)?(self_attn\.(kv_b|o)_proj|experts?\.(\d+\.)?(gate|up|down)_proj)$"
    folders = {
        name: str(make_adapter(tmp_path / name, base, targets, rank=2, alpha=1, seed=seed, use_dora=True))
        for seed, name in enumerate("ab")
    }
    lora = {"max_loras": 1, "max_lora_rank": 2, "lora_experts": True, "lora_modules": folders}
    names = [None, "a", "b", "b", "a", None]
    with LLM("spool-mla", **lora, **COMMON) as alone:
        due = tokens(alone.generate(PROMPTS, params(), use_tqdm=False, lora=names))
        assert due != tokens(alone.generate(PROMPTS, params(), use_tqdm=False))
    with LLM("spool-mla", **lora, **FOUR, **COMMON) as llm:
        assert tokens(losing_a_worker(llm, lora=names)) == due
        assert tokens(llm.generate(PROMPTS, params(), use_tqdm=False, lora=names)) == due


@pytest.mark.grid
def test_async(expected: Any) -> None:
    async def run() -> list[list[list[int]]]:
        llm = AsyncLLM("spool-text", data_parallel_size=2, **COMMON)

        async def one(prompt: str, own: SamplingParams) -> Any:
            async for output in llm.generate(prompt, own):
                last = output
            return last

        try:
            made = await asyncio.gather(*(one(*pair) for pair in zip(PROMPTS, params(), strict=True)))
        finally:
            llm.shutdown()
        return tokens(made)

    assert asyncio.run(run()) == expected("spool-text")


def test_the_loss_of_all_replicas_is_raised() -> None:
    """The error is not a full queue with a retry."""
    with LLM("spool-text", data_parallel_size=2, **COMMON) as llm:
        for process in processes(llm):
            process.kill()
        until = time.monotonic() + deadline(60)
        while llm._core.thread.links.failure is None:  # type: ignore[union-attr]
            assert time.monotonic() < until
            time.sleep(0.05)
        with pytest.raises(EngineDead):
            llm.generate("x", PARAMS[0], use_tqdm=False)
    with pytest.raises(EngineDead):
        llm.stats()


def test_counters_of_engines_with_roles_are_summed() -> None:
    one = Measures().add(SECONDS, 0.002).add(SECONDS, 7.0)
    stats = [
        EngineStats(steps=1, transfers=TransferStats(done=1, took=one)),
        EngineStats(transfers=TransferStats()),
        EngineStats(steps=4, transfers=TransferStats(done=2, took=one)),
    ]
    made = summed(stats)
    assert made.transfers is not None
    assert (made.steps, made.transfers.done) == (5, 3)
    assert sum(made.transfers.took.counts) == 4
    assert made.transfers.took.total == pytest.approx(14.004)
