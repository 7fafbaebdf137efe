"""Work runs in order, errors come with the results, and hung work blocks no caller."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.runner.device_queue import DeviceQueue, result_of


@pytest.mark.requirement("A15")
@pytest.mark.parametrize("threaded", [False, True])
def test_work_runs_in_order_and_errors_stay_with_their_work(threaded: bool) -> None:
    queue = DeviceQueue(threaded)
    seen: list[int] = []

    def work(number: int) -> int:
        seen.append(number)
        if number == 1:
            raise ValueError("one")
        return 10 * number

    futures = [queue.submit(work, number) for number in range(4)]
    until = time.monotonic() + deadline(10)
    assert [result_of(futures[i], until) for i in (0, 2, 3)] == [0, 20, 30]
    with pytest.raises(ValueError, match="one"):
        result_of(futures[1], until)
    assert seen == [0, 1, 2, 3]
    queue.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_work_has_the_cpu_threads_of_its_caller(threaded: bool) -> None:
    """Also after the caller has changed the number."""
    before = torch.get_num_threads()
    queue = DeviceQueue(threaded)
    seen = []
    try:
        for threads in (2, 1, 3):
            torch.set_num_threads(threads)
            future = queue.submit(torch.get_num_threads)
            seen.append(result_of(future, time.monotonic() + deadline(10)))
    finally:
        torch.set_num_threads(before)
        queue.close()
    assert seen == [2, 1, 3]


def test_a_hung_step_is_given_up() -> None:
    queue = DeviceQueue(threaded=True)
    release = threading.Event()
    future = queue.submit(release.wait)
    with pytest.raises(EngineDead, match="in time"):
        result_of(future, time.monotonic() + 0.05)
    began = time.monotonic()
    queue.close(timeout=0.05)
    assert time.monotonic() - began < deadline(5)
    release.set()
    assert result_of(future, time.monotonic() + deadline(10)) is True


def test_an_interrupt_of_inline_work_is_raised() -> None:
    queue = DeviceQueue(threaded=False)

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        queue.submit(interrupted)
