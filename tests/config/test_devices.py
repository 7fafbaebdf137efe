"""Facts about the machine, read from file trees that the tests write."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from weft.config import devices


def tree(root: Path, monkeypatch: pytest.MonkeyPatch, **files: str) -> None:
    monkeypatch.setattr(devices, "_ROOT", root)
    names = {
        "meminfo": "proc/meminfo",
        "limit": "sys/fs/cgroup/memory.max",
        "used": "sys/fs/cgroup/memory.current",
        "old_limit": "sys/fs/cgroup/memory/memory.limit_in_bytes",
        "old_used": "sys/fs/cgroup/memory/memory.usage_in_bytes",
    }
    for name, text in files.items():
        path = root / names[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    500 kB\n"


def test_available_memory_is_the_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, monkeypatch, meminfo=MEMINFO)
    assert devices.available_memory() == 500 * 1024


@pytest.mark.parametrize("prefix", ["", "old_"])
def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prefix: str) -> None:
    tree(tmp_path, monkeypatch, meminfo=MEMINFO, **{f"{prefix}limit": "300000", f"{prefix}used": "100000"})
    assert devices.available_memory() == 200000


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096)])
def test_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    tree(tmp_path, monkeypatch, meminfo=MEMINFO, limit=limit, used="100000")
    assert devices.available_memory() == 500 * 1024


def test_an_exhausted_limit_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, monkeypatch, meminfo=MEMINFO, limit="5", used="9")
    assert devices.available_memory() == 0


def test_this_machine_has_memory() -> None:
    found = devices.available_memory()
    assert found is not None
    assert found > 1 << 20


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_is_cpu_only", lambda: False)
    monkeypatch.setattr(devices, "_DRIVER", "libthere-is-no-such-driver.so.1")
    assert devices.gpu_memory() is None


def test_a_library_that_is_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "torch_is_cpu_only", lambda: False)
    monkeypatch.setattr(devices, "_DRIVER", "libc.so.6")
    assert devices.gpu_memory() is None


@pytest.mark.parametrize(
    ("version", "cpu_only"), [("2.13.0+cpu", True), ("2.11.0+cu130", False), ("2.13.0", False)]
)
def test_a_cpu_build_of_torch_is_recognised(
    monkeypatch: pytest.MonkeyPatch, version: str, cpu_only: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert devices.torch_is_cpu_only() is cpu_only
