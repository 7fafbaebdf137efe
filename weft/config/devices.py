"""What the machine has, found without torch: a usable GPU and free memory. All in bytes."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from weft.common import env

_DRIVER = "libcuda.so.1"
#: Tests and other platforms put another root here.
_ROOT = Path("/")


def gpu_memory() -> int | None:
    """Total memory of the first GPU that this process may use; None where there is none."""
    driver = _driver()
    device = ctypes.c_int()
    total = ctypes.c_size_t()
    if driver is None:
        return None
    try:
        failed = driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceTotalMem_v2(
            ctypes.byref(total), device
        )
    except AttributeError:
        return None
    return None if failed else total.value


def gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: numbers or UUIDs."""
    driver = _driver()
    count = ctypes.c_int()
    if driver is None:
        return ()
    try:
        if driver.cuDeviceGetCount(ctypes.byref(count)):
            return ()
    except AttributeError:
        return ()
    named = [name.strip() for name in env.get("CUDA_VISIBLE_DEVICES").split(",") if name.strip()]
    # The driver takes the names up to the first one that is none.
    return tuple((named or [str(number) for number in range(count.value)])[: count.value])


def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, which heeds CUDA_VISIBLE_DEVICES; None where torch could not use it, or it fails."""
    if torch_is_cpu_only():
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)
        return None if driver.cuInit(0) else driver
    except (OSError, AttributeError):
        return None


def has_triton() -> bool:
    """Whether kernels for GPUs can be compiled."""
    return importlib.util.find_spec("triton") is not None


def torch_is_cpu_only() -> bool:
    """Whether the installed torch is a CPU build, by its version (``2.13.0+cpu``); False without torch."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def available_memory() -> int | None:
    """Memory that new allocations can take without swapping, cgroup limits included; None where unknown."""
    known = [found for found in (_system_available(), _cgroup_available()) if found is not None]
    return min(known) if known else None


def _system_available() -> int | None:
    try:
        for line in (_ROOT / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (OSError, ValueError):
        return None


def _cgroup_available() -> int | None:
    """What the memory limit of this container leaves; None where there is no limit."""
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((_ROOT / limit).read_text())
            now = int((_ROOT / used).read_text())
        except (OSError, ValueError):
            continue
        return max(most - now, 0) if most < 1 << 60 else None
    return None
