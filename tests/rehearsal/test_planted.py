"""Planted bugs of the kinds that only a GPU shows. A rehearsal detects each bug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import fake_tensor

from tests.rehearsal import rig
from tests.rehearsal.device import HiddenWait, NotCapturable, OnHost, Races
from tests.rehearsal.kernels import BadLaunch
from tests.rehearsal.ranks import BadCollective
from tests.rehearsal.rig import rehearse
from tests.support.slow import mostly_slow
from weft.attention.base import SegmentInput
from weft.ops.triton import fused
from weft.parallel import group_comm, launcher
from weft.runner import result, runner, slot_state
from weft.runner.batch import batch, staging
from weft.runner.batch.batch import BatchBuilder
from weft.runner.graphs import graphs
from weft.runner.sampling import sampler

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch
RANKS = {"ranked": True, "tensor_parallel_size": 2}
OVERLAP = {**RANKS, "overlap": "all"}
DRAFTS = {"speculative_method": "ngram", "speculative_adaptive": False, "num_speculative_tokens": 2}


def after(patch: Patch, owner: Any, name: str, change: Callable[..., Any]) -> None:
    """Make ``owner.name`` return ``change(its result, *its arguments)``."""
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **named: change(before(*args, **named), *args))


def tensor_on_the_host(patch: Patch) -> None:
    patch.setattr(slot_state, "upload", lambda array, device: torch.from_numpy(array))


def item(patch: Patch) -> None:
    after(patch, sampler.Sampler, "sample", lambda made, *_: (int(made.tokens.max()), made)[1])


def boolean_index(patch: Patch) -> None:
    after(patch, runner, "accept", lambda made, *_: made + made[made > 0].sum())


def pageable_upload(patch: Patch) -> None:
    patch.setattr(batch, "upload", lambda array, device: torch.from_numpy(array).to(device))
    patch.setattr(torch.Tensor, "pin_memory", lambda self, *_: self)  # parameters of a new sequence


def blocking_read(patch: Patch) -> None:
    after(patch, runner, "accept", lambda made, *_: made.cpu().to(made.device))


def strided_table(patch: Patch) -> None:
    def change(made: SegmentInput, *_: Any) -> SegmentInput:
        return replace(made, tables=tuple(table.T.contiguous().T for table in made.tables))

    after(patch, BatchBuilder, "_segment", change)


def wide_offsets(patch: Patch) -> None:
    after(patch, BatchBuilder, "_segment", lambda made, *_: replace(made, q_offsets=made.q_offsets.long()))


def misaligned_cache(patch: Patch) -> None:
    def change(made: Any, *_: Any) -> Any:
        return [
            [torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:].view(t.shape) for t in kind]
            for kind in made
        ]

    after(patch, runner, "stacked", change)


def upload_in_a_capture(patch: Patch) -> None:
    after(
        patch, BatchBuilder, "decode", lambda made, *_: (batch.upload(np.arange(3), made.ids.device), made)[1]
    )


def event_asked_in_a_capture(patch: Patch) -> None:
    event = []

    def change(made: Any, *_: Any) -> Any:
        event.append(torch.cuda.Event())
        event[-1].record()
        event[-1].query()
        return made

    after(patch, BatchBuilder, "decode", change)


def graph_of_memory_that_moves(patch: Patch) -> None:
    def change(_: None, self: graphs.DecodeGraphs, *__: Any) -> None:
        self._columns = self._columns.clone()

    after(patch, graphs.DecodeGraphs, "_capture", change)


def missing_join(patch: Patch) -> None:
    patch.setattr(launcher._StreamCollective, "result", lambda self: self._output)


def missing_fork(patch: Patch) -> None:
    from tests.rehearsal.stand_ins import Stream

    patch.setattr(Stream, "wait_stream", lambda self, other: None)


def memory_given_away(patch: Patch) -> None:
    """Plant a bug: the allocator does not know that another stream reads the result of a collective."""
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)


def result_read_early(patch: Patch) -> None:
    """Plant a bug: the host reads the results of any step, captured or not, without a wait for the copies."""
    patch.setattr(result._Copies, "is_complete", lambda self: True)


def buffer_reused_early(patch: Patch) -> None:
    """Plant a bug: every step uses the same staging buffer, without a wait for the copy."""

    def acquire(self: staging.StagingRing) -> staging.StagingBuffer:
        return self._free[0]

    patch.setattr(staging.StagingRing, "acquire", acquire)
    patch.setattr(staging.StagingRing, "release", lambda self, buffer: None)


def strided_collective(patch: Patch) -> None:
    patch.setattr(group_comm, "_bytes", lambda x: x.view(-1).view(torch.uint8)[::2])


MISPLACED = (OnHost, getattr(fake_tensor, "FakeTensorDeviceMismatchError", RuntimeError))
"""Errors of tensors on two devices. Before torch 2.12 the second one has no name of its own."""
PLANTED: list[tuple[Callable[[Patch], None], Any, dict[str, Any]]] = [
    (tensor_on_the_host, (*MISPLACED, HiddenWait), {}),
    (item, HiddenWait, DRAFTS),  # a step without drafts draws inside its capture
    (boolean_index, HiddenWait, DRAFTS),
    (pageable_upload, HiddenWait, {}),
    (blocking_read, HiddenWait, DRAFTS),
    (strided_table, BadLaunch, {}),
    (wide_offsets, BadLaunch, {}),
    (misaligned_cache, BadLaunch, {}),
    (upload_in_a_capture, NotCapturable, {}),
    (event_asked_in_a_capture, NotCapturable, {}),
    (graph_of_memory_that_moves, NotCapturable, {}),
    (missing_join, Races, OVERLAP),
    (missing_fork, Races, OVERLAP),
    (memory_given_away, Races, OVERLAP),
    (result_read_early, Races, {}),
    (buffer_reused_early, Races, {}),
    (strided_collective, BadCollective, {**RANKS, "collectives": "nccl"}),
]


@mostly_slow(
    ("plant", "found", "settings"), PLANTED, PLANTED[1::2], ids=lambda value: getattr(value, "__name__", "")
)
def test_a_planted_bug_is_found(
    plant: Callable[[Patch], None], found: Any, settings: dict[str, Any], folder_of: Any, monkeypatch: Patch
) -> None:
    settings = {"max_num_seqs": 2, **settings}
    with pytest.raises(found):
        rehearse(monkeypatch, folder_of("llama"), rig.short(), plant=plant, **settings)


def test_a_grid_that_is_too_large_is_found(monkeypatch: Patch) -> None:
    with rig.rehearsed(monkeypatch):
        columns = 2 * 70_000 * fused.GATED_AT_ONCE
        with pytest.raises(BadLaunch, match="65535"):
            fused.gated(torch.empty(1, columns, dtype=torch.bfloat16, device="cuda"), "silu")


def test_two_captures_of_a_step_touch_the_same_memory(folder_of: Any, monkeypatch: Patch) -> None:
    """Static addresses: both captures of a step read and write the same outside memory."""
    with rig.rehearsed(monkeypatch) as made:
        config = rig.config_of(folder_of("llama"))
        rig.Answers(made, monkeypatch, config.spec.vocab_size)
        core = rig.EngineCore(config, progress=False)
        captured = core.runner.graphs
        assert captured is not None
        key = next(iter(captured._replays._entries))
        first, second = (
            captured._options.capture(captured._closure(key)).__self__.captured for _ in range(2)
        )
        assert first.reads.keys() == second.reads.keys()
        assert first.writes.keys() == second.writes.keys()
        kept = [piece.name for piece in first.own.values() if not piece.gone]
        assert not kept, "memory of a graph is used after the capture"
        core.close()
