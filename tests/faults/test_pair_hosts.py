"""One prefill group, one decode group on the same host and one on another host: two transports at once."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.faults.cluster import Cluster, Server
from tests.faults.test_hosts import Alone, alone
from tests.faults.test_role_hosts import GROUPS

__all__ = ["alone"]


def sent(server: Server) -> dict[str, float]:
    """Return transport -> number of transfers."""
    counted = server.metrics()
    return {
        name.rpartition(":")[2]: value
        for name, value in counted.items()
        if name.startswith("transfers_sent_total:")
    }


@pytest.mark.requirement("E1")
@pytest.mark.slow
def test_one_group_sends_over_shared_memory_and_over_tcp(cluster: Cluster, alone: Alone) -> None:
    server = cluster.groups(*map(dict, GROUPS))
    server.until_whole(3)
    server.ask()
    assert server.received() == alone.texts
    counted, metrics = sent(server), server.metrics()
    assert set(counted) == {"shm", "tcp"}, counted
    assert counted["shm"] > 0
    assert counted["tcp"] > 0
    assert sum(counted.values()) == len(alone.texts)
    assert metrics["transfers_failed_total:prefill0"] == 0
    server.stop()


@pytest.mark.requirement("E1")
@pytest.mark.grid
def test_groups_that_can_not_meet_answer_all_the_same(cluster: Cluster, alone: Alone) -> None:
    """With shared memory alone, the decode group of the other host gets no caches."""
    server = cluster.groups(*map(dict, GROUPS), transfer="shm")
    server.until_whole(3)
    server.ask()
    assert server.received() == alone.texts
    assert set(sent(server)) == {"shm"}
    server.stop()


@pytest.mark.requirement("E1")
@pytest.mark.grid
def test_a_sender_that_starts_again_chooses_again(cluster: Cluster, alone: Alone) -> None:
    server = cluster.groups(*map(dict, GROUPS))
    server.until_whole(3)
    server.ask()
    assert server.received() == alone.texts
    os.kill(server.engines[0].one("head"), signal.SIGKILL)
    server.ask()
    time.sleep(0.5)
    assert server.received() == alone.texts
    assert set(sent(server)) == {"shm", "tcp"}
    server.stop()
