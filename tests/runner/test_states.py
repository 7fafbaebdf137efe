"""Recurrent states saved and loaded, against a plain loop over rows, layers and parts."""

from __future__ import annotations

import random

import pytest
import torch

from weft.common.errors import EngineDead
from weft.config.resolved import KVConfig, PoolSpec
from weft.config.spec import CacheSpec, StatePart
from weft.runner import slot_state as module
from weft.runner.kv_tensors import by_layer, stacked
from weft.runner.slot_state import States
from weft.types.plan import AppendBlocks, FreeSlot, LoadState, SaveState, SlotUpdate, column

CPU = torch.device("cpu")
SLOTS, BLOCKS, COPIES = 6, 5, 3
PARTS = (StatePart(name="delta", shape=(2, 3, 4), wide=True), StatePart(name="conv", shape=(5,), wide=False))


def kv_config() -> KVConfig:
    caches = [
        CacheSpec(kind="full", layers=(1,), kv_heads=1, head_dim=4),
        CacheSpec(kind="state", layers=(0, 2, 3), parts=PARTS, form="delta"),
        CacheSpec(kind="state", layers=(1,), parts=PARTS[:1], form="delta"),
    ]
    pools = tuple(PoolSpec(cache=cache, block_size=4, num_blocks=BLOCKS) for cache in caches)
    return KVConfig(
        pools=pools,
        block_size=4,
        enable_prefix_caching=True,
        max_model_len=16,
        num_slots=SLOTS,
        copies=COPIES,
    )


class Bench:
    """States full of NaN before the first write, with a copy in plain Python."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.kv = kv_config()
        self.memory = stacked(self.kv, dtype, CPU)
        for tensor in [t for tensors in self.memory for t in tensors]:
            tensor.fill_(torch.nan)
        self.live = torch.zeros(SLOTS + 1, dtype=torch.int64)
        self.states = States(self.kv, self.memory, self.live, dtype)
        self.slots: dict[tuple[int, int, int], float] = {}
        self.blocks: dict[tuple[int, int], float] = {}

    def write(self, slot: int, kind: int, copy: int, value: float) -> None:
        for part in self.memory[kind]:
            for layer in range(len(part)):
                part[layer, slot, copy] = value + layer
        self.slots[slot, kind, copy] = value

    def mirror(self, op: SlotUpdate) -> None:
        if isinstance(op, SaveState):
            self.blocks[op.kind, op.block] = self.slots[op.slot, op.kind, int(self.live[op.slot]) - op.back]
        elif isinstance(op, LoadState):
            self.slots[op.slot, op.kind, 0] = self.blocks[op.kind, op.block]

    def check(self) -> None:
        for kind in (1, 2):
            for part, snapshots in zip(self.memory[kind], self.states.snapshots(kind), strict=True):
                for layer in range(len(part)):
                    for slot in range(SLOTS):
                        for copy in range(COPIES):
                            value = self.slots.get((slot, kind, copy))
                            found = part[layer, slot, copy]
                            assert found.isnan().all() if value is None else (found == value + layer).all()
                    for block in range(1 + BLOCKS):
                        value = self.blocks.get((kind, block))
                        found = snapshots[layer, block]
                        assert (found == (0 if value is None else value + layer)).all()
            assert self.memory[kind][0][:, SLOTS].isnan().all()  # the spare slot


@pytest.mark.parametrize("passing", [0, 1, 300, 64 << 20])
@pytest.mark.parametrize("seed", range(4))
def test_steps_of_many_ops(seed: int, passing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``passing``: bytes of a batch, as on a GPU; 0 for row by row."""
    monkeypatch.setattr(module, "PASSING_BYTES", passing)
    rng, bench = random.Random(seed), Bench()
    for one in bench.states._kinds.values():
        one.batched = passing > 0
    for step in range(30):
        for slot in range(SLOTS):
            accepted = rng.randrange(COPIES)
            bench.live[slot] = accepted
            for kind in (1, 2):
                for copy in range(accepted + 1):
                    bench.write(slot, kind, copy, float(rng.randrange(1 << 16)))
        slots = rng.sample(range(SLOTS), SLOTS)
        savers, loaders = slots[: rng.randint(0, 3)], slots[3:]
        ops: list[SlotUpdate] = [FreeSlot(slot=0, gen=step)]
        for kind in (1, 2):
            blocks = rng.sample(range(1, BLOCKS + 1), len(savers))
            ops += [
                SaveState(slot=s, kind=kind, block=b, back=rng.randint(0, int(bench.live[s])))
                for s, b in zip(savers, blocks, strict=True)
            ]
            ready = [b for k, b in bench.blocks if k == kind and b not in blocks]
            for slot in loaders if ready else []:
                ops.append(AppendBlocks(slot=slot, kind=0, blocks=column([1])))
                ops.append(LoadState(slot=slot, kind=kind, block=rng.choice(ready)))
        for op in ops:
            bench.mirror(op)
        bench.states.apply(ops)
        for op in ops:
            if isinstance(op, LoadState):
                assert bench.live[op.slot] == 0
        bench.check()


def test_a_snapshot_is_not_changed_by_what_the_slot_does_next() -> None:
    bench = Bench(torch.float64)
    bench.write(2, 1, 0, 7.0)
    bench.states.apply([SaveState(slot=2, kind=1, block=3)])
    bench.write(2, 1, 0, 9.0)
    bench.states.apply([LoadState(slot=4, kind=1, block=3)])
    assert (bench.memory[1][0][:, 4, 0] == torch.tensor([7.0, 8.0, 9.0]).view(3, 1, 1, 1)).all()
    assert bench.memory[1][0].dtype == bench.states.snapshots(1)[0].dtype == torch.float64


def test_dtypes_follow_the_parts() -> None:
    bench = Bench(torch.bfloat16)
    assert [part.dtype for part in bench.states.snapshots(1)] == [torch.float32, torch.bfloat16]
    assert [part.dtype for part in bench.memory[1]] == [torch.float32, torch.bfloat16]
    layer = by_layer(bench.kv, bench.memory)[0]
    assert [tuple(part.shape) for part in layer[1]] == [(7, 3, 2, 3, 4), (7, 3, 5)]
    assert layer[1][0].data_ptr() == bench.memory[1][0].data_ptr()


@pytest.mark.parametrize(
    "ops",
    [
        [SaveState(slot=SLOTS, kind=1, block=1)],
        [SaveState(slot=0, kind=1, block=0)],
        [SaveState(slot=0, kind=1, block=BLOCKS + 1)],
        [SaveState(slot=0, kind=1, block=1, back=COPIES)],
        [SaveState(slot=0, kind=1, block=1), SaveState(slot=1, kind=1, block=1)],
        [LoadState(slot=0, kind=1, block=1), LoadState(slot=0, kind=1, block=2)],
        [LoadState(slot=-1, kind=1, block=1)],
        [LoadState(slot=0, kind=0, block=1)],
    ],
)
def test_an_op_that_cannot_be_right_stops_the_group(ops: list[SlotUpdate]) -> None:
    with pytest.raises(EngineDead):
        Bench().states.apply(ops)


def test_models_without_states_have_nothing_to_do() -> None:
    kv = kv_config()
    entries = KVConfig(
        pools=kv.pools[:1], block_size=4, enable_prefix_caching=True, max_model_len=16, num_slots=SLOTS
    )
    States(
        entries,
        stacked(entries, torch.float32, CPU),
        torch.zeros(SLOTS + 1, dtype=torch.int64),
        torch.float32,
    ).apply([])
