"""Cache transfers between two simulated GPUs without host memory: received data, waits, and detected bugs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.disagg.transport import rig
from tests.disagg.transport.stand_in_engine import TensorEngine
from tests.engine.pair_rig import EnginePair, submit, unified
from tests.rehearsal.device import Races, Rehearsal, current, running
from tests.rehearsal.rig import Answers, rehearsed
from tests.rehearsal.streams import MOVES, names_of
from tests.rehearsal.test_staging import GREEDY, config, no_mark, sent_early, without_threads
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.config import transfers
from weft.config.resolved import EngineConfig
from weft.disagg.transport import device_memory, nixl_transport, read_writes, transport_registry
from weft.disagg.transport.copies import CudaCopies
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.read_engine import Segment
from weft.types.transfer import Outcome, TransferKey

Patch = pytest.MonkeyPatch
KINDS = ("full", "latent, fp8", "compressed", "state")
GPU = torch.device("cuda")
MOST = 1 << 16


class Engine(TensorEngine):
    """Reads between simulated GPUs. A read happens between its start and the host's look at its end, so the
    trace has the read as an access of the host."""

    def copy(self, to: Any, source: Any) -> None:
        made = current()
        made.host_reads("a read of a peer", source)
        made.host_writes("a read of a peer", to)
        made.values_of(to).copy_(made.values_of(source))


class Machine:
    """Names tensors of the simulated GPU by the addresses of their values."""

    def __init__(self, made: Rehearsal, patch: Patch) -> None:
        self.made = made
        patch.setattr(nixl_transport, "segment_of", self.segment)
        patch.setattr(read_writes, "segment_of", self.segment)
        values = device_memory.Sums.values

        def watched(sums: device_memory.Sums) -> np.ndarray:
            made.host_reads("sums", sums.host)
            return values(sums)

        patch.setattr(device_memory.Sums, "values", watched)

    def segment(self, region: Any) -> Segment:
        address = self.made.values_of(region).data_ptr()
        TensorEngine.tensors.setdefault(address, region)
        return Segment("VRAM", address, region.numel(), 0)

    def memory(self, nbytes: int) -> torch.Tensor:
        return self.made.like(torch.zeros(nbytes, dtype=torch.uint8))


class Pair(rig.Pair):
    """A pair with both caches on the device, and without threads."""

    def __init__(self, made: Rehearsal, machine: Machine, folder: Any) -> None:
        super().__init__("tcp", folder, kinds=KINDS, senders=False, receivers=False)
        self.caches: dict[str, list[Any]] = {}
        sides = (("sender", self.sender, self.senders), ("receiver", self.receiver, self.receivers))
        for number, (name, group, ranks) in enumerate(sides):
            one = NixlTransport(
                "127.0.0.1", 0, 1000 + number, rig.SECRET, engine=Engine, landing=machine.memory
            )
            self.caches[name] = [made.like(torch.from_numpy(region)) for region in group.regions[0]]
            one.place(self.caches[name], DeviceWork(GPU, MOST))
            ranks.append(rig.Rank(group, 0, one, start=False))

    def launch(self, name: str, label: str) -> None:
        """Record a pass over the caches."""
        current().use(label, *((self.caches[name], ()) if label == "reads" else ((), self.caches[name])))

    def turns(self) -> list[Any]:
        """Run both sides until the transfer has ended on both sides. Return the errors."""
        until, ended, errors = time.monotonic() + deadline(20), 0, []
        while ended < 2:
            assert time.monotonic() < until
            for rank in (*self.senders, *self.receivers):
                rank.transfer.turn(0.001)
                while not rank.told.empty():
                    said: Any = rank.told.get()
                    if said.error is not None:
                        errors.append(said.error)
                    ended += said.outcome is not Outcome.pending
                    if said.outcome is Outcome.done and rank in self.receivers:
                        self.launch("receiver", "reads")
        return errors

    def close(self) -> None:
        for rank in (*self.senders, *self.receivers):
            rank.transport.close()


@contextmanager
def moved(
    patch: Patch, folder: Any, plant: Callable[[Patch], None] | None = None
) -> Iterator[tuple[Rehearsal, list[Any]]]:
    """Yield a rehearsal after two transfers, one after the other, and their errors."""
    with rehearsed(patch, values=True) as made:
        if plant is not None:
            plant(patch)
        pair = Pair(made, Machine(made, patch), folder)
        errors = []
        try:
            with running(made):
                for number in range(2):
                    key = TransferKey(number, 0, 1)
                    expected = pair.expected()
                    pair.expect(key)
                    pair.begin(key)
                    pair.launch("sender", "writes")
                    pair.compute(key)
                    errors += pair.turns()
                    if plant is None:
                        pairs = zip(expected[0], pair.receiver.regions[0], strict=True)
                        assert all(np.array_equal(want, have) for want, have in pairs)
                    for region in pair.sender.regions[0]:
                        region += 1
            yield made, errors
        finally:
            pair.close()
            TensorEngine.tensors.clear()


@pytest.mark.slow
def test_caches_arrive_and_who_waits_for_whom_is_in_the_table(tmp_path: Any, monkeypatch: Patch) -> None:
    with moved(monkeypatch, tmp_path) as (made, errors):
        assert not errors
        assert names_of(made.edges) == MOVES
        assert not made.memory.registered, "no memory of the host takes part"


def landed_early(patch: Patch) -> None:
    """Plant a bug: the write is answered before its bytes are in the caches."""
    patch.setattr(CudaCopies, "_wait", lambda self, event: None)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [no_mark, sent_early, landed_early], ids=lambda value: value.__name__)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], tmp_path: Any, monkeypatch: Patch) -> None:
    with pytest.raises(Races), moved(monkeypatch, tmp_path, plant) as (made, _):
        made.check()


@pytest.mark.slow
def test_changed_bytes_are_noticed(tmp_path: Any, monkeypatch: Patch) -> None:
    """A block of the sender changes after the digest."""

    def spoilt(self: Engine, to: Any, source: Any) -> None:
        current().values_of(to).copy_(current().values_of(source) ^ 1)

    def plant(patch: Patch) -> None:
        patch.setattr(Engine, "copy", spoilt)

    with moved(monkeypatch, tmp_path, plant) as (_, errors):
        assert {error.code for error in errors} == {"transfer_corrupt"}


@pytest.mark.slow
def test_engines_of_two_groups_give_the_tokens_of_one(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: Patch
) -> None:
    """The engines themselves allocate the caches and open the transport."""
    folder, file = folder_of("llama"), str(write_secret(tmp_path))
    asked = [submit(n, [3 + (7 * n + 5 * i) % 60 for i in range(5 + 23 * n)], GREEDY) for n in range(3)]
    expected = unified(config(folder, "unified", "cpu"), asked)

    def group(role: str) -> EngineConfig:
        made = config(folder, role, "cuda")
        transfer = msgspec.structs.replace(made.transfer, transfer="nixl")
        parallel = msgspec.structs.replace(made.parallel, group_secret=file)
        return msgspec.structs.replace(made, transfer=transfer, parallel=parallel)

    with rehearsed(monkeypatch, values=True) as made:
        Machine(made, monkeypatch)
        monkeypatch.setattr(transfers, "NIXL_MODULES", ("json",))
        monkeypatch.setattr(transport_registry, "NixlTransport", partial(NixlTransport, engine=Engine))
        found = without_threads(monkeypatch)
        pair = EnginePair(group("prefill"), group("decode"))
        Answers(made, monkeypatch, pair.prefill.config.spec.vocab_size)
        try:
            with running(made):
                for one in asked:
                    pair.submit(one)
                until = time.monotonic() + deadline(60)
                while not pair.idle:
                    assert time.monotonic() < until
                    pair.turn()
                    for transfer in found:
                        transfer.turn(0.0)
                assert {number: answer.ids for number, answer in pair.answers.items()} == expected
                pair.check_given_back()
            for transfer in found:
                memory = transfer._transport._memory  # type: ignore[attr-defined]
                assert isinstance(memory, device_memory.DeviceMemory)
        finally:
            pair.close()
            for transfer in found:
                transfer._transport.close()
            TensorEngine.tensors.clear()
        # The trace sees a pool as one piece of memory, although computed blocks and copied blocks differ.
        made.checker.races.clear()
