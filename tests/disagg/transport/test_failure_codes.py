"""Error codes of failed transfers: only a failed transport has the code ``transport_failed``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests.disagg.transport.rig import Pair
from weft.common.errors import TransportFailed, Unavailable
from weft.disagg.protocol.pushes import Write
from weft.disagg.transport.device_memory import DeviceMemory, DeviceWork
from weft.types.transfer import Outcome, TransferKey

KEY = TransferKey(7, 0, 1)


@pytest.fixture(params=["shm", "tcp", "set over shm", "stand-in"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    one = Pair(request.param, tmp_path)
    yield one
    one.close()


def failure(pair: Pair) -> str:
    """Return the error code of the failed transfer at the sender."""
    report = pair.senders[0].wait(KEY)
    assert report.outcome is Outcome.failed
    assert report.error is not None
    return report.error.code


def test_a_write_of_a_stopped_transfer_does_not_blame_the_transport(pair: Pair) -> None:
    """The receiver's client may leave while the sender still writes."""
    pair.expect(KEY)
    pair.receivers[0].transfer.stop(KEY)
    pair.receivers[0].wait_stopped(KEY)
    pair.begin(KEY)
    pair.compute(KEY)
    assert failure(pair) == Unavailable.code


def test_a_closed_receiver_blames_the_transport(pair: Pair) -> None:
    pair.receivers[0].transfer.close()
    pair.begin(KEY)
    pair.compute(KEY)
    assert failure(pair) == TransportFailed.code


def test_digests_that_a_device_cannot_compute_blame_the_transport() -> None:
    class NoMemory:
        def sums(self, *_: object) -> None:
            raise torch.OutOfMemoryError

    memory = DeviceMemory([], cast("DeviceWork", cast("Any", NoMemory())))
    memory.put(Write(KEY, "", 0, (), np.empty(0, np.uint64)))
    (written,) = memory.failed()
    assert written.error is not None
    assert written.error.code == TransportFailed.code


def test_blocks_are_in_use_until_a_take_that_timed_out_has_ended() -> None:
    class Event:
        over = False

        def query(self) -> bool:
            return self.over

    event, work = Event(), DeviceWork.__new__(DeviceWork)
    work._last = cast("Any", event)
    memory = DeviceMemory([], work)
    assert not memory.quiet(KEY)
    event.over = True
    assert memory.quiet(KEY)
