"""One description of every cache: calculated sizes equal the allocated sizes of torch on every rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from weft.cli.verify.tiny import FAMILIES, write_family
from weft.config.cache_layout import TensorLayout, pool_tensors, slot_tensors
from weft.config.families import load_spec
from weft.config.resolve import with_cache_dtype
from weft.config.resolved import KVConfig
from weft.config.sections.all import CacheSection, SchedulerSection
from weft.config.sharding import local_spec, share_of_kv
from weft.config.sizing.memory import pools_for, state_bytes
from weft.config.spec import CacheSpec, ModelSpec, StatePart
from weft.runner.kv_tensors import stacked, zeros
from weft.runner.slot_state import States
from weft.types.layout import Layout

CPU = torch.device("cpu")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
SCHEDULER = SchedulerSection(max_num_seqs=3, max_num_batched_tokens=64, steps_in_flight=2)
BYTES, LENGTH = 4 << 20, 128
FULL = CacheSpec(kind="full", layers=(3, 7), kv_heads=2, head_dim=64)
LATENT = CacheSpec(kind="latent", layers=(0, 1, 2), width=96, form="latent")
GROUPS = CacheSpec(kind="compressed", layers=(1,), width=96, ratio=4, form="sparse")
PARTS = (
    StatePart(name="delta", shape=(4, 32, 24), wide=True),
    StatePart(name="conv", shape=(3, 128), wide=False),
)
STATE = CacheSpec(kind="state", layers=(0, 1), parts=PARTS, form="delta")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


def whole_spec(folder: Path, family: str, fp8: bool) -> ModelSpec:
    path = folder / family
    if not path.exists():
        path = write_family(folder, family)
    spec = load_spec(str(path), None, mtp=int(family == "deepseek_v3"))
    eight_bits = fp8 and any(cache.form in ("gqa", "latent", "sparse") for cache in spec.caches)
    return with_cache_dtype(spec, CacheSection(kv_cache_dtype="fp8")) if eight_bits else spec


def cache_of(spec: ModelSpec, dtype: str) -> KVConfig:
    pools = pools_for(spec, 8, dtype, BYTES, LENGTH, SCHEDULER, copies=2)
    return KVConfig(
        pools=pools, block_size=8, enable_prefix_caching=True, max_model_len=LENGTH, num_slots=6, copies=2
    )


def allocated(kv: KVConfig, dtype: str) -> list[tuple[TensorLayout, torch.Tensor]]:
    """Return all tensors of a rank, each with its layout."""
    memory = stacked(kv, DTYPES[dtype], CPU)
    states = States(kv, memory, torch.zeros(7, dtype=torch.int64), DTYPES[dtype])
    found = []
    for number, pool in enumerate(kv.pools):
        found += list(zip(kv.tensors(pool, dtype), memory[number], strict=True))
        if pool.cache.kind == "state":
            found += list(zip(pool.tensors(dtype), states.snapshots(number), strict=True))
    return found


@pytest.mark.parametrize("fp8", [False, True], ids=["plain", "fp8"])
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("family", list(FAMILIES))
def test_computed_sizes_equal_the_allocated_ones(folder: Path, family: str, dtype: str, fp8: bool) -> None:
    whole = whole_spec(folder, family, fp8)
    for ranks in (1, 2, 4):
        spec = local_spec(whole, Layout(tensor=ranks))
        kv = cache_of(spec, dtype)
        tensors = allocated(kv, dtype)
        for layout, tensor in tensors:
            assert tensor.nbytes == layout.nbytes
            assert tensor.numel() == math.prod(layout.shape)
            flat = layout.dims[1][0] == "block" and layout.dims[2][0] == "head"  # snapshots are flat
            assert tuple(tensor.shape) == (
                (*layout.shape[:2], math.prod(layout.shape[2:])) if flat else layout.shape
            )
            assert str(tensor.dtype) == f"torch.{layout.dtype}"
        pools = sum(pool.nbytes(dtype) for pool in kv.pools)
        live = state_bytes(spec, dtype, 6, copies=2)
        assert sum(tensor.nbytes for _, tensor in tensors) == pools + live
        most = max(pool.nbytes(dtype) // (1 + pool.num_blocks) for pool in kv.pools)
        assert BYTES - len(kv.pools) * most < pools + live <= BYTES, "all that was given is used"


@pytest.mark.parametrize("family", list(FAMILIES))
def test_ranks_have_their_heads_of_what_is_sharded_and_all_of_the_rest(folder: Path, family: str) -> None:
    whole = whole_spec(folder, family, False)
    everything = described(whole)
    for ranks in (2, 4):
        ours = described(local_spec(whole, Layout(tensor=ranks)))
        for one, all_of_it in zip(ours, everything, strict=True):
            assert (one.name, one.dtype, one.sharded) == (all_of_it.name, all_of_it.dtype, all_of_it.sharded)
            if not one.sharded:
                assert one == all_of_it
                continue
            heads = dict(all_of_it.dims)["head"]
            for rank in range(ranks):
                begin, end = share_of_kv(heads, rank, ranks)
                expected = tuple((n, end - begin if n == "head" else size) for n, size in all_of_it.dims)
                assert one.dims == expected
    kinds = {cache.kind for cache in whole.caches}
    assert any(t.sharded for t in everything) == bool(
        kinds & {"full", "window", "state"} and not whole.sparse
    )


def described(spec: ModelSpec) -> list[TensorLayout]:
    """Return the layouts for pools and slots of the same sizes, whatever the number of ranks."""
    kv = cache_of(spec, "float32")
    found: list[TensorLayout] = []
    for pool in kv.pools:
        for tensor in (*kv.tensors(pool, "float32"), *pool.tensors("float32")):
            found.append(tensor._replace(dims=tuple((n, 1 if n == "block" else s) for n, s in tensor.dims)))
    return found


def test_dims_by_hand() -> None:
    """The dimensions of each KV cache group, as attention and state layers index the tensors."""

    def dims(tensors: tuple[TensorLayout, ...]) -> list[str]:
        return [" ".join(f"{name}={size}" for name, size in tensor.dims) for tensor in tensors]

    assert dims(pool_tensors(FULL, 16, 7, "float32")) == ["layer=2 block=8 kv=2 head=2 position=16 width=64"]
    assert dims(pool_tensors(LATENT, 16, 7, "float32")) == ["layer=3 block=8 position=16 width=96"]
    assert dims(pool_tensors(GROUPS, 16, 7, "float32")) == ["layer=1 block=8 position=4 width=96"]
    assert dims(pool_tensors(STATE, 16, 7, "float32")) == [
        "layer=2 block=8 head=4 row=32 width=24",
        "layer=2 block=8 head=3 width=128",
    ]
    assert dims(slot_tensors(STATE, 5, 2, "bfloat16"))[0] == "layer=2 slot=6 copy=2 head=4 row=32 width=24"
    assert [t.dtype for t in slot_tensors(STATE, 5, 2, "bfloat16")] == ["float32", "bfloat16"]


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="a kernel without large pages"
)
def test_caches_lie_in_large_pages_where_the_system_has_some() -> None:
    cache = zeros((64 << 20,), torch.uint8, CPU)
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        begin, dash, rest = line.split()[0].partition("-")
        if dash and int(begin, 16) <= cache.data_ptr() < int(rest.split()[0], 16):
            break
    flags = next(line for line in lines if line.startswith("VmFlags:"))
    assert "hg" in flags.split()
    assert not cache[:: 1 << 20].any()
