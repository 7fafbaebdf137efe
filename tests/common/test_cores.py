"""Usable cores: quotas of cgroups, of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.common import cores
from weft.common.cores import cpu_quota, usable_cores


def files(root: Path, **found: str) -> Path:
    for name, text in found.items():
        file = root / name.replace("__", "/").replace("DOT", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def membership(folder: Path, *lines: str) -> Path:
    file = folder / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def test_version_2_takes_the_least_of_a_group_and_those_above(tmp_path: Path) -> None:
    mount = files(tmp_path / "m", a__b__cpuDOTmax="max 100000\n", a__cpuDOTmax="350000 100000\n")
    files(mount, other__cpuDOTmax="100000 100000\n")
    assert cpu_quota(membership(tmp_path, "0::/a/b"), mount) == 3.5
    assert cpu_quota(membership(tmp_path, "0::/"), mount) is None
    files(mount, a__b__cpuDOTmax="50000 100000\n")
    assert cpu_quota(membership(tmp_path, "0::/a/b"), mount) == 0.5


def test_version_1_and_a_container_that_sees_its_group_as_the_root(tmp_path: Path) -> None:
    mount = tmp_path / "m"
    files(mount / "cpu,cpuacct", cpuDOTcfs_quota_us="200000\n", cpuDOTcfs_period_us="100000\n")
    lines = ("5:memory:/docker/1", "4:cpu,cpuacct:/docker/1", "3:cpuset:/docker/1")
    assert cpu_quota(membership(tmp_path, *lines), mount) == 2.0
    files(mount / "cpu,cpuacct", cpuDOTcfs_quota_us="-1\n")
    assert cpu_quota(membership(tmp_path, *lines), mount) is None


def test_no_quota_where_nothing_can_be_read(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path / "none", tmp_path) is None
    mount = files(tmp_path / "m", cpuDOTmax="strange\n")
    assert cpu_quota(membership(tmp_path, "0::/"), mount) is None


def test_cores_are_those_of_affinity_and_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cores, "_MEMBERSHIP", membership(tmp_path, "0::/"))
    monkeypatch.setattr(cores, "_MOUNT", tmp_path / "m")
    assert usable_cores() == 8
    for quota, wanted in (("250000", 3), ("1600000", 8), ("10000", 1)):
        files(tmp_path / "m", cpuDOTmax=f"{quota} 100000\n")
        assert usable_cores() == wanted
