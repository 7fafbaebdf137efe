"""The systemd unit: accepted by systemd, without root, and with time for the drain."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from weft.common import signals
from weft.config.flags import SETTINGS
from weft.config.sections.front_section import FrontSection

UNIT = Path(__file__).parents[2] / "deploy/systemd/weft.service"
TEXT = UNIT.read_text(encoding="utf-8")
FIELDS: dict[str, list[str]] = {}
for _line in TEXT.splitlines():
    if (_found := re.fullmatch(r"(\w+)=(.*)", _line)) is not None:
        FIELDS.setdefault(_found[1], []).append(_found[2])


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "weft.service"
    unit.write_text(TEXT.replace("/opt/weft/venv/bin/weft", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    # systemd-analyze also warns about other units of the host.
    mine = [line for line in done.stderr.splitlines() if "weft" in line]
    assert (done.returncode, mine) == (0, [])


def test_each_line_is_a_field() -> None:
    for line in TEXT.splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"\[\w+\]|\w+=.*", line), line
    assert re.findall(r"^\[(\w+)\]$", TEXT, re.M) == ["Unit", "Service", "Install"]


def test_the_service_is_not_root_and_hardened() -> None:
    assert FIELDS["User"] == FIELDS["Group"] == ["weft"]
    assert FIELDS["CapabilityBoundingSet"] == [""]
    for name in ("NoNewPrivileges", "PrivateTmp", "ProtectHome", "RestrictSUIDSGID", "ProtectKernelModules"):
        assert FIELDS[name] == ["yes"]
    assert FIELDS["ProtectSystem"] == ["strict"]
    (families,) = FIELDS["RestrictAddressFamilies"]
    assert {"AF_INET", "AF_INET6", "AF_UNIX"} <= set(families.split())
    assert "MemoryDenyWriteExecute" not in FIELDS  # torch compiles kernels in memory


def test_the_stop_fits_the_drain() -> None:
    assert FIELDS["KillSignal"] == ["SIGTERM"]
    assert signal.SIGTERM in signals.STOPS
    assert FIELDS["KillMode"] == ["mixed"]  # the main process ends the others
    (seconds,) = FIELDS["TimeoutStopSec"]
    assert int(seconds) >= FrontSection().drain_timeout + 15
    assert "--drain-timeout" not in FIELDS["ExecStart"][0]


def test_the_commands_exist() -> None:
    (start,) = FIELDS["ExecStart"]
    program, command, flag, file = start.split()
    assert (Path(program).name, command, flag) == ("weft", "serve", "--config")
    assert file.startswith("/etc/weft/")
    assert "model" in SETTINGS, "the file of --config can name the model"
    (reload,) = FIELDS["ExecReload"]
    assert signals.RESTART == signal.SIGUSR1
    assert "-USR1" in reload
    assert FIELDS["RestartPreventExitStatus"] == ["2"]
