"""Shares of embeddings become whole between the ranks of a group, which are processes of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.engine.test_images import config_of
from tests.runner.transfers_rig import PARAMS, SEED, segment
from tests.support.seen import SeeingModels, Seen
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import ConfigError
from weft.config.group_settings import compare, shared_settings
from weft.config.resolved import EngineConfig
from weft.disagg.protocol.group_layout import blocks_of, embedding_dims
from weft.disagg.protocol.transfer_events import RankReport
from weft.disagg.transport.reports import TransferReports
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.engine.build import build_runner
from weft.engine.disagg.rank_transfers import embedding_dims_of
from weft.engine.start import start_executor
from weft.runner.images.media_departures import Departures
from weft.runner.step_handle import StepHandle
from weft.types import frames as f
from weft.types import plan as p
from weft.types import transfer as r
from weft.types.media_item import BLOCK_ROWS, spans_of
from weft.types.transfer import Outcome, TransferKey

PARTS: list[list[int | tuple[int, int]]] = [[5, (8, 9), 4], [3, (1, 1), 2, (3, 5), 6]]
NAME = "qwen3-vl"
SECONDS = deadline(60.0)
FIRST, STRIDE = 3, 7
"""Blocks of embeddings: those of image n are FIRST + STRIDE * n, and the one before that."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SeeingModels:
    return SeeingModels(tmp_path_factory.mktemp("gather"))


def small(models: SeeingModels, **more: Any) -> EngineConfig:
    """With a pool of some megabytes."""
    return config_of(models.folder(NAME), mm_cache_bytes="2M", **more)


def images(prompts: list[Seen]) -> list[tuple[int, int, Any, bytes, list[int]]]:
    """(slot, number, item, blocks as ops have them, blocks) of each."""
    found = []
    for slot, prompt in enumerate(prompts):
        for item in prompt.media:
            number = len(found)
            table = [FIRST + STRIDE * number - n for n in range(-(-item.count // BLOCK_ROWS))]
            found.append((slot, number, item, np.array(table, "<i4").tobytes(), table))
    return found


def plan_of(prompts: list[Seen], config: EngineConfig, before: list[p.SlotUpdate], **more: Any) -> p.StepPlan:
    """One step that prefills all of them."""
    ops: list[p.SlotUpdate] = []
    taken = 1
    for slot, prompt in enumerate(prompts):
        ids = p.column(prompt.ids)
        spans = p.column(spans_of(prompt.media, 2).reshape(-1))
        ops.append(
            p.AllocSlot(
                slot=slot,
                gen=1,
                choice=0,
                seed=SEED,
                params=PARAMS,
                num_prompt=len(ids),
                num_cached=0,
                token_ids=ids,
                spans=spans,
            )
        )
        for kind, pool in enumerate(config.kv.pools):
            count = -(-len(ids) // pool.block_size)
            ops.append(
                p.AppendBlocks(slot=slot, kind=kind, blocks=p.column(list(range(taken, taken + count))))
            )
        taken += count
    for slot, _, item, blocks, _ in images(prompts):
        before.append(p.BindMedia(slot=slot, start=item.start, count=item.count, blocks=blocks))
    rows = [(slot, 0, len(prompt.ids), 1, 0) for slot, prompt in enumerate(prompts)]
    return p.StepPlan(step=0, ops=(*ops, *before), prefill=segment(rows), **more)


def logprobs(runner: Any, plan: p.StepPlan) -> np.ndarray:
    handle: StepHandle = runner.forward(plan)
    runner.sample(handle)
    result = runner.read(handle)
    assert result.logprobs is not None
    assert not result.row_error
    values: np.ndarray = result.logprobs.values
    return values


class Encoded:
    """An encode group: embeddings in shared memory, and a rank that sends the embeddings."""

    def __init__(self, models: SeeingModels, prompts: list[Seen], folder: Path) -> None:
        config = small(models)
        runner = build_runner(config, progress=False)
        ops: list[p.SlotUpdate] = [
            p.Encode(blocks=blocks, count=item.count, grid=item.grid, pixels=item.pixels)
            for _, _, item, blocks, _ in images(prompts)
        ]
        self.expected = logprobs(runner, plan_of(prompts, config, ops))
        pool = runner._media.pool
        runner.close()
        levels, lines, _, width = pool.shape
        dims = embedding_dims(levels, width, lines - 1, 1, "float64", False)
        self.memory = SharedMemory(pool.nbytes)
        self.pool = self.memory.tensor.view(torch.float64).view(pool.shape)
        self.pool.copy_(pool)
        transport = ShmTransport(str(folder), 0, 77)
        transport.share([self.memory])
        self.reports = TransferReports()
        self.transfer = RankTransfer(0, dims, transport, self.reports.tell)
        self.leaves = Departures(self.transfer, levels)
        self.transfers = 0

    def send(self, group: Any, dims: r.GroupDims, image: tuple[int, int, Any, bytes, list[int]]) -> None:
        """To the ranks of ``group``, until all have all of it."""
        _, _, item, blocks, table = image
        self.transfers += 1
        key = TransferKey(self.transfers, 0, 1)
        offer = r.Admitted(key=key, num_prompt=item.count, dims=self.transfer.dims)
        ends = group.embeddings.endpoints()
        bound = r.Bound(key=key, start=0, dims=dims, blocks=(blocks_of(table),), endpoints=ends)
        group.embeddings.send(f.ExpectTransfer(offer=offer, bound=bound))
        self.transfer.begin(offer, bound, (r.Blocks(first=0, ids=b""),), 0)
        self.leaves.send(p.SendMedia(key=key, blocks=blocks, count=item.count))
        done: set[int] = set()
        until = time.monotonic() + SECONDS
        while len(done) < dims.ranks:
            assert time.monotonic() < until
            group.check()
            for word in group.embeddings.take():
                assert not isinstance(word, RankReport) or word.outcome is not Outcome.failed, word.error
                if isinstance(word, RankReport) and word.outcome is Outcome.done:
                    done.add(word.rank)

    def close(self) -> None:
        self.transfer.close()
        self.reports.close()
        self.memory.close()


@pytest.fixture(scope="module")
def prompts(models: SeeingModels) -> list[Seen]:
    return [models.seen(NAME, parts, number) for number, parts in enumerate(PARTS)]


@pytest.fixture(scope="module")
def encoded(models: SeeingModels, prompts: list[Seen], tmp_path_factory: Any) -> Iterator[Encoded]:
    import shutil

    from weft.common.folder import private_folder

    folder = private_folder()
    made = Encoded(models, prompts, folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.requirement("D14")
@mostly_slow(("ranks", "micro_batches"), [(2, 1), (2, 2), (4, 1)], [(2, 2)])
def test_a_step_reads_whole_embeddings_of_which_each_rank_received_its_share(
    ranks: int, micro_batches: int, models: SeeingModels, prompts: list[Seen], encoded: Encoded
) -> None:
    config = small(models, tensor_parallel_size=ranks, take_embeddings=True)
    dims = embedding_dims_of(config)
    assert dims.kinds[0].shards, "on where a group has several ranks"
    group = start_executor(config, progress=False)
    try:
        engine = group.runner._media  # type: ignore[attr-defined]
        for image in images(prompts):
            encoded.send(group, dims, image)
            _, _, item, _, table = image
            here, there = (
                pool[:, table].flatten(1, 2)[:, : item.count] for pool in (engine.pool, encoded.pool)
            )
            same = (here == there).all(2).all(0)
            assert same.nonzero().flatten().tolist() == list(range(-(-item.count // ranks))), (
                "its share, and no more"
            )
        ops: list[p.SlotUpdate] = [
            p.GatherMedia(blocks=blocks, count=item.count) for _, _, item, blocks, _ in images(prompts)
        ]
        made = logprobs(group, plan_of(prompts, config, ops, micro_batches=micro_batches))
        np.testing.assert_allclose(made, encoded.expected, rtol=0, atol=1e-9)
        for _, _, item, _, table in images(prompts):
            here, there = (
                pool[:, table].flatten(1, 2)[:, : item.count] for pool in (engine.pool, encoded.pool)
            )
            assert (here == there).all()
    finally:
        group.close()


def test_without_the_exchange_it_would_read_what_is_not_there(
    models: SeeingModels, prompts: list[Seen], encoded: Encoded
) -> None:
    """So the test above sees what it is to see."""
    config = small(models, tensor_parallel_size=2, take_embeddings=True)
    group = start_executor(config, progress=False)
    try:
        for image in images(prompts):
            encoded.send(group, embedding_dims_of(config), image)
        made = logprobs(group, plan_of(prompts, config, []))
        assert not np.allclose(made, encoded.expected, rtol=0, atol=1e-3)
    finally:
        group.close()


@pytest.mark.requirement("D14")
def test_whole_rows_need_no_exchange(models: SeeingModels, prompts: list[Seen], encoded: Encoded) -> None:
    config = small(models, tensor_parallel_size=2, take_embeddings=True, shard_embeddings="off")
    dims = embedding_dims_of(config)
    assert not dims.kinds[0].shards
    group = start_executor(config, progress=False)
    try:
        for image in images(prompts):
            encoded.send(group, dims, image)
        made = logprobs(group, plan_of(prompts, config, []))
        np.testing.assert_allclose(made, encoded.expected, rtol=0, atol=1e-9)
    finally:
        group.close()


@pytest.mark.requirement("D29")
def test_the_exchange_is_warmed_up_when_a_group_forms(
    models: SeeingModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all ranks: else the first epoch would not come up."""
    from weft.runner.images.media_departures import Shares

    calls: list[int] = []
    gather = Shares.gather

    def counted(self: Shares, pool: Any, index: Any, count: int) -> None:
        calls.append(count)
        gather(self, pool, index, count)

    monkeypatch.setattr(Shares, "gather", counted)
    for shard, expected in (("auto", [1]), ("off", [])):
        calls.clear()
        config = small(models, tensor_parallel_size=2, take_embeddings=True, shard_embeddings=shard)
        group = start_executor(config, progress=False)
        assert group._links.mesh.launcher.flights == [], "it counts as communication of the first step"
        group.close()
        assert calls == expected


@pytest.mark.requirement("D29")
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("shard_embeddings", "off"),
        ("take_embeddings", False),
        ("role", "prefill"),
        ("transfer", "tcp"),
    ],
)
def test_ranks_that_disagree_on_transfers_are_distinguished_by_name(
    flag: str, value: Any, models: SeeingModels
) -> None:
    config = small(models, tensor_parallel_size=2, take_embeddings=True)
    other = msgspec.structs.replace(
        config, transfer=msgspec.structs.replace(config.transfer, **{flag: value})
    )
    named = f"transfer.{flag} \\(--{flag.replace('_', '-')}\\)"
    with pytest.raises(ConfigError, match=f"the head and rank 1 differ in {named}"):
        compare(shared_settings(config), shared_settings(other), "the head", "rank 1")
