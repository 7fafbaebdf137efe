"""Prefill groups on one host and decode groups on both; the cable between the hosts is cut."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.cluster import Cluster
from tests.faults.test_hosts import Alone, alone

__all__ = ["alone"]

GROUPS = (
    {"role": "prefill", "namespace": 0},
    {"role": "decode", "namespace": 0},
    {"role": "decode", "namespace": 1},
)


@pytest.mark.requirement("E1")
@pytest.mark.grid
def test_caches_survive_faults_of_the_network(cluster: Cluster, alone: Alone) -> None:
    """Sequences of the other host continue here when its engine is killed, stopped or unreachable."""
    server = cluster.groups(*map(dict, GROUPS))
    for deed in ("quiet", "killed", "cable", "quiet"):
        server.ask()
        time.sleep(0.5)
        if deed == "killed":
            os.kill(server.engines[2].one("head"), signal.SIGKILL)
        if deed == "cable":
            cluster.hosts.cable("down")
            time.sleep(12)
            cluster.hosts.cable("up")
        assert server.received() == alone.texts, deed
    server.stop()
