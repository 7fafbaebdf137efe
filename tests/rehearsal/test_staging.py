"""Cache transfers between groups on a simulated GPU: received data, waits, and detected bugs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.disagg.transport import rig
from tests.engine.pair_rig import EnginePair, submit, unified
from tests.rehearsal.device import COMPUTE, Races, Rehearsal, current, running
from tests.rehearsal.rig import Answers, rehearsed
from tests.rehearsal.streams import MOVES, names_of
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.disagg.transport import copies, copying, staging_memory
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.engine.disagg import rank_transfers
from weft.types.sampling import TokenParams
from weft.types.transfer import Outcome, TransferKey

Patch = pytest.MonkeyPatch
ONE_SLOT = Sizes(slot=2048, slots=1, inbox=2048)
KINDS = ("full", "latent, fp8", "compressed", "state")
GPU = torch.device("cuda")
GREEDY = TokenParams(temperature=0.0, max_tokens=6)


class Pair(rig.Pair):
    """A pair with both caches on the device, and without threads."""

    def __init__(self, kind: str, folder: Path, made: Rehearsal) -> None:
        super().__init__(kind, folder, kinds=KINDS, senders=False, receivers=False)
        self.caches: dict[str, list[Any]] = {}
        sides = (("sender", self.sender, self.senders), ("receiver", self.receiver, self.receivers))
        for number, (name, group, ranks) in enumerate(sides):
            transport = rig.transport(kind, folder, 0, 1000 + number)
            self.caches[name] = [made.like(torch.from_numpy(region)) for region in group.regions[0]]
            rig.stage(transport, self.caches[name], DeviceWork(GPU, ONE_SLOT.slot), ONE_SLOT)
            ranks.append(rig.Rank(group, 0, transport, start=False))

    def launch(self, name: str, label: str) -> None:
        """Record a pass over the caches."""
        made = current()
        made.use(label, *((self.caches[name], ()) if label == "reads" else ((), self.caches[name])))

    def turns(self, key: TransferKey) -> None:
        """Run both sides until the transfer has ended on both sides."""
        until, ended = time.monotonic() + deadline(20), 0
        while ended < 2:
            assert time.monotonic() < until
            for rank in (*self.senders, *self.receivers):
                rank.transfer.turn(0.001)
                while not rank.told.empty():
                    said: Any = rank.told.get()
                    assert said.error is None
                    ended += said.outcome is Outcome.done
                    if said.outcome is Outcome.done and rank in self.receivers:
                        self.launch("receiver", "reads")

    def close(self) -> None:
        for rank in (*self.senders, *self.receivers):
            rank.transport.close()


@contextmanager
def moved(
    patch: Patch, folder: Path, kind: str, plant: Callable[[Patch], None] | None = None
) -> Iterator[tuple[Rehearsal, Pair]]:
    """Yield a rehearsal after two transfers, one after the other, through one slot."""
    with rehearsed(patch, values=True) as made:
        watch(patch)
        if plant is not None:
            plant(patch)
        pair = Pair(kind, folder, made)
        try:
            with running(made):
                for number in range(2):
                    key = TransferKey(number, 0, 1)
                    expected = pair.expected()
                    pair.expect(key)
                    pair.begin(key)
                    pair.launch("sender", "writes")
                    pair.compute(key)
                    pair.turns(key)
                    if plant is None:
                        pairs = zip(expected[0], pair.receiver.regions[0], strict=True)
                        assert all(np.array_equal(want, have) for want, have in pairs)
                    for region in pair.sender.regions[0]:
                        region += 1
            yield made, pair
        finally:
            pair.close()


def watch(patch: Patch) -> None:
    """Add host accesses to the ring and the inbox to the trace."""
    in_slot, gather = Staged._in_slot, copying.gather_spans

    def sent(self: Staged, *given: Any) -> Any:
        current().host_reads("the peer reads the ring", *self.shown)
        return in_slot(self, *given)

    def gathered(source: Any, target: Any, spans: Any) -> None:
        if not spans[:, 1].min():  # later pieces of the inbox are adjacent: the trace sees the whole inbox
            current().host_writes("taken in", target)
        gather(source, target, spans)

    patch.setattr(Staged, "_in_slot", sent)
    patch.setattr(staging_memory, "gather_spans", gathered)


@mostly_slow("kind", ["shm", "tcp"], ["tcp"])
def test_caches_arrive_and_who_waits_for_whom_is_in_the_table(
    kind: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch
) -> None:
    with moved(monkeypatch, tmp_path_factory.mktemp("t"), kind) as (made, _):
        assert names_of(made.edges) == MOVES
    assert not made.memory.registered, "memory is still pinned"


def no_mark(patch: Patch) -> None:
    """Plant a bug: nothing waits for the pass that writes the caches."""
    patch.setattr(DeviceWork, "mark", lambda self: None)


def sent_early(patch: Patch) -> None:
    """Plant a bug: the write leaves before its bytes, or its digests, are there."""
    patch.setattr(DeviceWork, "ended", lambda self, copy: True)


def landed_early(patch: Patch) -> None:
    patch.setattr(DeviceWork, "settle", lambda self: None)


def not_pinned(patch: Patch) -> None:
    patch.setattr(DeviceWork, "pin", lambda self, staging_memory: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "found"),
    [(no_mark, Races), (sent_early, Races), (landed_early, Races), (not_pinned, AssertionError)],
    ids=lambda value: value.__name__,
)
def test_a_planted_bug_is_found(
    plant: Callable[[Patch], None],
    found: type[AssertionError],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: Patch,
) -> None:
    folder = tmp_path_factory.mktemp("t")
    # A wrong wait in a copy becomes an error of the transfer at the sender, and an exception at the receiver.
    with pytest.raises(found), moved(monkeypatch, folder, "shm", plant) as (made, _):
        made.check()


@pytest.mark.parametrize("name", ["into", "take"])
def test_a_copy_whose_sums_fail_is_waited_for(name: str, monkeypatch: Patch) -> None:
    """The failed transfer gives its blocks back. Until then the copy to the blocks has ended."""

    def fails(*given: Any) -> Any:
        raise RuntimeError("planted")

    with rehearsed(monkeypatch, values=True) as made:
        work = DeviceWork(GPU, 1024)
        inbox, blocks = torch.ones(64, dtype=torch.uint8), made.like(torch.zeros(256, dtype=torch.uint8))
        landing = made.like(torch.ones(64, dtype=torch.uint8))
        work.pin(inbox)
        work._after(work.mark())
        with running(made):
            monkeypatch.setattr(work, "_read_back", fails)
            given = [inbox, blocks, [[128, 64]]] if name == "into" else [landing, blocks, [[0, 128, 64]]]
            with pytest.raises(RuntimeError, match="planted"):
                getattr(work, name)(*given[:2], np.array(given[2]))
            assert not work.settled()
            assert work.settled()
            made.host_writes("the next write", inbox)
            made.use("reads", [blocks], [])
            made.check()
        work.close()


def test_a_rank_is_not_quiet_while_a_late_copy_writes(monkeypatch: Patch) -> None:
    """A wait timed out, and the transfer failed. Its blocks stay pinned until the copy has ended."""
    with rehearsed(monkeypatch, values=True) as made:
        blocks, source = made.like(torch.zeros(256, dtype=torch.uint8)), torch.ones(64, dtype=torch.uint8)
        work = DeviceWork(GPU, 1024)
        work._after(work.mark())
        memory = Staged([blocks], work, Sizes(slot=0, slots=0, inbox=64), sends=False, takes=True)
        key, spans = TransferKey(1, 0, 1), np.array([[0, 128, 64]])
        with running(made):
            assert memory.quiet(key)
            with monkeypatch.context() as patch:
                patch.setattr(copies, "_SETTLE_S", -1.0)
                with pytest.raises(EngineDead, match="in time"):
                    memory.take(source, 0, spans, np.zeros(1, np.uint64))
                patch.setattr(work, "ended", lambda copy: False)
                assert not memory.quiet(key)
            assert memory.quiet(key)
        memory.close()


def config(folder: Path, role: str, device: str) -> EngineConfig:
    made = from_keywords(
        {
            "model": str(folder),
            "role": role,
            "device": device,
            "dtype": "float64",
            "block_size": 16,
            "max_model_len": 96,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "kv_cache_memory": "64M",
            "decode_graphs": False,
        }
    )
    return resolve(made)


def without_threads(patch: Patch) -> list[RankTransfer]:
    """Replace the threads of transfers by explicit iterations. Return the list of transfers."""
    transfers: list[RankTransfer] = []

    def make(*given: Any) -> RankTransfer:
        transfers.append(RankTransfer(*given, start=False))
        return transfers[-1]

    patch.setattr(rank_transfers, "RankTransfer", make)
    return transfers


@pytest.mark.slow  # ``test_device_memory`` runs two engines by default
@pytest.mark.parametrize(
    "family", ["llama", "qwen3_next", pytest.param("deepseek_v3", marks=pytest.mark.grid)]
)
def test_engines_of_two_groups_give_the_tokens_of_one(
    family: str, folder_of: Callable[[str], Path], monkeypatch: Patch
) -> None:
    """Computation, layer reports and receiving are the engines' own.

    The tests above show that a copy waits for the pass that wrote the block. In these pools other blocks are
    written at the same time.
    """
    folder = folder_of(family)
    asked = [submit(n, [3 + (7 * n + 5 * i) % 60 for i in range(5 + 23 * n)], GREEDY) for n in range(4)]
    expected = unified(config(folder, "unified", "cpu"), asked)
    with rehearsed(monkeypatch, values=True) as made:
        transfers = without_threads(monkeypatch)
        pair = EnginePair(config(folder, "prefill", "cuda"), config(folder, "decode", "cuda"))
        Answers(made, monkeypatch, pair.prefill.config.spec.vocab_size)
        with running(made):
            for one in asked:
                pair.submit(one)
            until = time.monotonic() + deadline(60)
            while not pair.idle:
                assert time.monotonic() < until
                pair.turn()
                for transfer in transfers:
                    transfer.turn(0.0)
            assert {number: answer.ids for number, answer in pair.answers.items()} == expected
            pair.check_given_back()
        # The trace sees a pool as one piece of memory, although computed blocks and copied blocks differ.
        pools = {
            made.memory.piece(one, COMPUTE).name for t in transfers for one in t._transport._memory.regions
        }
        made.checker.races[:] = [race for race in made.checker.races if not any(n in race for n in pools)]
        pair.close()
        for transfer in transfers:
            transfer._transport.close()
    assert names_of(made.edges) >= MOVES
