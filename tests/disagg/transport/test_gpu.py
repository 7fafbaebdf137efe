"""GPU caches that move between groups: bytes, order of streams, and freed blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.transport import rig
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copies import CudaCopies
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.shared_memory import SharedMemory
from weft.types.transfer import Outcome, TransferKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = torch.device("cuda", 0)
KINDS = ("full", "window", "latent, fp8", "compressed", "state")
KEY = TransferKey(7, 0, 1)


class Pair(rig.Pair):
    """A pair with both caches on the GPU, each rank with a thread."""

    def __init__(self, kind: str, folder: Path, ranks: tuple[int, int]) -> None:
        super().__init__(kind, folder, kinds=KINDS, ranks=ranks, senders=False, receivers=False)
        self.caches: dict[str, list[list[torch.Tensor]]] = {}
        sides = (("sender", self.sender, self.senders, 0), ("receiver", self.receiver, self.receivers, 50))
        for name, group, found, base in sides:
            self.caches[name] = []
            for rank in range(group.ranks):
                regions = [torch.from_numpy(region).to(GPU) for region in group.regions[rank]]
                one = rig.transport(kind, folder, rank, 1000 + base + rank)
                rig.stage(one, regions, DeviceWork(GPU, rig.SMALL.inbox))
                self.caches[name].append(regions)
                found.append(rig.Rank(group, rank, one))
        torch.cuda.synchronize()

    def same(self, expected: list[list[np.ndarray]]) -> bool:
        pairs = zip(expected, self.caches["receiver"], strict=True)
        return all(
            np.array_equal(want, have.cpu().numpy())
            for wanted, had in pairs
            for want, have in zip(wanted, had, strict=True)
        )


@pytest.fixture(params=["shm", "tcp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copies() -> Iterator[CudaCopies]:
    made = CudaCopies(GPU, 1 << 20)
    yield made
    made.close()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_sequence_arrives(
    kind: str, ranks: tuple[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    one = Pair(kind, tmp_path_factory.mktemp("t"), ranks)
    expected = one.expected()
    assert not one.same(expected)
    assert {said.outcome for said in one.transfer(KEY)} == {Outcome.done}
    assert one.same(expected)
    for rank in one.senders:
        assert rank.wait(KEY).outcome is Outcome.done
        rank.transfer.stop(KEY)
        rank.wait_stopped(KEY)
    one.close()


def test_sent_bytes_are_those_written_before_the_event(
    kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The pass takes long, and the host is far ahead."""
    one = Pair(kind, tmp_path_factory.mktemp("t"), (1, 1))
    one.expect(KEY)
    one.begin(KEY)
    wait: Any = torch.cuda._sleep
    wait(500_000_000)
    for region in one.caches["sender"][0]:
        region.bitwise_xor_(0x5A)
    for region in one.sender.regions[0]:
        region ^= 0x5A
    expected = one.expected()
    one.compute(KEY)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert one.same(expected)
    one.close()


def test_copies_do_not_wait_for_what_computes_beside_them(copies: CudaCopies) -> None:
    memory = SharedMemory(1 << 20)
    copies.pin(memory.tensor)
    assert memory.tensor.is_pinned()
    caches = torch.arange(256, dtype=torch.uint8, device=GPU).repeat(4096)
    spans = np.array([[at, 0, 4096] for at in range(0, 1 << 20, 8192)], np.int64)
    mark = copies.mark()
    wait: Any = torch.cuda._sleep
    wait(6_000_000_000)  # seconds: other processes may have the GPU meanwhile
    later = copies.mark()
    copy = copies.out([caches], [SpanPart(0, 0, spans)], memory.tensor, mark)
    while not copies.ended(copy):
        pass
    assert not later.query()
    assert torch.equal(memory.tensor[:4096], torch.arange(256, dtype=torch.uint8).repeat(16))
    copies.into(memory.tensor[:4096], caches, np.array([[64, 4096]], np.int64))
    copies.settle()
    assert not later.query()
    memory.close()
