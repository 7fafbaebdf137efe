"""A failed read whose slot gets no other landing memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.disagg.transport.rig import Pair
from tests.disagg.transport.test_reads import AGAIN, KEY, engine_of, held_back
from weft.disagg.transport import read_writes
from weft.disagg.transport.read_engine import ReadBroken
from weft.types.transfer import Outcome


def test_a_slot_without_new_memory_is_lost_and_the_rank_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> torch.Tensor:
        raise torch.OutOfMemoryError

    one = Pair("stand-in", tmp_path)
    receiver: Any = one.receivers[0]
    reads = receiver.transport._reads
    engine = held_back(one)
    monkeypatch.setattr(reads, "_memory", full)
    engine.broken = ReadBroken("planted", over=False)
    assert one.senders[0].wait(KEY).outcome is Outcome.failed
    assert receiver.wait(KEY).outcome is Outcome.failed
    engine.broken = None
    engine_of(receiver).go.set()
    assert one.transfer(AGAIN)[0].outcome is Outcome.done
    assert receiver.transfer.failure is None
    assert reads.free < read_writes.SLOTS
    one.close()
