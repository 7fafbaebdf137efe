"""From a configuration to a runner: configurations that are refused before loading, division of GPU
memory."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from weft.attention.base import Backends
from weft.attention.gqa.triton_backend import TritonAttention
from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sharding import local_spec
from weft.engine.build import LATER, build_runner, fit_pools, graph_options
from weft.parallel.group_comm import GroupComm
from weft.parallel.launcher import Launcher
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("build"), "llama")
    return resolve(from_keywords({"model": str(folder), "block_size": 8, "max_num_seqs": 4, "device": "cpu"}))


def test_pools_take_what_weights_activations_and_others_leave(config: EngineConfig) -> None:
    smaller = fit_pools(config, 8 << 30, 10 << 30).pools[0].num_blocks
    whole = fit_pools(config, 10 << 30, 10 << 30).pools[0].num_blocks
    block = block_bytes(config.spec.caches[0], 8, config.dtype)
    assert (whole - smaller) * block == pytest.approx(2 << 30, rel=0.01)
    assert whole * block < 9 << 30


def test_captured_steps_have_memory_of_their_own(config: EngineConfig) -> None:
    """The memory does not grow with the steps that are too large for a capture."""

    def bytes_of(graphs: bool, tokens: int) -> int:
        section = msgspec.structs.replace(config.runner, decode_graphs=graphs)
        scheduler = msgspec.structs.replace(config.scheduler, max_num_batched_tokens=tokens)
        one = msgspec.structs.replace(config, runner=section, scheduler=scheduler)
        return fit_pools(one, 10 << 30, 10 << 30).pools[0].num_blocks * block_bytes(
            config.spec.caches[0], 8, config.dtype
        )

    few, most, more = (bytes_of(False, tokens) - bytes_of(True, tokens) for tokens in (64, 768, 8192))
    assert 0 < few < most == pytest.approx(more, rel=0.05)


def test_ranks_on_one_gpu_have_equal_parts_whoever_loads_first(config: EngineConfig) -> None:
    """Two ranks on one GPU: one measures before the other has loaded, one after all other memory is taken."""
    parallel = msgspec.structs.replace(config.parallel, tensor_parallel_size=2, collectives="gloo")
    two = msgspec.structs.replace(config, parallel=parallel, gpus=("0",))
    first = fit_pools(two, 19 << 30, 20 << 30, used=1 << 30).pools[0].num_blocks
    second = fit_pools(two, 18 << 30, 20 << 30, used=1 << 30).pools[0].num_blocks
    own = msgspec.structs.replace(two, gpus=("0", "1"))
    alone = fit_pools(own, 19 << 30, 20 << 30, used=1 << 30).pools[0].num_blocks
    assert first == second
    assert 0.4 * alone < first < 0.5 * alone
    parallel = msgspec.structs.replace(parallel, collectives="auto")
    nccl = msgspec.structs.replace(own, parallel=parallel)
    needs = fit_pools(nccl, 19 << 30, 20 << 30, used=1 << 30).pools[0].num_blocks
    block = block_bytes(local_spec(config.spec, parallel.layout).caches[0], 8, config.dtype)
    assert (alone - needs) * block == pytest.approx(LATER, rel=0.01), "communicators come later"
    left = fit_pools(two, 4 << 30, 20 << 30, used=1 << 30).pools[0].num_blocks
    assert left < first, "somebody else has the rest"


def test_where_ranks_meet_over_nccl_graphs_wait_for_the_group(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over NCCL, graphs are captured lazily. Ranks without NCCL run eager steps, without graphs.

    The test replaces the capture itself, for lack of a GPU.
    """
    model = build_runner(config, progress=False)._model
    model.device = torch.device("cuda")
    monkeypatch.setattr("weft.engine.build.CudaCapture", lambda device: lambda run: run)
    cuda = msgspec.structs.replace(config, device="cuda")
    backends = Backends([TritonAttention()])
    alone = graph_options(cuda, model, backends, False)
    assert alone is not None
    assert (alone.lazy, alone.micro_batches, alone.exact) == (False, False, False)
    model.mesh = Mesh(layout=Layout(tensor=2), nccl=True)
    ranks = graph_options(cuda, model, backends, False)
    assert ranks is not None
    assert (ranks.lazy, ranks.micro_batches, ranks.exact) == (True, True, False)
    model.mesh = Mesh(layout=Layout(tensor=2))
    assert graph_options(cuda, model, backends, False) is None


def test_sums_in_the_order_of_nccl_are_no_promise_of_equal_bits(config: EngineConfig) -> None:
    runner = build_runner(config, progress=False)
    tp = GroupComm("x", range(2), 0, Launcher())
    runner._model.mesh = Mesh(layout=Layout(tensor=2), tp=tp, nccl=True, ordered=False)
    assert "sums over ranks (nccl)" in runner.varying
    runner._model.mesh = Mesh(layout=Layout(tensor=2), tp=tp, nccl=True)
    assert "sums over ranks (nccl)" not in runner.varying


def test_a_gpu_that_is_full_is_refused_by_name(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        fit_pools(config, 1 << 20, 10 << 30)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")
def test_cuda_without_a_gpu_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--device"):
        build_runner(msgspec.structs.replace(config, device="cuda"), progress=False)


def test_an_unknown_backend_is_refused_before_weights_are_read(config: EngineConfig, tmp_path: Path) -> None:
    runner = msgspec.structs.replace(config.runner, attention_backend="flush")
    nowhere = msgspec.structs.replace(config, runner=runner, model_path=str(tmp_path))
    with pytest.raises(ConfigError, match="attention backend"):
        build_runner(nowhere, progress=False)


def test_a_trace_that_cannot_be_written_is_refused(config: EngineConfig, tmp_path: Path) -> None:
    runner = msgspec.structs.replace(config.runner, trace=str(tmp_path / "no" / "such" / "folder.json"))
    with pytest.raises(ConfigError, match="--trace"):
        build_runner(msgspec.structs.replace(config, runner=runner), progress=False)
