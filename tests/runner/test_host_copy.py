"""Results on their way to the host: a deadline, and none that an aborted collective had a part in."""

from __future__ import annotations

import time

import pytest
import torch

from weft.common.errors import EngineDead
from weft.parallel.launcher import CommLost, Launcher
from weft.runner.result import HostCopy
from weft.runner.sampler import SampleOutput


class Event:
    """A device's, which is reached when it is let go."""

    reached = False

    def query(self) -> bool:
        return self.reached


def copy_of(event: Event) -> HostCopy:
    """As of a GPU: its copies are there with ``event``."""
    none = torch.zeros(0, dtype=torch.int64)
    made = HostCopy(SampleOutput(tokens=none, error=none.bool(), logprobs=None, prompt_logprobs=None))
    made._cuda, made._event = True, event  # type: ignore[assignment]
    return made


def test_what_an_abort_let_through_is_refused() -> None:
    """Kernels that wait for a peer end when their communicator is aborted, like any others."""
    launcher, event = Launcher(), Event()
    copy = copy_of(event)
    event.reached = True
    copy.wait(time.monotonic() + 30, launcher.check)
    launcher.broken = True
    with pytest.raises(CommLost, match="in the middle of a step"):
        copy.wait(time.monotonic() + 30, launcher.check)


def test_an_abort_frees_who_waits_for_a_result() -> None:
    launcher, event = Launcher(), Event()
    launcher.broken = True
    with pytest.raises(CommLost):
        copy_of(event).wait(time.monotonic() + 30, launcher.check)


def test_a_result_that_does_not_come_is_an_error_at_the_deadline() -> None:
    with pytest.raises(EngineDead, match="in time"):
        copy_of(Event()).wait(time.monotonic() + 0.02, Launcher().check)
