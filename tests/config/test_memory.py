"""From bytes to pools, for every kind of cache."""

from __future__ import annotations

import pytest

from tests.support.specs import model_spec
from weft.common.errors import ConfigError
from weft.config.cache_layout import block_bytes
from weft.config.sections.all import SchedulerSection
from weft.config.sizing import memory
from weft.config.spec import CacheSpec, ModelSpec, StatePart

KIB, MIB = 1 << 10, 1 << 20
SCHEDULER = SchedulerSection(max_num_seqs=8, max_num_batched_tokens=256, steps_in_flight=2)

FULL = CacheSpec(kind="full", layers=(3, 7), kv_heads=2, head_dim=64)
LATENT = CacheSpec(kind="latent", layers=(0, 1, 2), width=96, form="latent")
SLIDING = CacheSpec(kind="latent", layers=(0, 1, 2), width=96, window=128, form="sparse")
GROUPS = CacheSpec(kind="compressed", layers=(1,), width=96, ratio=4, form="sparse")
FEW_GROUPS = CacheSpec(kind="compressed", layers=(2,), width=96, ratio=128, form="sparse")
PARTS = (
    StatePart(name="delta", shape=(4, 32, 32), wide=True),
    StatePart(name="conv", shape=(3, 128), wide=False),
)
STATE = CacheSpec(kind="state", layers=(0, 1, 2, 4, 5, 6), parts=PARTS, form="delta")
ONE_STATE = 6 * (4 * 32 * 32 * 4 + 3 * 128 * 2)


def spec(*caches: CacheSpec) -> ModelSpec:
    return model_spec(caches=caches, max_position=1 << 20)


def test_blocks_are_whole_in_base_blocks_and_groups() -> None:
    assert [memory.kind_block(c, 64) for c in (FULL, LATENT, GROUPS, FEW_GROUPS)] == [64, 64, 64, 128]
    assert memory.kind_block(FEW_GROUPS, 48) == 384
    assert memory.hit_unit(spec(SLIDING, GROUPS, FEW_GROUPS), 64) == 128
    assert memory.hit_unit(spec(FULL, STATE), 16) == 16


def test_bytes_of_blocks() -> None:
    assert block_bytes(FULL, 64, "bfloat16") == 2 * 2 * 2 * 64 * 64 * 2
    assert block_bytes(LATENT, 64, "bfloat16") == 3 * 64 * 96 * 2
    assert block_bytes(FEW_GROUPS, 256, "float32") == 2 * 96 * 4
    assert block_bytes(STATE, 64, "bfloat16") == ONE_STATE
    assert block_bytes(STATE, 64, "float64") == 6 * (4 * 32 * 32 + 3 * 128) * 8


@pytest.mark.parametrize("caches", [(LATENT,), (SLIDING, GROUPS, FEW_GROUPS), (FULL, SLIDING, FEW_GROUPS)])
def test_kinds_hold_the_same_number_of_sequences(caches: tuple[CacheSpec, ...]) -> None:
    model = spec(*caches)
    pools = memory.pools_for(model, 64, "bfloat16", 64 * MIB, 2048, SCHEDULER)
    held = [
        pool.num_blocks / memory.blocks_for_one(pool.cache, pool.block_size, 2048, SCHEDULER)
        for pool in pools
    ]
    assert max(held) - min(held) < 1
    used = sum((pool.num_blocks + 1) * block_bytes(pool.cache, pool.block_size, "bfloat16") for pool in pools)
    assert 0.97 * 64 * MIB < used <= 64 * MIB
    assert all(pool.block_size % pool.cache.ratio == 0 for pool in pools)


def test_sliding_latents_need_a_window_and_a_chunk() -> None:
    assert memory.blocks_for_one(SLIDING, 64, 4096, SCHEDULER) == -(-(127 + 256) // 64) + 1
    assert memory.blocks_for_one(LATENT, 64, 4096, SCHEDULER) == 64


def test_states_of_the_slots_come_off_first() -> None:
    model = spec(FULL, STATE)
    live = memory.state_bytes(model, "bfloat16", 16, 3)
    assert live == 17 * 3 * ONE_STATE
    for copies in (1, 3):
        pools = memory.pools_for(model, 64, "bfloat16", 64 * MIB, 4096, SCHEDULER, copies=copies)
        used = sum((p.num_blocks + 1) * block_bytes(p.cache, p.block_size, "bfloat16") for p in pools)
        live = memory.state_bytes(model, "bfloat16", 16, copies)
        assert 0.98 * 64 * MIB < used + live <= 64 * MIB


def test_snapshots_get_a_share_that_is_never_the_larger() -> None:
    model = spec(FULL, STATE)
    for length in (256, 4096, 65536):
        entries, snapshots = memory.pools_for(model, 64, "bfloat16", 512 * MIB, length, SCHEDULER)
        full = entries.num_blocks * block_bytes(FULL, 64, "bfloat16")
        states = (snapshots.num_blocks - memory.MIN_SNAPSHOTS) * ONE_STATE
        assert states <= full
        assert states > 0.1 * full
    least = memory.pools_for(model, 64, "bfloat16", 512 * MIB, 4096, SCHEDULER, snapshots=False)
    assert least[1].num_blocks == memory.MIN_SNAPSHOTS
    only = memory.pools_for(spec(STATE), 64, "bfloat16", 64 * MIB, 4096, SCHEDULER)
    assert only[0].num_blocks > 500


def test_states_alone_have_snapshots_in_all_memory() -> None:
    """Also in less memory than the snapshots of one sequence of the longest length need."""
    model = spec(STATE)
    live = memory.live_bytes(model, "bfloat16", SCHEDULER)
    for extra in (0, 1, 7, 4000):
        room = live + (1 + memory.MIN_SNAPSHOTS + extra) * ONE_STATE
        (pool,) = memory.pools_for(model, 64, "bfloat16", room, 1 << 20, SCHEDULER)
        assert pool.num_blocks == memory.MIN_SNAPSHOTS + extra
    (pool,) = memory.pools_for(model, 64, "bfloat16", room, 1 << 20, SCHEDULER, snapshots=False)
    assert pool.num_blocks == memory.MIN_SNAPSHOTS


def test_states_that_pass_between_groups_have_snapshots_without_prefix_caching() -> None:
    """Each runnable sequence gets a snapshot up to a bound, and the reported fit is exact."""
    model = spec(FULL, STATE)
    for seqs, more in ((2, 2), (500, memory.TRANSFER_SNAPSHOTS)):
        section = SchedulerSection(max_num_seqs=seqs)
        need = memory.bytes_for(model, 64, "bfloat16", 1, 4096, section, transfers=True)
        pools = memory.pools_for(model, 64, "bfloat16", need, 4096, section, snapshots=False, transfers=True)
        assert pools[1].num_blocks == memory.MIN_SNAPSHOTS + more
        with pytest.raises(ConfigError):
            memory.pools_for(model, 64, "bfloat16", need - 1, 4096, section, snapshots=False, transfers=True)
        longest = memory.longest_that_fits(model, 64, "bfloat16", need, 1 << 20, section, transfers=True)
        assert 4096 <= longest < 4096 + 64


def test_a_snapshot_costs_no_more_than_the_lines_it_saves_from() -> None:
    assert memory.snapshot_stride(spec(FULL, STATE), 64, "bfloat16") == memory.MIN_STRIDE
    heavy = CacheSpec(kind="state", layers=tuple(range(36)), parts=PARTS, form="delta")
    small = CacheSpec(kind="full", layers=(40,), kv_heads=1, head_dim=32)
    stride = memory.snapshot_stride(spec(small, heavy), 64, "bfloat16")
    assert stride == -(-block_bytes(heavy, 64, "bfloat16") // (128 * 64)) * 64
    assert memory.snapshot_stride(spec(STATE), 48, "bfloat16") == -(-memory.MIN_STRIDE // 48) * 48


def test_too_little_for_the_states_names_the_flags_and_values_that_work() -> None:
    model = spec(FULL, STATE)
    with pytest.raises(ConfigError) as raised:
        memory.pools_for(model, 64, "bfloat16", 2 * MIB, 512, SCHEDULER)
    error = raised.value
    assert error.param == "--max-num-seqs"
    least, most = 2787, 4
    assert f"--kv-cache-memory to at least {least}K, or --max-num-seqs to at most {most}" in error.message
    memory.pools_for(model, 64, "bfloat16", least * KIB, 512, SCHEDULER)
    for seqs in (most, most + 1):
        section = SchedulerSection(max_num_seqs=seqs, max_num_batched_tokens=256, steps_in_flight=2)
        if seqs == most:
            memory.pools_for(model, 64, "bfloat16", 2 * MIB, 512, section)
        else:
            with pytest.raises(ConfigError):
                memory.pools_for(model, 64, "bfloat16", 2 * MIB, 512, section)


def test_the_longest_that_fits_does() -> None:
    model = spec(FULL, STATE)
    longest = memory.longest_that_fits(model, 64, "bfloat16", 5 * MIB, 1 << 20, SCHEDULER)
    assert longest
    memory.pools_for(model, 64, "bfloat16", 5 * MIB, longest, SCHEDULER)
    with pytest.raises(ConfigError, match=f"--max-model-len to at most {longest}"):
        memory.pools_for(model, 64, "bfloat16", 5 * MIB, longest + 1, SCHEDULER)
