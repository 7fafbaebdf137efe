"""Staging: columns come back as written, nothing is shared, returned buffers are overwritten on request."""

import numpy as np
import pytest
import torch

from weft.common.errors import EngineDead
from weft.runner.batch.staging import POISON, StagingRing, offsets_of, ragged

CPU = torch.device("cpu")


def test_columns_come_back_in_order() -> None:
    buffer = StagingRing(CPU, 1).acquire()
    columns = [np.arange(5), np.array([], np.int64), np.array([7, -1], np.int32)]
    buffer.begin(7)
    where = [buffer.add(c) for c in columns]
    buffer.upload()
    for column, at in zip(columns, where, strict=True):
        assert buffer.tensor(at).tolist() == column.tolist()


def test_a_buffer_grows_beyond_its_first_capacity() -> None:
    buffer = StagingRing(CPU, 1).acquire()
    buffer.begin(100_000)
    at = buffer.add(np.arange(100_000))
    buffer.upload()
    assert buffer.tensor(at)[-1].item() == 99_999


def test_staging_more_than_reserved_is_an_error() -> None:
    buffer = StagingRing(CPU, 1).acquire()
    buffer._allocate(4)
    buffer.begin(4)
    with pytest.raises(EngineDead, match="more numbers than it reserved"):
        buffer.add(np.arange(5))


@pytest.mark.requirement("A15", "B17")
def test_two_steps_in_flight_share_no_memory() -> None:
    ring = StagingRing(CPU, 2)
    first, second = ring.acquire(), ring.acquire()
    for buffer, value in ((first, 1), (second, 2)):
        buffer.begin(3)
        buffer.add(np.full(3, value))
        buffer.upload()
    assert first.tensor(slice(0, 3)).tolist() == [1, 1, 1]
    assert second.tensor(slice(0, 3)).tolist() == [2, 2, 2]
    with pytest.raises(EngineDead, match="more steps in flight"):
        ring.acquire()


@pytest.mark.requirement("A15", "B17")
def test_a_released_buffer_is_poisoned_when_asked() -> None:
    ring = StagingRing(CPU, 1, poison=True)
    buffer = ring.acquire()
    buffer.begin(2)
    view = buffer.tensor(buffer.add(np.array([3, 4])))
    ring.release(buffer)
    assert view.tolist() == [POISON, POISON]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_released_buffer_is_poisoned_on_the_device_too() -> None:
    ring = StagingRing(torch.device("cuda"), 1, poison=True)
    buffer = ring.acquire()
    buffer.begin(2)
    view = buffer.tensor(buffer.add(np.array([3, 4])))
    buffer.upload()
    ring.release(buffer)
    assert view.tolist() == [POISON, POISON]


def test_ragged_ranges() -> None:
    assert ragged(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ragged(np.array([], np.int32), np.array([], np.int32)).tolist() == []
    assert offsets_of(np.array([2, 0, 3])).tolist() == [0, 2, 2, 5]
