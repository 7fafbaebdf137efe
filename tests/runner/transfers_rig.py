"""Two runners of one model in this process. A sequence moves from one to the other, plan by plan."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from tests.support.slowness import deadline
from weft.cli.verify.tiny import write_family
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.config.sections.all import TransferSection
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.engine.build import build_runner
from weft.runner.runner import Runner
from weft.types import plan as p
from weft.types.sampling import TokenParams
from weft.types.transfer import Admitted, Blocks, Bound, Outcome, TransferKey

KEY = TransferKey(7, 0, 1)
PARAMS = TokenParams(temperature=0.8, logprobs=4, max_tokens=64, repetition_penalty=1.1)
SEED = 11


def config_of(
    root: Path, family: str, block: int, role: Literal["unified", "prefill", "decode"], **more: Any
) -> EngineConfig:
    """Return the configuration of a tiny model of ``family``. The random weights are equal in every group."""
    settings: dict[str, Any] = {
        "model": str(write_family(root, family)),
        "load_format": "dummy",
        "tokenizer": "spool-text",
        "dtype": "float64",
        "device": "cpu",
        "kv_cache_memory": "8M",
        "block_size": block,
        "max_num_seqs": 4,
        "max_model_len": 160,
        "seed": 1,
        **more,
    }
    transfer = TransferSection(role=role, transfer=settings.pop("transfer", "auto"))
    return msgspec.structs.replace(resolve(from_keywords(settings)), transfer=transfer)


class Side:
    """A group of one rank with hand-made plans. Every sequence has all blocks from the start."""

    def __init__(self, config: EngineConfig, seed: int) -> None:
        self.config = config
        self.runner: Runner = build_runner(config, progress=False)
        self.step = 0
        self._random = random.Random(seed)
        self._taken = [set[int]() for _ in self.runner.kv.pools]
        self.tables: dict[int, list[list[int]]] = {}
        """Slot -> blocks for each KV cache group; for a state group the block of the snapshot."""

    def tables_for(self, positions: int) -> list[list[int]]:
        """Return free blocks for ``positions`` positions in random order, for each KV cache group."""
        made = []
        for pool, taken in zip(self.runner.kv.pools, self._taken, strict=True):
            count = 1 if pool.cache.kind == "state" else -(-positions // pool.block_size)
            free = [block for block in range(1, pool.num_blocks + 1) if block not in taken]
            made.append(self._random.sample(free, count))
            taken.update(made[-1])
        return made

    def enter(
        self, slot: int, ids: Sequence[int], prompt: int, cached: int, tables: list[list[int]]
    ) -> list[p.SlotUpdate]:
        """Return the slot updates for a sequence of ``ids`` in ``slot``. ``cached`` positions are already
        in ``tables``."""
        self.tables[slot] = tables
        ops: list[p.SlotUpdate] = [
            p.AllocSlot(
                slot=slot,
                gen=1,
                choice=0,
                seed=SEED,
                params=PARAMS,
                num_prompt=prompt,
                num_cached=cached,
                token_ids=p.column(list(ids)),
            )
        ]
        for kind, pool in enumerate(self.runner.kv.pools):
            if pool.cache.kind != "state":
                ops.append(p.AppendBlocks(slot=slot, kind=kind, blocks=p.column(tables[kind])))
            elif cached:
                ops.append(p.LoadState(slot=slot, kind=kind, block=tables[kind][0]))
        return ops

    def export(
        self, slot: int, start: int, end: int, states: bool = False, key: TransferKey = KEY
    ) -> p.Export:
        """Return the export of a chunk, with all blocks up to ``end``; for ``states`` with the snapshots."""
        blocks = []
        for pool, table in zip(self.runner.kv.pools, self.tables[slot], strict=True):
            if pool.cache.kind == "state":
                blocks.append(blocks_of(table if states else []))
            else:
                blocks.append(blocks_of(table[: -(-end // pool.block_size)]))
        return p.Export(slot=slot, key=key, start=start, end=end, blocks=tuple(blocks), states=states)

    def save(self, slot: int, end: int) -> list[p.SlotUpdate]:
        kinds = [kind for kind, pool in enumerate(self.runner.kv.pools) if pool.cache.kind == "state"]
        saves = [p.SaveState(slot=slot, kind=kind, block=self.tables[slot][kind][0]) for kind in kinds]
        return [*saves, self.export(slot, 0, end, states=True)] if kinds else []

    def run(
        self,
        ops: Sequence[p.SlotUpdate] = (),
        prefill: Sequence[tuple[int, int, int, int, int]] = (),
        decode: Sequence[tuple[int, int, int, int, int]] = (),
        micro_batches: int = 1,
    ) -> p.StepResult:
        """Run a step. Rows are (slot, start, count, sampled, drafts to propose)."""
        plan = p.StepPlan(
            step=self.step,
            ops=tuple(ops),
            prefill=segment(prefill),
            decode=segment(decode),
            micro_batches=micro_batches,
        )
        self.step += 1
        handle = self.runner.forward(plan)
        self.runner.sample(handle)
        return self.runner.read(handle)

    def blocks(self, tables: list[list[int]]) -> tuple[Blocks, ...]:
        return tuple(blocks_of(table) for table in tables)

    def offer(self, end: int, key: TransferKey = KEY) -> Admitted:
        assert self.runner.transfer is not None
        return Admitted(key=key, num_prompt=end, dims=self.runner.transfer.dims)

    def bound(self, tables: list[list[int]], start: int = 0, key: TransferKey = KEY) -> Bound:
        assert self.runner.transfer is not None
        assert self.runner.endpoint is not None
        dims = self.runner.transfer.dims
        endpoints = (self.runner.endpoint,)
        return Bound(key=key, start=start, dims=dims, blocks=self.blocks(tables), endpoints=endpoints)

    def next_report(self, seconds: float = 20.0) -> RankReport | RankStopped:
        """Return the next report of the transfers, except reports of progress."""
        until = time.monotonic() + deadline(seconds)
        while time.monotonic() < until:
            assert self.runner.reports is not None
            for said in self.runner.reports.take():
                if isinstance(said, RankStopped) or said.outcome is not Outcome.pending:
                    return said
            time.sleep(0.001)
        raise AssertionError("the transfers told nothing")

    def close(self) -> None:
        self.runner.close()


def segment(rows: Sequence[tuple[int, int, int, int, int]]) -> p.Segment:
    columns = np.array(rows, np.int64).reshape(-1, 5).T
    slot, start, count, sample, next_k = (p.column(column) for column in columns)
    return p.Segment(
        slot=slot,
        gen=p.column(np.ones(len(rows))),
        start=start,
        count=count,
        logits=sample,
        sample=sample,
        next_k=next_k,
    )


def logprobs(result: p.StepResult) -> tuple[list[int], np.ndarray]:
    """Return ids and values of the logprobs of a step's rows."""
    assert result.logprobs is not None
    assert not result.row_error
    return result.logprobs.ids.ravel().tolist(), result.logprobs.values
