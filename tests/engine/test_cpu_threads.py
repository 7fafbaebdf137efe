"""CPU threads follow the usable cores of a running engine, and tokens stay the same."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from msgspec.structs import replace

from tests.cli.test_serve import Server, start, until
from tests.faults.rig import config_of
from tests.support.processes import with_role
from tests.support.slowness import deadline
from weft.common.cores import cpu_quota
from weft.engine import cpu_threads
from weft.engine.cpu_threads import LOOK_S, CpuThreads, Default

__all__ = ["start"]

BODY = {
    "model": "spool-text",
    "prompt": "Tom has 12 apples.",
    "temperature": 0,
    "ignore_eos": True,
    "max_tokens": 100,
}


class Host:
    """Cores and time of a test, on which torch takes by default ``torchs`` threads (else all ``cores``)."""

    def __init__(
        self,
        cores: int,
        monkeypatch: pytest.MonkeyPatch,
        *,
        threads: int = 0,
        torchs: int | None = None,
        at_import: int | None = None,
        omp: str = "",
    ) -> None:
        """``threads``: ``--threads``. ``at_import``: cores at the import of torch, if not ``cores``. ``omp``:
        value of OMP_NUM_THREADS."""
        before = at_import or cores
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
        monkeypatch.setattr(cpu_threads, "AT_IMPORT", Default(torchs or before, before))
        monkeypatch.setattr(cpu_threads, "allowed_cores", lambda: self.cores)
        torch.set_num_threads(torchs or before)
        self.cores, self.time = cores, 0.0
        config = config_of()
        config = replace(config, runner=replace(config.runner, threads=threads))
        self.threads = CpuThreads(config, lambda: self.cores, lambda: self.time)
        self.first = torch.get_num_threads()

    def look(self, cores: int, *, idle: bool, after: float = LOOK_S) -> int:
        """Let the host have ``cores`` cores, look after some seconds, and return the threads."""
        self.cores = cores
        self.time += after
        self.threads.look(idle)
        return torch.get_num_threads()


pytestmark = pytest.mark.usefixtures("kept_threads")


def test_threads_follow_a_change_when_no_request_runs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    host = Host(4, monkeypatch)
    assert host.look(1, idle=True) == 1
    assert "changed from 4 to 1: CPU threads 4 -> 1" in caplog.text
    assert host.look(8, idle=True) == 8, "more than at the start"
    assert host.look(2, idle=True, after=LOOK_S / 2) == 8, "not due yet"
    caplog.clear()
    assert host.look(2, idle=False) == 8
    assert host.look(2, idle=False) == 8
    assert caplog.text.count("8 threads stay until no request runs") == 1, "one warning per change"
    assert host.look(2, idle=True, after=0.01) == 2, "the first idle moment"
    caplog.clear()
    assert host.look(2, idle=True) == 2
    assert not caplog.text


def test_threads_of_a_flag_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(4, monkeypatch, threads=3)
    assert host.look(2, idle=True) == 3
    assert "changed from 4 to 2; --threads keeps 3 threads" in caplog.text


@pytest.mark.parametrize("omp", ["4", "4,2"])
def test_threads_follow_up_to_the_number_of_the_variable(omp: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the server started on fewer cores, for which torch chose fewer threads."""
    host = Host(2, monkeypatch, omp=omp)
    assert host.first == 2
    assert host.look(8, idle=True) == 4
    assert host.look(3, idle=True) == 3


def test_a_spare_process_takes_the_cores_that_were_allowed_after_its_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = Host(8, monkeypatch, at_import=1)
    assert host.first == 8
    assert host.look(2, idle=True) == 2


def test_threads_per_core_stay_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """E.g. one thread per physical core, also on more cores than at the start."""
    host = Host(4, monkeypatch, torchs=2)
    assert host.first == 2
    assert host.look(16, idle=True) == 8
    assert host.look(1, idle=True) == 1


def test_a_changed_quota_of_a_cgroup_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    membership, limit = tmp_path / "cgroup", tmp_path / "cpu.max"
    membership.write_text("0::/\n")
    host = Host(8, monkeypatch)
    for text, threads in (("200000 100000", 2), ("max 100000", 8), ("50000 100000", 1)):
        limit.write_text(text)
        quota = cpu_quota(membership, tmp_path)
        assert host.look(8 if quota is None else max(1, int(quota)), idle=True) == threads


@pytest.mark.slow
@pytest.mark.real_processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_server_has_the_same_tokens_on_fewer_and_on_more_cores(start: Any, ranks: int) -> None:
    """The cores of all processes of a running server change, as by a cpuset. With two steps in flight, a
    thread of its own computes."""
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("needs two cores")
    size = ("--tensor-parallel-size", "2", "--steps-in-flight", "2") if ranks == 2 else ()
    server: Server = start("spool-text", "--port", "0", *size, omp_threads=None)
    base = server.url()

    def ask() -> str:
        answer = httpx.post(f"{base}/v1/completions", json=BODY, timeout=deadline(60))
        assert answer.status_code == 200, answer.text
        text: str = answer.json()["choices"][0]["text"]
        return text

    def allow(cores: list[int]) -> None:
        engine = with_role(server.process.pid, "head")[0]
        for process in (engine, *with_role(server.process.pid, "rank")):
            for thread in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(thread.name), cores)

    expected = ask()
    allow(allowed[:1])
    fewer, more = f"changed from {len(allowed)} to 1: CPU", f"changed from 1 to {len(allowed)}: CPU"
    until(server, lambda: server.log.read_text().count(fewer) == ranks)
    assert ask() == expected
    allow(allowed)
    until(server, lambda: server.log.read_text().count(more) == ranks)
    assert ask() == expected
