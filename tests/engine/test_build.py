"""From a configuration to a runner: what is refused before weights are read, how GPU memory is divided."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from tests.support.checkpoints import make_checkpoint
from weft.common.errors import ConfigError
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine.build import build_runner, fit_pools


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = make_checkpoint(tmp_path_factory.mktemp("build"), "llama")
    return resolve(from_keywords({"model": str(folder), "block_size": 8, "max_num_seqs": 4, "device": "cpu"}))


def test_pools_take_what_weights_activations_and_others_leave(config: EngineConfig) -> None:
    half = fit_pools(config, 8 << 30, 10 << 30).pools[0].num_blocks
    whole = fit_pools(config, 10 << 30, 10 << 30).pools[0].num_blocks
    block = config.spec.caches[0].block_bytes(8, config.dtype)
    assert (whole - half) * block == pytest.approx(2 << 30, rel=0.01)
    assert whole * block < 9 << 30


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
