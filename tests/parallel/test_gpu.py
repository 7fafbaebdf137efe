"""Collectives of CUDA tensors: through host memory on one GPU, over NCCL on two, and beside compute.

Ranks are threads of one process here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_group import value
from tests.parallel.test_nccl import side_by_side
from weft.common import env
from weft.parallel.group_comm import CommLost, GroupComm
from weft.parallel.launcher import Launcher, StreamLauncher

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")

FIRST = torch.device("cuda", 0)
CASES = [(7, torch.float32), (1 << 17, torch.bfloat16), (3, torch.int64), (1 << 15, torch.float64)]


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """Restore the environment variables of NCCL after the test."""
    before = dict(os.environ)
    env.prepare_nccl(one_host=True)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def everything(comm: GroupComm, device: torch.device) -> list[torch.Tensor]:
    """Run every collective. Return the results in host memory."""
    rank, size = comm.rank, comm.size
    summed = [comm.all_reduce(value(rank, count, dtype).to(device)) for count, dtype in CASES]
    rows = (torch.arange(6).view(3, 2) + 10 * rank).to(device)
    sends, receives = ([1, 2], [1, 0]) if rank == 0 else ([0, 3], [2, 3])
    made = [
        *(one.result() for one in summed if one is not None),
        comm.all_gather(rows.t()).result(),
        comm.reduce_scatter(value(rank, 4 * size, torch.float32).view(size, 4).to(device)).result(),
        comm.all_to_all(rows, sends, receives).result(),
    ]
    assert all(one.device == device for one in made)
    return [one.cpu() for one in made]


def on_comms(devices: list[torch.device], **options: Any) -> list[list[torch.Tensor]]:
    store = dist.HashStore()

    def one(rank: int) -> list[torch.Tensor]:
        device = devices[rank]
        if device.type == "cuda":
            torch.cuda.set_device(device)  # for this thread
        gpu = device if options.get("nccl") else None
        ordered = options.get("ordered", True)
        comm = GroupComm(
            "x", range(2), rank, Launcher(), share=options.get("share", False), gpu=gpu, ordered=ordered
        )
        comm.connect(store, 0, 60.0)
        try:
            return everything(comm, device)
        finally:
            comm.abort()
            comm.settle(60.0)

    return side_by_side(2, one)


@pytest.mark.parametrize("share", [False, True], ids=["gloo", "shared memory"])
def test_two_ranks_on_one_gpu_through_host_memory(share: bool) -> None:
    expected = on_comms([torch.device("cpu")] * 2)
    for made, wanted in zip(on_comms([FIRST] * 2, share=share), expected, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


@needs_two
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "fast"])
def test_nccl(ordered: bool) -> None:
    expected = on_comms([torch.device("cpu")] * 2)
    devices = [torch.device("cuda", number) for number in range(2)]
    first, second = on_comms(devices, nccl=True, ordered=ordered)
    for made, wanted in zip((first, second), expected, strict=True):
        for number, (one, other) in enumerate(zip(made, wanted, strict=True)):
            if ordered or number >= len(CASES):
                assert torch.equal(one, other)
            else:
                torch.testing.assert_close(one, other)
    assert all(torch.equal(a, b) for a, b in zip(first[: len(CASES)], second[: len(CASES)], strict=True))


@needs_two
def test_a_peer_that_never_comes_is_freed_by_abort_and_the_next_epoch_works() -> None:
    store, aborted = dist.HashStore(), threading.Barrier(2)

    def one(rank: int) -> float:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        comm = GroupComm("x", range(2), rank, Launcher(), share=False, gpu=device)
        comm.connect(store, 0, 60.0)
        if rank == 0:  # hangs on the device
            comm.all_gather(torch.ones(1 << 20, device=device))
            event = torch.cuda.Event()
            event.record()
            assert not event.query()
        aborted.wait(60)
        comm.abort()
        comm.settle(60.0)
        torch.cuda.synchronize(device)
        with pytest.raises(CommLost):
            comm.all_gather(torch.ones(1, device=device))
        comm.connect(store, 1, 60.0)
        try:
            return float(comm.all_gather(torch.ones(1, device=device)).result().sum())
        finally:
            comm.abort()
            comm.settle(60.0)

    assert side_by_side(2, one) == [2.0, 2.0]


# ---- beside compute

LONG = 20_000_000
"""Cycles: some 10 ms."""


def late(x: torch.Tensor) -> torch.Tensor:
    """Read x long after the launch, in place of a collective."""
    torch.cuda._sleep(LONG)
    return x + 1


def test_a_collective_beside_compute_reads_its_input_and_keeps_its_result() -> None:
    """The owner frees the input at once, and each result too. Other allocations get memory meanwhile."""
    launcher = StreamLauncher(FIRST)
    launcher.threaded(True)
    kept = []
    for number in range(20):
        given = torch.full((1 << 20,), float(number), device=FIRST)
        pending = launcher.launch(lambda given=given: late(given))  # type: ignore[misc]
        del given
        for _ in range(4):  # would reuse the memory of the input
            torch.full((1 << 20,), -1.0, device=FIRST)
        made = pending.result()
        del pending
        kept.append((number, made[:3] * 1.0, made.sum()))
        del made
    for number, some, total in kept:
        assert some.tolist() == [number + 1.0] * 3
        assert total.item() == pytest.approx((number + 1.0) * (1 << 20))
    launcher.threaded(False)
    launcher.settle(30.0)


def test_compute_goes_on_under_a_collective() -> None:
    launcher = StreamLauncher(FIRST)
    launcher.threaded(True)
    torch.cuda.synchronize()
    pending = launcher.launch(lambda: late(torch.ones(8, device=FIRST)))
    computed = torch.cuda.Event()
    torch.ones(8, device=FIRST).add_(1)
    computed.record()
    computed.synchronize()
    joined = pending._joined  # type: ignore[attr-defined]
    assert not joined.query(), "compute waited for the collective"
    assert pending.result().tolist() == [2.0] * 8


def test_two_micro_batches_beside_each_other_are_one_graph() -> None:
    """Fork and join by events alone can be captured. A replay reads the current inputs."""
    from weft.overlap.interleave import interleave
    from weft.runner.graphs.graphs import CudaCapture

    launcher = StreamLauncher(FIRST)
    given = [torch.zeros(1 << 16, device=FIRST) for _ in range(2)]
    out = torch.zeros(2, 1 << 16, device=FIRST)

    def micro_batch(x: torch.Tensor) -> Any:
        for _ in range(3):
            pending = launcher.launch(lambda x=x: x * 2 + 1)  # type: ignore[misc]
            yield pending
            x = pending.result() + 1
        return x

    def run() -> None:
        launcher.threaded(True)
        made = interleave(micro_batch(given[0]), micro_batch(given[1]))
        launcher.threaded(False)
        out.copy_(torch.stack(made))

    replay = CudaCapture(FIRST)(run)
    for number in range(3):
        given[0].fill_(number)
        given[1].fill_(-number)
        replay()
        torch.cuda.synchronize()
        for row, x in zip(out, (number, -number), strict=True):
            assert row[0].item() == row[-1].item() == 8 * x + 14
