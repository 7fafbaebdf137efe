"""Groups that leave a simulated cluster: detection of planted bugs in the API server's care of sequences that
a leaving group has handed off.
"""

from __future__ import annotations

import pytest

from tests.testing.test_cluster import found_within
from weft.control.fleet.fleet import Fleet

FOUND_BY = {"who_leaves_sets_no_deadline": 42}
"""Bug -> the schedule that detected the bug, which runs first."""


def who_leaves_sets_no_deadline(patch: pytest.MonkeyPatch) -> None:
    """Plant a bug: sequences that a leaving group has handed off have no deadline for their first token. A
    lost group sets the deadline still."""
    forget = Fleet._forget_departed

    def without(self: Fleet) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Fleet, "_await_handed_off", lambda *_: None)
            forget(self)

    patch.setattr(Fleet, "_forget_departed", without)


@pytest.mark.requirement("F48")
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plant = who_leaves_sets_no_deadline
    found_within(plant, "not at an end after 29 s", FOUND_BY[plant.__name__], monkeypatch)
