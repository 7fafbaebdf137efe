"""Groups of real processes on GPUs give the answers of one rank."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import pair_rig
from tests.engine.test_ranks import GREEDY, PATIENCE, Run, sequence
from tests.faults.rig import config_of as bundled
from tests.faults.rig import survive
from tests.runner.transfers_rig import config_of as transfer_config
from tests.support.checkpoints import VOCAB, make_checkpoint
from weft.api.settings import read_settings
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine.core import EngineCore
from weft.engine.group import GroupExecutor
from weft.overlap import bucket_trials
from weft.runner.graphs.graphs import DecodeGraphs, Key
from weft.types.messages import Submit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.timeout(1200),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")


def settings(**more: Any) -> dict[str, Any]:
    return {
        "device": "cuda",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "block_size": 16,
        "rank_timeout": PATIENCE,
        "kv_cache_memory": "64M",
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dense model, whose decode steps can be captured."""
    return make_checkpoint(tmp_path_factory.mktemp("ranks"), "llama")


def config_of(folder: Path, **more: Any) -> EngineConfig:
    return resolve(read_settings(str(folder), settings(**more)))


def submits() -> list[Submit]:
    rng = random.Random(3)
    prompts = [[rng.randrange(1, VOCAB) for _ in range(length)] for length in (20, 9, 25, 33, 40, 12)]
    return [sequence(number, ids, GREEDY) for number, ids in enumerate(prompts)]


def compare(alone: Run, group: Run, dtype: str) -> None:
    """Compare all tokens in float64. In float32 rounding may decide some tokens and their successors."""
    assert isinstance(group.runner, GroupExecutor)
    if dtype == "float64":
        assert group.tokens == alone.tokens
        return
    pairs = [(a, b) for n in alone.tokens for a, b in zip(alone.tokens[n], group.tokens[n], strict=False)]
    assert sum(a == b for a, b in pairs) > 0.9 * sum(map(len, alone.tokens.values()))


def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit the ranks to the first GPU."""
    first = devices.gpus()[:1]
    monkeypatch.setattr(devices, "gpus", lambda: first)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_two_ranks_on_one_gpu_over_gloo_answer_as_one(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu(monkeypatch)
    alone = Run(config_of(folder, dtype=dtype), submits(), late=1)
    shared: dict[str, Any] = {"dtype": dtype, "tensor_parallel_size": 2, "collectives": "gloo"}
    group = Run(config_of(folder, **shared), submits(), late=1)
    compare(alone, group, dtype)
    assert group.runner.graphs is None, "nothing may be captured that goes through the host"
    micro_batches = Run(config_of(folder, **shared, overlap="all"), submits(), late=1)
    compare(alone, micro_batches, dtype)


def test_two_ranks_on_one_gpu_are_refused_unless_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu(monkeypatch)
    with pytest.raises(ConfigError, match="--collectives gloo"):
        config_of(folder, tensor_parallel_size=2)


def test_a_group_on_one_gpu_survives_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    shared = settings(dtype="float64", tensor_parallel_size=2, collectives="gloo", rank_timeout=20.0)
    survive(bundled(**shared), tmp_path, [(1, "stage", "kill"), (1, "collective", "raise")])


def test_ranks_on_one_gpu_share_its_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No sizes are configured: each rank measures, all ranks use the minimum, and both fit."""
    one_gpu(monkeypatch)
    total = torch.cuda.mem_get_info()[1]
    shared = {"tensor_parallel_size": 2, "collectives": "gloo", "gpu_memory_utilization": 0.3}
    core = EngineCore(
        config_of(folder, dtype="float32", kv_cache_memory=None, max_num_seqs=64, **shared), progress=False
    )
    try:
        taken = sum(pool.nbytes("float32") for pool in core.runner.kv.pools)
        assert 0 < 2 * taken < 0.3 * total
    finally:
        core.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "deepseek_v3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_group_that_prefills_and_one_that_decodes_share_a_gpu(
    tmp_path: Path, family: str, depth: int
) -> None:
    """Caches are transferred from device to device through host memory, with equal tokens."""
    shared = {"device": "cuda", "kv_cache_memory": "64M", "steps_in_flight": depth}
    asked = [
        pair_rig.submit(n, [3 + (7 * n + 5 * i) % 90 for i in range(5 + 23 * n)], GREEDY) for n in range(6)
    ]
    alone = pair_rig.unified(transfer_config(tmp_path, family, 16, "unified", **shared), asked)
    pair = pair_rig.pair_of(tmp_path, family, (16, 16), max_num_batched_tokens=32, **shared)
    try:
        for one in asked:
            pair.submit(one)
        pair.run()
        assert {number: answer.ids for number, answer in pair.answers.items()} == alone
        pair.check_given_back()
    finally:
        pair.close()


@needs_two
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("overlap", ["off", "all"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_two_gpus_over_nccl_answer_as_one(
    folder: Path, dtype: str, overlap: str, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Run(config_of(folder, dtype=dtype), submits(), late=1)
    more: dict[str, Any] = {"dtype": dtype, "overlap": overlap, "decode_graphs": graphs}
    keys: list[Key] = []
    run = DecodeGraphs.run

    def noted(self: DecodeGraphs, key: Key, *given: Any) -> Any:
        keys.append(key)
        return run(self, key, *given)

    monkeypatch.setattr(DecodeGraphs, "run", noted)  # of the engine's rank
    group = Run(config_of(folder, **more, tensor_parallel_size=2), submits(), late=1)
    compare(alone, group, dtype)
    captured = group.runner.graphs
    if dtype == "float32" and graphs:  # float64 has no attention that can be captured
        assert captured is not None
        assert captured.replayed > 0
        assert any(key[3] == 2 for key in keys) == (overlap == "all")


@needs_two
def test_two_gpus_time_both_forms_of_decode_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are the same in both forms, and each ended trial has plausible times."""
    monkeypatch.setattr(bucket_trials, "SETTLED", 1)
    monkeypatch.setattr(bucket_trials, "TIMES", 2)  # the engine's rank alone decides
    more: dict[str, Any] = {"dtype": "float32", "deterministic": True, "tensor_parallel_size": 2}
    whole = Run(config_of(folder, **more, overlap="off"), submits(), late=1)
    timed = Run(config_of(folder, **more), submits(), late=1)
    assert timed.tokens == whole.tokens
    choices = timed.stats.overlap_choices
    assert choices
    for choice in choices:
        for seconds in (choice.whole_seconds, choice.micro_batch_seconds):
            assert seconds is not None
            assert 1e-6 < seconds < 1.0


@needs_two
def test_deterministic_sums_are_in_order(folder: Path) -> None:
    config = config_of(folder, dtype="float32", tensor_parallel_size=2, deterministic=True)
    runs = [Run(config, submits(), late=1) for _ in range(2)]
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].runner.varying == ()


@needs_two
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_group_over_nccl_survives_its_ranks(tmp_path: Path, graphs: bool) -> None:
    """One rank is killed, one is stopped and one fails, each in the middle of work.

    Answers must not depend on the batch: float64, which is not captured, or deterministic float32.
    """
    exact = {"dtype": "float32", "deterministic": True} if graphs else {"dtype": "float64"}
    config = bundled(**settings(**exact, tensor_parallel_size=2, rank_timeout=20.0))
    plans: Any = [
        (1, "stage", "kill"),
        (1, "collective", "raise"),
        (1, "sample", "stop"),
        (0, "sample", "raise"),
    ]
    survive(config, tmp_path, plans)


@needs_two
def test_each_rank_is_on_a_gpu_of_its_own(folder: Path) -> None:
    core = EngineCore(config_of(folder, dtype="float32", tensor_parallel_size=2), progress=False)
    try:
        group = core.runner
        assert isinstance(group, GroupExecutor)
        assert group.processes is not None
        pid = group.processes.pid(1)
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert f"CUDA_VISIBLE_DEVICES={devices.gpus()[1]}".encode() in environment
    finally:
        core.close()
