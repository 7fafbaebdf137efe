"""Hosts for the tests that need several."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from tests.faults.netns import Hosts


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    try:
        made.up()
    except (OSError, subprocess.CalledProcessError) as error:
        made.down()
        pytest.skip(f"this machine makes no network namespaces: {error}")
    yield made
    made.down()
