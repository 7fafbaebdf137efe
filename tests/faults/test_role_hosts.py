"""Prefill groups on one host and decode groups on both; the cable between the hosts is cut."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.faults.cluster import Cluster
from tests.faults.netns import children_of
from tests.faults.test_hosts import Alone, alone
from tests.support.processes import with_role

__all__ = ["alone"]

PREFILL, HERE, THERE = (
    {"role": "prefill", "only-host": 0},
    {"role": "decode", "only-host": 0},
    {"role": "decode", "only-host": 1},
)


@pytest.mark.requirement("E1")
@pytest.mark.grid
def test_caches_cross_the_network_and_what_befalls_it(cluster: Cluster, alone: Alone) -> None:
    """Sequences of the other host continue here when its engine is killed, stopped or unreachable."""
    server = cluster.up(json.dumps([PREFILL, HERE, THERE]))
    for deed in ("quiet", "killed", "cable", "quiet"):
        server.ask()
        time.sleep(0.5)
        if deed == "killed":
            host = server.others[0]
            engines = with_role(host.pid, "head") or [
                engine for part in children_of(host) for engine in with_role(part, "head")
            ]
            os.kill(engines[0], signal.SIGKILL)
        if deed == "cable":
            cluster.hosts.cable("down")
            time.sleep(12)
            cluster.hosts.cable("up")
        assert server.told() == alone.texts, deed
    server.stop()
