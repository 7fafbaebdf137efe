"""Assignment of GPUs to ranks, and refusals. Only the number of GPUs is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.config.test_resolve import GIB, checkpoint
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.flags import from_keywords
from weft.config.gpus import engine_rank, gpu_environment, gpus_here, gpus_of_group
from weft.config.group_settings import compare, shared_settings
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig, HostShare
from weft.config.sections.all import ParallelSection


def resolved(folder: Path, **settings: Any) -> EngineConfig:
    model = checkpoint(folder, max_position_embeddings=1 << 16)
    return resolve(from_keywords({"model": model, "block_size": 16, **settings}))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpus", lambda: ("4", "GPU-77"))
    monkeypatch.setattr(devices, "gpu_memory", lambda: 80 * GIB)


def seen(config: EngineConfig, rank: int) -> str | None:
    return gpu_environment(config, rank).get("CUDA_VISIBLE_DEVICES")


@pytest.mark.usefixtures("two_gpus")
def test_each_rank_sees_a_gpu_of_its_own(tmp_path: Path) -> None:
    config = resolved(tmp_path, tensor_parallel_size=2)
    assert (config.device, config.gpus) == ("cuda", ("4", "GPU-77"))
    assert [seen(config, rank) for rank in range(2)] == ["4", "GPU-77"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig) == config


@pytest.mark.usefixtures("two_gpus")
def test_replicas_have_gpus_of_their_own_and_one_process_keeps_all_it_sees(tmp_path: Path) -> None:
    config = resolved(tmp_path, data_parallel_size=2)
    engines = [msgspec.structs.replace(config, replica=replica) for replica in range(2)]
    assert [seen(one, engine_rank(one)) for one in engines] == ["4", "GPU-77"]
    assert seen(resolved(tmp_path), 0) is None
    assert seen(resolved(tmp_path, tensor_parallel_size=2, device="cpu"), 1) is None


@pytest.mark.usefixtures("two_gpus")
def test_ranks_are_counted_by_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    parallel = ParallelSection(tensor_parallel_size=4, hosts=2, group_secret=str(secret))
    share, alone = HostShare(ranks=2, index=1), resolved(tmp_path)
    gpus = gpus_of_group(gpus_here(parallel, "cuda", 1), parallel, share)
    config = msgspec.structs.replace(alone, parallel=parallel, host=share, gpus=gpus)
    assert [seen(config, rank) for rank in (2, 3)] == ["4", "GPU-77"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("collectives", ["auto", "nccl"])
def test_more_ranks_than_gpus_are_refused_and_what_is_named_works(tmp_path: Path, collectives: str) -> None:
    settings: dict[str, Any] = {"tensor_parallel_size": 4}
    with pytest.raises(ConfigError) as raised:
        resolved(tmp_path, **settings, collectives=collectives)
    message = raised.value.message
    assert "4 ranks need 4 GPUs with NCCL, and this host has 2 GPUs" in message
    assert all(way in message for way in ("--tensor-parallel-size", "--device cpu", "--collectives gloo"))
    shared = resolved(tmp_path, **settings, collectives="gloo")
    assert [seen(shared, rank) for rank in range(4)] == ["4", "GPU-77", "4", "GPU-77"]
    assert resolved(tmp_path, **settings, device="cpu").device == "cpu"
    with pytest.raises(ConfigError, match="--data-parallel-size"):
        resolved(tmp_path, data_parallel_size=3)


def test_nccl_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--collectives nccl"):
        resolved(tmp_path, tensor_parallel_size=2, device="cpu", collectives="nccl")
    assert resolved(tmp_path, tensor_parallel_size=2, device="cpu", collectives="gloo").gpus == ()


def test_ranks_that_share_a_gpu_share_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_memory", lambda: GIB)

    def blocks(gpus: tuple[str, ...]) -> int:
        monkeypatch.setattr(devices, "gpus", lambda: gpus)
        config = resolved(tmp_path, tensor_parallel_size=2, collectives="gloo")
        return config.kv.pools[0].num_blocks

    assert blocks(("0",)) < 0.6 * blocks(("0", "1"))
    monkeypatch.setattr(devices, "gpus", lambda: ("0",))
    with pytest.raises(ConfigError, match="for each of 2 ranks"):
        resolved(tmp_path, tensor_parallel_size=2, collectives="gloo", kv_cache_memory="600M")


def test_sizes_that_were_found_out_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(available: int, **more: Any) -> EngineConfig:
        monkeypatch.setattr(devices, "available_memory", lambda: available)
        return resolved(tmp_path, tensor_parallel_size=2, device="cpu", **more)

    one, other = config(GIB), config(GIB // 8)
    assert one.kv.pools[0].num_blocks > other.kv.pools[0].num_blocks
    compare(shared_settings(one), shared_settings(other), "the head", "rank 1")
    set_, other = config(GIB, kv_cache_memory="20M"), config(GIB, kv_cache_memory="30M")
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        compare(shared_settings(set_), shared_settings(other), "the head", "rank 1")
    one, other = config(GIB, max_model_len="auto"), config(GIB // 64, max_model_len="auto")
    with pytest.raises(ConfigError, match="--max-model-len"):
        compare(shared_settings(one), shared_settings(other), "the head", "rank 1")


class Driver:
    """Simulate the used part of libcuda.so.1."""

    def __init__(self, count: int) -> None:
        self.count = count

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, found: Any) -> int:
        found._obj.value = self.count
        return 0


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (2, None, ("0", "1")),
        (2, "5, 3", ("5", "3")),
        (1, "GPU-1,nonsense,2", ("GPU-1",)),
        (0, "", ()),
    ],
)
def test_gpus_go_by_the_names_that_the_driver_takes(
    monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, names: tuple[str, ...]
) -> None:
    monkeypatch.setattr(devices, "torch_is_cpu_only", lambda: False)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: Driver(count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert devices.gpus() == names
