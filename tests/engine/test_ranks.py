"""Groups of real processes give the answers of one rank."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from msgspec.structs import replace

from tests.faults.rig import config_of
from tests.support.checkpoints import make_checkpoint
from tests.support.slowness import deadline
from weft import LLM, SamplingParams
from weft.api.settings import read_settings
from weft.common.errors import EngineDead, known_error
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sections.all import ParallelSection
from weft.engine import cpu_threads, start
from weft.engine.core import EngineCore
from weft.engine.group import GroupExecutor
from weft.engine.ranks import ranks
from weft.engine.ranks.ranks import RankProcesses, threads_each
from weft.types.messages import EngineStats, Submit, ids_to_bytes
from weft.types.sampling import TokenParams

PATIENCE = deadline(120.0)
GREEDY = TokenParams(temperature=0.0, max_tokens=16)
SEEDED = TokenParams(temperature=0.9, top_p=0.9, max_tokens=20, logprobs=1)


def test_cores_are_divided_among_all_ranks_of_the_host() -> None:
    def threads(cores: int, **layout: Any) -> int:
        whole = replace(config_of(), parallel=ParallelSection(**layout))
        return threads_each(replace(whole, runner=replace(whole.runner, threads=0)), cores)

    assert threads(8) == 8
    assert threads(8, data_parallel_size=2) == 4
    assert threads(8, data_parallel_size=2, tensor_parallel_size=2) == 2
    assert threads(8, data_parallel_size=4, tensor_parallel_size=2, hosts=4) == 4
    assert threads(2, data_parallel_size=2, enable_expert_parallel=True) == 1
    assert threads(2, data_parallel_size=8) == 1
    set_by_hand = replace(config_of(), parallel=ParallelSection(data_parallel_size=2))
    assert threads_each(replace(set_by_hand, runner=replace(set_by_hand.runner, threads=3)), 2) == 3


def test_threads_are_those_asked_for_or_what_affinity_quota_and_torch_allow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def taken(asked: int, cores: int, torchs: int) -> int:
        monkeypatch.setattr(cpu_threads, "usable_cores", lambda: cores)
        torch.set_num_threads(torchs)
        cpu_threads.set_threads(asked)
        return torch.get_num_threads()

    before = torch.get_num_threads()
    try:
        assert taken(0, cores=2, torchs=8) == 2, "a quota, which torch does not know of"
        assert taken(0, cores=8, torchs=1) == 1, "OMP_NUM_THREADS"
        assert taken(3, cores=2, torchs=1) == 3
    finally:
        torch.set_num_threads(before)


def sequence(number: int, prompt: list[int], params: TokenParams) -> Submit:
    return Submit(
        sequence=number, request=number, seed=number, prompt_ids=ids_to_bytes(prompt), params=params
    )


def prompt(number: int, length: int) -> list[int]:
    """Return a repetitive prompt, so that n-gram drafts are often correct."""
    return [(7 * number + 3 * (place % 11)) % 400 + 5 for place in range(length)]


class LessRoom(RankProcesses):
    """Workers that measure less free memory than the engine."""

    blocks: ClassVar[list[int]] = []

    def __init__(self, config: EngineConfig, address: str, log_level: str) -> None:
        pools = [replace(pool, num_blocks=pool.num_blocks - 5) for pool in config.kv.pools]
        type(self).blocks = [pool.num_blocks for pool in pools]
        less = replace(config, kv=replace(config.kv, pools=tuple(pools)))
        super().__init__(less, address, log_level)


class Run:
    """An engine run over ``submits``; some sequences arrive while others run."""

    def __init__(self, config: EngineConfig, submits: list[Submit], late: int = 0) -> None:
        self.tokens: dict[int, list[int]] = {submit.sequence: [] for submit in submits}
        self.most_running = self.most_waiting = self.mixed = 0
        core = EngineCore(config, progress=False)
        try:
            for submit in submits[: len(submits) - late]:
                core.submit(submit)
            self.turns(core, submits[len(submits) - late :])
            self.stats: EngineStats = core.stats()
            self.runner = core.runner
        finally:
            core.close()

    def turns(self, core: EngineCore, later: list[Submit]) -> None:
        until, ended, turn = time.monotonic() + 3 * PATIENCE, 0, 0
        while core.has_work() or later:
            assert time.monotonic() < until, "the engine hangs"
            if later and turn >= 6:
                core.submit(later.pop(0))
            turn += 1
            stats = core.stats()
            self.most_running = max(self.most_running, stats.running)
            self.most_waiting = max(self.most_waiting, stats.waiting)
            for event in core.step():
                self.tokens[event.sequence] += event.token_ids
                assert event.finish in (None, "length", "stop"), event
                ended += event.finish is not None
        assert ended == len(self.tokens)


@pytest.mark.requirement("A10", "A16", "A18")
@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"steps_in_flight": 1}, marks=pytest.mark.grid),
        {"steps_in_flight": 2, "speculative_method": "ngram", "speculative_adaptive": False},
    ],
    ids=["plain", "drafts and two steps in flight"],
)
def test_tokens_are_those_of_one_rank_and_requests_beyond_the_slots_queue(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests share four slots. A long prompt is prefilled beside decodes, and blocks run short.

    The worker has less memory for caches than the engine.
    """
    settings = {
        "max_num_seqs": 4,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "block_size": 16,
        "rank_timeout": PATIENCE,
        **more,
    }
    lengths = [40, 9, 25, 60, 33, 21, 12, 380]
    submits = [sequence(n, prompt(n, long), SEEDED if n % 2 else GREEDY) for n, long in enumerate(lengths)]
    monkeypatch.setattr(start, "RankProcesses", LessRoom)
    alone = Run(config_of(**settings), submits, late=1)
    group = Run(config_of(**settings, tensor_parallel_size=2), submits, late=1)
    assert group.tokens == alone.tokens
    assert isinstance(group.runner, GroupExecutor)
    assert [pool.num_blocks for pool in group.runner.kv.pools] == LessRoom.blocks
    assert [pool.num_blocks for pool in alone.runner.kv.pools] > LessRoom.blocks
    assert group.runner.membership.steps.own + 1 >= group.stats.steps > 10
    for run in (alone, group):
        assert (run.most_running, run.most_waiting >= 3) == (4, True)
        assert run.stats.mixed_steps > 0
        assert (sum(run.stats.drafts_accepted) > 0) == ("speculative_method" in more)
        assert run.stats.recoveries == 0


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Yield a short folder, because socket paths are limited in length."""
    with tempfile.TemporaryDirectory(prefix="w") as folder:
        yield Path(folder)


@pytest.mark.requirement("A6")
def test_an_llm_that_shut_down_leaves_nothing(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(short_path))
    llm = LLM(tensor_parallel_size=2, rank_timeout=PATIENCE, max_model_len=256, dtype="float64")
    group = llm._core.runner  # type: ignore[union-attr]
    assert isinstance(group, GroupExecutor)
    assert group.processes is not None
    pid = group.processes.pid(1)
    (output,) = llm.generate("1 + 1 =", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert output.outputs[0].finish_reason in ("length", "stop")
    assert [path.name[:5] for path in short_path.iterdir()] == ["weft-"]
    llm.shutdown()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(short_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_end_with_their_engine_however_it_ends() -> None:
    import subprocess
    import sys

    code = (
        "import os, sys, signal\n"
        "from tests.faults.rig import config_of\n"
        "from weft.engine.core import EngineCore\n"
        f"core = EngineCore(config_of(tensor_parallel_size=2, rank_timeout={PATIENCE}), progress=False)\n"
        "print(core.runner.processes.pid(1), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert made.returncode == -signal.SIGKILL, made.stderr
    pid, until = int(made.stdout), time.monotonic() + PATIENCE
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "the rank outlived its head"
        time.sleep(0.05)


@pytest.mark.requirement("A18")
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_deep_contexts_over_divided_experts(tmp_path: Path) -> None:
    """Four contexts of 8k positions, with drafts; another prompt is prefilled during decode."""
    folder = make_checkpoint(tmp_path, "qwen3_moe")
    facts = json.loads((folder / "config.json").read_text())
    facts["max_position_embeddings"] = 16384
    (folder / "config.json").write_text(json.dumps(facts))
    long = TokenParams(temperature=0.0, max_tokens=150)  # longer than the last prompt's last chunk
    submits = [sequence(n, [5 + (n + place) % 17 for place in range(8192)], long) for n in range(5)]

    def config(**more: Any) -> EngineConfig:
        settings = {
            "dtype": "float64",
            "max_model_len": 8400,
            "max_num_seqs": 5,
            "rank_timeout": PATIENCE,
            "speculative_method": "ngram",
            "speculative_adaptive": False,
            "enable_prefix_caching": False,
            "threads": 1,
            **more,
        }
        return resolve(read_settings(str(folder), settings))

    alone = Run(config(), submits, late=1)
    group = Run(config(tensor_parallel_size=2, enable_expert_parallel=True), submits, late=1)
    assert group.tokens == alone.tokens
    assert group.most_running >= 4
    assert group.stats.mixed_steps > 0
    assert sum(group.stats.drafts_accepted) > 0


def test_a_rank_whose_process_comes_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(ranks, "START_S", 0.05)
    processes = ranks.RankProcesses(config_of(tensor_parallel_size=2), "ipc://nowhere", "info")
    monkeypatch.setattr(processes, "_start", lambda rank: go.wait(PATIENCE))
    try:
        with pytest.raises(EngineDead, match=r"the process of rank 1 could not be started within 0.05 s"):
            processes.spawn(1)
    finally:
        go.set()
        processes._maker.shutdown()
    assert known_error(TimeoutError()).message == "TimeoutError, without a reason"
    assert known_error(ValueError("no room")).message == "ValueError: no room"
