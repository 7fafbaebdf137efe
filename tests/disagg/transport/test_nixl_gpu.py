"""Caches on a GPU that receivers read directly: digests on the device, NIXL with device memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.transport import rig
from tests.disagg.transport.stand_in_engine import TensorEngine
from tests.support.slowness import deadline
from weft.common.env import child_environment
from weft.disagg.protocol import digests
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.transport.copying import digest_spans
from weft.disagg.transport.device_memory import DeviceWork, seeded
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.read_engine import NixlEngine
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
GPU = torch.device("cuda", 0)
KINDS = ("full", "window", "latent, fp8", "compressed", "state")
KEY = TransferKey(7, 0, 1)
MOST = 1 << 20
ROOT = Path(__file__).parents[3]
WITH_NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(rig.WITHOUT_NIXL, reason="needs NIXL: pip install weft[nixl]")
)


def landing(nbytes: int) -> torch.Tensor:
    made = torch.empty(nbytes, dtype=torch.uint8, device=GPU)
    TensorEngine.tensors[made.data_ptr()] = made
    return made


class Pair(rig.Pair):
    """A pair with both caches on the GPU and no host memory between, each rank with a thread."""

    def __init__(self, kind: str, sides: tuple[bool, bool] = (True, True)) -> None:
        """``sides``: whether the sender and the receiver are in this process."""
        super().__init__(kind, Path(), kinds=KINDS, senders=False, receivers=False)
        self.caches: dict[str, list[torch.Tensor]] = {}
        made = (
            ("sender", self.sender, self.senders, 1000),
            ("receiver", self.receiver, self.receivers, 1050),
        )
        for (name, group, found, number), here in zip(made, sides, strict=True):
            if not here:
                continue
            engine: Any = NixlEngine if kind == "nixl" else TensorEngine
            one = NixlTransport("127.0.0.1", 0, number, rig.SECRET, engine=engine, landing=landing)
            self.caches[name] = [torch.from_numpy(region).to(GPU) for region in group.regions[0]]
            TensorEngine.tensors |= {region.data_ptr(): region for region in self.caches[name]}
            one.place(self.caches[name], DeviceWork(GPU, MOST))
            found.append(rig.Rank(group, 0, one))
        torch.cuda.synchronize()

    def same(self, expected: list[list[np.ndarray]]) -> bool:
        torch.cuda.synchronize()
        pairs = zip(expected[0], self.caches["receiver"], strict=True)
        return all(np.array_equal(want, have.cpu().numpy()) for want, have in pairs)


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    TensorEngine.tensors.clear()


@pytest.mark.requirement("E30")
def test_digests_on_the_device_are_those_of_the_host() -> None:
    """The sum belongs to the bytes after the mark, and a copy has the sums of the copied bytes."""
    work = DeviceWork(GPU, MOST)
    rng = np.random.default_rng(3)
    host = torch.from_numpy(rng.integers(0, 256, MOST, dtype=np.uint8))
    region = torch.zeros(MOST, dtype=torch.uint8, device=GPU)
    spans = np.array([(0, 8192, 4096), (8192, 64, 1000), (4096, 0, 8), (65536, 16384, 65536)], np.int64)
    part = SpanPart(0, 2, spans)
    wait: Any = torch.cuda._sleep
    wait(200_000_000)
    region.copy_(host)
    under_way = work.sums([region], (part,), work.mark())
    while not work.ended(under_way.event):
        pass
    seeds = digests.span_seeds(11, 2, spans[:, 1], spans[:, 2])
    expected = digest_spans(host, spans[:, ::2], seeds)
    assert np.array_equal(seeded(under_way.values(), (part,), 11), expected)
    other = torch.zeros(MOST, dtype=torch.uint8, device=GPU)
    assert np.array_equal(work.take(region, other, spans), under_way.values())
    for begin, to, size in spans.tolist():
        assert torch.equal(other[to : to + size].cpu(), host[begin : begin + size])
    work.close()


@pytest.mark.parametrize("kind", ["stand-in", WITH_NIXL])
def test_a_sequence_arrives_without_host_memory(kind: str) -> None:
    one = Pair(kind)
    offered: Any = one.senders[0].transport
    assert offered._engine.registered if kind != "nixl" else offered._offer
    expected = one.expected()
    assert not one.same(expected)
    assert one.transfer(KEY)[0].outcome is Outcome.done
    assert one.same(expected)
    assert one.senders[0].wait(KEY).outcome is Outcome.done
    one.close()


@pytest.mark.parametrize("kind", ["stand-in", WITH_NIXL])
def test_sent_bytes_are_those_written_before_the_event(kind: str) -> None:
    one = Pair(kind)
    one.expect(KEY)
    one.begin(KEY)
    wait: Any = torch.cuda._sleep
    wait(500_000_000)
    for region in one.caches["sender"]:
        region.bitwise_xor_(0x5A)
    for region in one.sender.regions[0]:
        region ^= 0x5A
    expected = one.expected()
    one.compute(KEY)
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert one.same(expected)
    one.close()


def test_changed_bytes_are_noticed() -> None:
    """A block of the sender changes after the digest."""

    class Spoils(TensorEngine):
        def copy(self, to: Any, source: Any) -> None:
            TensorEngine.copy(self, to, source)  # the method of another class is bound to this engine
            to[:1] ^= 1

    one = Pair("stand-in")
    receiver: Any = one.receivers[0].transport
    receiver._engine.copy = Spoils.copy.__get__(receiver._engine, TensorEngine)
    said = one.transfer(KEY)[0]
    assert said.outcome is Outcome.failed
    assert said.error is not None
    assert said.error.code == "transfer_corrupt"
    one.close()


@pytest.mark.skipif(rig.WITHOUT_NIXL, reason="needs NIXL: pip install weft[nixl]")
def test_another_process_reads_the_caches_of_a_gpu() -> None:
    """The sender is a process of its own, as in a server: UCX may use the IPC of CUDA."""
    one = Pair("nixl", (False, True))
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.disagg.transport.test_nixl_gpu"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=child_environment(PYTHONPATH=str(ROOT)),
    )
    expected = one.expected()
    one.expect(KEY)
    out, _ = process.communicate(r.encode(one.bound(KEY)).hex() + "\n", timeout=deadline(120))
    assert out.split()[-1] == "done"
    assert one.receivers[0].wait(KEY).outcome is Outcome.done
    assert one.same(expected)
    one.close()


def main() -> None:
    one = Pair("nixl", (True, False))
    bound = r.decode(bytes.fromhex(sys.stdin.readline()))
    assert isinstance(bound, r.Bound)
    one.push(bound)
    one.compute(bound.key)
    print(one.senders[0].wait(bound.key, 60.0).outcome.name, flush=True)
    one.close()


if __name__ == "__main__":
    main()
