"""Describe the machine of a measurement, from system files, without torch."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from weft.common.cores import usable_cores

#: CPU flags that decide which kernels an engine picks.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


def cpu(cpuinfo: str) -> dict[str, Any]:
    """Return the CPU model and the relevant flags from the text of /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "model": fields.get("model name", platform.machine()),
        "family": fields.get("cpu family", ""),
        "model_number": fields.get("model", ""),
        "has": [flag for flag in _FLAGS if flag in flags],
        "lacks": [flag for flag in _FLAGS if flag not in flags],
    }


def memory_bytes(meminfo: str) -> int:
    """Return the bytes of memory from the text of /proc/meminfo."""
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def cpuinfo() -> str:
    """Return the text of /proc/cpuinfo; "" without the file."""
    return _read("/proc/cpuinfo")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def system_name() -> str:
    """Return the name of the distribution and the release of the kernel."""
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return (
                f"{line.partition('=')[2].strip().strip(chr(34))}, {platform.system()} {platform.release()}"
            )
    return platform.platform()


def describe() -> dict[str, Any]:
    """Return the machine description for a result file."""
    return {
        "cpu": cpu(cpuinfo()),
        "cores": usable_cores(),
        "memory_bytes": memory_bytes(_read("/proc/meminfo")),
        "system": system_name(),
        "python": platform.python_version(),
        "load_average": list(os.getloadavg()),
    }


def commit(folder: Path) -> str:
    """Return the short commit of the repository, with ``+`` for a modified tree; "" without git."""
    try:
        head = _git(folder, ["rev-parse", "--short", "HEAD"])
        return head + ("+" if _git(folder, ["status", "--porcelain", "--untracked-files=no"]) else "")
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, arguments: Iterable[str]) -> str:
    made = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=20, check=True
    )
    return made.stdout.strip()
