"""The wait mode of CPU threads, by the CPU and by the user's settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft.common import env


@pytest.mark.parametrize(
    ("cpuinfo", "turns"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\n", 300),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n", 1000),
        ("processor\t: 0\nCPU implementer\t: 0x41\n", 1000),
        (None, 1000),
    ],
)
def test_a_spin_is_as_long_on_every_cpu(tmp_path: Path, cpuinfo: str | None, turns: int) -> None:
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert env.spin_turns(tmp_path / "cpuinfo") == turns


@pytest.mark.parametrize(
    ("given", "set_to"),
    [
        ({}, str(env.spin_turns(Path("/proc/cpuinfo")))),
        ({"GOMP_SPINCOUNT": "7"}, "7"),
        ({"OMP_WAIT_POLICY": "passive"}, None),
    ],
)
def test_the_user_decides_first(
    given: dict[str, str], set_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    env.spin_briefly()
    assert os.environ.get("GOMP_SPINCOUNT") == set_to
