"""Results on the way to the host: deadlines, and refusal of results with an aborted collective."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.parallel.launcher import CommLost, Launcher
from weft.runner import result
from weft.runner.result import HostCopy, to_result
from weft.runner.sampling.sampler import SampleOutput
from weft.types.plan import Segment, StepPlan


class Event:
    """A device event that is reached when the test releases the event."""

    reached = False

    def query(self) -> bool:
        return self.reached


def copy_of(event: Event) -> HostCopy:
    """Return a copy as on a GPU, which is complete with ``event``."""
    none = torch.zeros(0, dtype=torch.int64)
    made = HostCopy(SampleOutput(tokens=none, error=none.bool(), logprobs=None, prompt_logprobs=None))
    made._cuda, made._event = True, event  # type: ignore[assignment]
    return made


def test_a_copy_behind_an_abort_is_refused() -> None:
    """Kernels that wait for a peer end normally when their communicator is aborted."""
    launcher, event = Launcher(), Event()
    copy = copy_of(event)
    event.reached = True
    copy.wait(time.monotonic() + deadline(30), launcher.check)
    launcher.broken = True
    with pytest.raises(CommLost, match="in the middle of a step"):
        copy.wait(time.monotonic() + deadline(30), launcher.check)


def test_an_abort_releases_a_waiting_read() -> None:
    launcher, event = Launcher(), Event()
    launcher.broken = True
    with pytest.raises(CommLost):
        copy_of(event).wait(time.monotonic() + deadline(30), launcher.check)


def test_a_result_that_does_not_come_is_an_error_at_the_deadline() -> None:
    with pytest.raises(EngineDead, match="in time"):
        copy_of(Event()).wait(time.monotonic() + 0.02, Launcher().check)


@pytest.mark.parametrize("drafts", [False, True])
def test_a_plain_step_has_the_result_of_any_other(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 5
    one = np.ones(rows, np.int32)
    next_k = np.array([0, 2, 1, 0, 2], np.int32) * drafts
    segment = Segment(slot=one, gen=one, start=one, count=one, logits=one, sample=one, next_k=next_k)
    plan = StepPlan(step=7, decode=segment)
    error = torch.tensor([False, True, False, False, True])
    output = SampleOutput(tokens=torch.arange(3, 3 + rows), error=error, logprobs=None, prompt_logprobs=None)
    proposed = torch.arange(6).view(3, 2) if drafts else None
    plain = to_result(plan, HostCopy(output, drafts=proposed))
    monkeypatch.setattr(result, "most_each", lambda plan: 0)
    whole = to_result(plan, HostCopy(output, drafts=proposed))
    assert plain.rows.tolist() == list(range(rows))
    assert [row for row, _ in plain.row_error] == [1, 4]
    assert plain.drafts.tolist() == ([0, 1, 2, 4, 5] if drafts else [])
    assert repr(plain) == repr(whole)  # columns and their types
