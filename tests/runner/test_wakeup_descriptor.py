"""The descriptor of a wake-up is closed once, also by an owner that is only forgotten."""

from __future__ import annotations

import os

import pytest

from weft.runner.wakeup_descriptor import WakeupDescriptor


@pytest.mark.parametrize("closed", [True, False])
def test_no_descriptor_stays_open(closed: bool) -> None:
    wakeup = WakeupDescriptor()
    number = wakeup.descriptor
    os.fstat(number)
    if closed:
        wakeup.close()
        wakeup.close()
        wakeup.ring()
        wakeup.clear()
    del wakeup
    with pytest.raises(OSError):
        os.fstat(number)
