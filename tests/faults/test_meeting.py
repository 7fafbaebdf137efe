"""Hosts that do not meet report the reason on both sides; a late host may still join."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.cluster import Cluster
from tests.faults.test_hosts import Alone, alone
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.parallel import remote
from weft.parallel.handshakes import NOTHING, STRANGER

__all__ = ["alone"]

pytestmark = pytest.mark.slow


def until_told(*logs: tuple[Path, str], seconds: float = 60.0) -> None:
    """Wait until each file contains its text."""
    end = time.monotonic() + deadline(seconds)
    while not all(file.exists() and text in file.read_text() for file, text in logs):
        assert time.monotonic() < end, [file.read_text() for file, _ in logs]
        time.sleep(0.1)


def test_a_wrong_secret_a_wrong_port_and_a_late_host(cluster: Cluster, alone: Alone, tmp_path: Path) -> None:
    cluster.flags["data_parallel_size"] = 2
    logs = {name: tmp_path / name for name in ("zero", "stranger", "lost")}
    zero = cluster.serve(0, log=logs["zero"])
    (other := tmp_path / "other").mkdir()
    stranger = cluster.serve(1, log=logs["stranger"], group_secret=str(write_secret(other)))
    lost = cluster.serve(1, log=logs["lost"], rdzv=f"{cluster.hosts.addresses[0]}:5798")
    until_told(
        (
            logs["zero"],
            f"rejected a connection from {cluster.hosts.addresses[1]}: wrong --group-secret",
        ),
        (logs["stranger"], STRANGER),
        (logs["lost"], NOTHING),
    )
    until_told((logs["zero"], "waiting for host 1"), seconds=remote.REMIND_S + 30)
    for process in (stranger, lost):
        process.terminate()
        assert process.wait(deadline(30)) == 0
    server = cluster.ready(zero, [])  # one path is complete
    server.ask()
    assert server.told() == alone.texts
    server.others.append(cluster.serve(1))
    server.until_whole()
    server.ask()
    assert server.told() == alone.texts
    # the message is rate-limited, however often the host retries
    assert logs["zero"].read_text().count("was refused") <= 3
    server.stop()
