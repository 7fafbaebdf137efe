"""Hosts for tests that need several."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
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


@pytest.fixture
def cluster(hosts: Hosts, tmp_path: Path) -> Cluster:
    return Cluster(hosts, tmp_path)
