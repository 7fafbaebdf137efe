"""Memory of an 8-bit cache: calculated, allocated, and as number of blocks in the same memory."""

from __future__ import annotations

import msgspec
import pytest
import torch

from tests.support.specs import model_spec
from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes
from weft.config.resolve import with_cache_dtype
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.sections.all import CacheSection, SchedulerSection
from weft.config.sizing.memory import pools_for
from weft.config.spec import CacheSpec, MLASpec, ModelSpec, RopeSpec, SparseSpec, StatePart
from weft.engine.build import DTYPES
from weft.runner.kv_tensors import by_layer, stacked

FP8 = CacheSection(kv_cache_dtype="fp8")
MLA = MLASpec(q_lora=None, kv_lora=512, nope=128, rope=64, v=128, scale=1.0)
KINDS = {
    "full": CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=128),
    "window": CacheSpec(kind="window", layers=(0,), window=100, kv_heads=4, head_dim=64),
    "latent": CacheSpec(kind="latent", layers=(0,), width=576, form="latent"),
    "sparse": CacheSpec(kind="latent", layers=(0,), width=576 + 128, form="sparse"),
    "compressed": CacheSpec(kind="compressed", layers=(0,), width=512 + 128, ratio=4, form="sparse"),
}


def _spec(kind: CacheSpec) -> ModelSpec:
    mla = MLA if kind.width and kind.kind != "compressed" else None
    spec = model_spec(cache=kind, mla=mla)
    if kind.kind == "compressed":
        rope = RopeSpec(dim=64)
        spec = msgspec.structs.replace(spec, head_dim=512, rope=rope, sparse=_sparse(rope))
    return with_cache_dtype(spec, FP8)


def _sparse(rope: RopeSpec) -> SparseSpec:
    """Return the published sizes of DeepSeek V4."""
    return SparseSpec(
        types=("chosen",), window=128, chosen_ratio=4, all_ratio=128, q_lora=1024, o_groups=8, o_lora=1024,
        index_heads=64, index_dim=128, index_top=512, group_rope=rope,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("name", list(KINDS))
def test_bytes_are_those_allocated(name: str, dtype: str) -> None:
    for cache in (KINDS[name], _spec(KINDS[name]).caches[0]):
        pool = PoolSpec(cache=cache, block_size=16, num_blocks=7)
        kv = KVConfig(pools=(pool,), block_size=16, enable_prefix_caching=True, max_model_len=64, num_slots=2)
        (layer,) = by_layer(kv, stacked(kv, DTYPES[dtype], torch.device("cpu")))
        held = sum(tensor.nbytes for tensors in layer.values() for tensor in tensors)
        assert held == pool.nbytes(dtype)
        assert f"{held / 1e6:.1f} MB in {'fp8' if cache.fp8 else dtype}" in pool.describe(dtype)


def test_bytes_by_hand() -> None:
    """In bf16, keys and values of 128 numbers take 132 bytes instead of 256; a latent 512 + 4 + 128
    instead of 1152."""
    assert block_bytes(_spec(KINDS["full"]).caches[0], 64, "bfloat16") == 64 * 2 * 2 * 132
    assert block_bytes(KINDS["full"], 64, "bfloat16") == 64 * 2 * 2 * 256
    latent = _spec(KINDS["latent"]).caches[0]
    assert latent.exact == 64
    assert block_bytes(latent, 64, "bfloat16") == 64 * (512 + 4 + 64 * 2)
    assert block_bytes(KINDS["latent"], 64, "bfloat16") == 64 * 1152
    # Behind the rotated key there is the key of an indexer.
    assert block_bytes(_spec(KINDS["sparse"]).caches[0], 64, "bfloat16") == 64 * (512 + 4 + (64 + 128) * 2)
    # Rotated elements are within the 512. A block of 64 positions has 16 entries.
    compressed = _spec(KINDS["compressed"]).caches[0]
    assert block_bytes(compressed, 64, "bfloat16") == 16 * (448 + 4 + (64 + 128) * 2)


def test_latents_of_a_draft_model_have_its_sizes() -> None:
    """The target has no latents. The rotated keys of the draft model stay exact."""
    latent = msgspec.structs.replace(KINDS["latent"], layers=(1,))
    draft = model_spec(cache=KINDS["latent"], mla=MLA)
    both = model_spec(cache=KINDS["full"], draft=draft, caches=(KINDS["full"], latent))
    assert [cache.exact for cache in with_cache_dtype(both, FP8).caches] == [0, 64]


def test_the_same_memory_holds_more() -> None:
    plain, fp8 = model_spec(cache=KINDS["full"]), _spec(KINDS["full"])
    section = SchedulerSection(max_num_batched_tokens=2048)
    counts = [pools_for(spec, 16, "bfloat16", 1 << 24, 1024, section)[0].num_blocks for spec in (plain, fp8)]
    assert 1.9 < counts[1] / counts[0] < 2


def test_caches_other_than_kv_stay_unquantized() -> None:
    """States stay, and caches that no attention reads. A model with nothing else is refused by the flag."""
    state = CacheSpec(
        kind="state", layers=(1,), parts=(StatePart(name="s", shape=(4, 4), wide=True),), form="delta"
    )
    mixed = msgspec.structs.replace(model_spec(cache=KINDS["full"]), caches=(KINDS["full"], state))
    assert with_cache_dtype(mixed, FP8).caches[1] == state
    assert with_cache_dtype(mixed, FP8).caches[0].fp8
    sources = CacheSpec(kind="latent", layers=(0,), window=8, width=64, form="")
    both = msgspec.structs.replace(mixed, caches=(KINDS["full"], sources))
    assert with_cache_dtype(both, FP8).caches[1] == sources
    alone = msgspec.structs.replace(mixed, caches=(state,))
    with pytest.raises(ConfigError, match="--kv-cache-dtype fp8: LlamaForCausalLM has no KV cache in 8 bits"):
        with_cache_dtype(alone, FP8)
    assert with_cache_dtype(alone, CacheSection()) == alone
