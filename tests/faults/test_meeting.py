"""Hosts that do not meet report the reason on both sides; a late host may still join."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.faults.cluster import Cluster
from tests.faults.test_hosts import TENSOR, Alone, alone
from tests.support.secret import write_secret
from tests.support.slowness import deadline
from weft.control.directory import group_hosts
from weft.parallel.handshakes import NOTHING, STRANGER

__all__ = ["alone"]

pytestmark = pytest.mark.slow


def until_told(*logs: tuple[Path, str], seconds: float = 60.0) -> None:
    """Wait until each file contains its text."""
    end = time.monotonic() + deadline(seconds)
    while not all(file.exists() and text in file.read_text() for file, text in logs):
        assert time.monotonic() < end, [file.read_text() for file, _ in logs]
        time.sleep(0.1)


def test_a_wrong_secret_a_wrong_port_other_settings_and_a_late_host(
    cluster: Cluster, alone: Alone, tmp_path: Path
) -> None:
    file = cluster.write({}, hosts=2, **TENSOR)
    other = cluster.write({}, file=tmp_path / "other.yaml", hosts=2, max_num_seqs=5, **TENSOR)
    (folder := tmp_path / "other").mkdir()
    head = cluster.engine("unified0", index=0)
    here: dict[str, Any] = {"namespace": 1, "index": 1}
    stranger = cluster.engine("unified0", "--group-secret", str(write_secret(folder)), **here)
    lost = cluster.engine("unified0", port=5798, **here)
    until_told(
        (head.log, f"rejected a connection from {cluster.hosts.addresses[1]}: wrong --group-secret"),
        (stranger.log, STRANGER),
        (lost.log, NOTHING),
    )
    until_told((head.log, "waiting for host 1"), seconds=group_hosts.REMIND_S + 30)
    differs = cluster.engine("unified0", file=other, **here)
    assert differs.process.wait(deadline(60)) == 2
    assert "differ in scheduler.max_num_seqs (--max-num-seqs)" in differs.log.read_text()
    outside = cluster.engine(
        "unified0",
        namespace=1,
        index=1,
        file=cluster.write({}, file=tmp_path / "three.yaml", hosts=2, tensor_parallel_size=4),
    )
    assert outside.process.wait(deadline(60)) == 2
    assert [process.stop() for process in (stranger, lost)] == [0, 0]
    assert head.restarts == 0
    late = cluster.engine("unified0", file=file, **here)
    server = cluster.front([head, late])
    server.ask()
    assert server.received() == alone.texts
    # the message is rate-limited, however often the host retries
    assert head.log.read_text().count("rejected a connection") <= 3
    server.stop()


def test_a_signal_before_the_hosts_have_met(cluster: Cluster) -> None:
    cluster.write({}, hosts=2, **TENSOR)
    head, host = (
        cluster.engine("unified0", index=0),
        cluster.engine("unified0", namespace=1, index=1, port=5798),
    )
    until_told((host.log, "the head does not answer"))
    assert [one.stop() for one in (head, host)] == [0, 0]
