"""Several transports of one rank: wakes between two turns."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.disagg.transport import rig
from tests.support.slowness import deadline
from weft.disagg.transport.transport_set import TransportSet


@pytest.fixture
def both(tmp_path: Path) -> Iterator[TransportSet]:
    made = rig.transport("set over tcp", tmp_path, 0, 5)
    yield made
    made.close()


def test_a_wake_before_the_poll_ends_the_poll(both: TransportSet) -> None:
    """A command may come after the last look at the queue and before the poll."""
    both.wake()
    since = time.monotonic()
    both.poll(deadline(5))
    assert time.monotonic() - since < deadline(1)


def test_a_wake_ends_one_poll_only(both: TransportSet) -> None:
    both.wake()
    both.wake()
    both.poll(deadline(5))
    since = time.monotonic()
    both.poll(0.05)
    assert time.monotonic() - since >= 0.049
