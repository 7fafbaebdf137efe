"""GPU and free memory of the machine, found without torch. All sizes are in bytes."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
from pathlib import Path

from weft.common import env
from weft.common.errors import ConfigError

_DRIVER = "libcuda.so.1"
FP8_PRODUCTS = (8, 9)
"""Least compute capability of a GPU with FP8 products."""
_CAPABILITY = (75, 76)
"""Numbers of the driver's attributes: major and minor compute capability."""
#: Root of the file system; tests replace the root.
_ROOT = Path("/")


def gpu_memory() -> int | None:
    """Return the total memory of the first usable GPU in bytes, or None without a GPU."""
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


def gpu_capability() -> tuple[int, int] | None:
    """Return the compute capability of the first usable GPU, such as (9, 0); None without a GPU."""
    driver = _driver()
    device = ctypes.c_int()
    found = ctypes.c_int()
    if driver is None:
        return None
    numbers = []
    try:
        failed = driver.cuDeviceGet(ctypes.byref(device), 0)
        for attribute in _CAPABILITY:
            failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(found), attribute, device)
            numbers.append(found.value)
    except AttributeError:
        return None
    return None if failed else (numbers[0], numbers[1])


def gpus() -> tuple[str, ...]:
    """Return the usable GPUs as in CUDA_VISIBLE_DEVICES: numbers or UUIDs. Empty without a driver or GPU."""
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
    # The driver ignores all names after the first invalid name, so ``count`` limits the list.
    return tuple((named or [str(number) for number in range(count.value)])[: count.value])


def _driver() -> ctypes.CDLL | None:
    """Return the CUDA driver, or None if the driver fails or torch is a CPU build.

    The driver respects CUDA_VISIBLE_DEVICES.
    """
    if torch_is_cpu_only():
        return None
    try:
        driver = ctypes.CDLL(_DRIVER)
        return None if driver.cuInit(0) else driver
    except (OSError, AttributeError):
        return None


def has_triton() -> bool:
    """Return True if GPU kernels can be compiled."""
    return importlib.util.find_spec("triton") is not None


def check_products(quantization: str, device: str, dtype: str) -> None:
    """Raise ConfigError if ``device`` has no products of ``--quantization w8a8-fp8`` in ``dtype``."""
    if quantization != "w8a8-fp8":
        return
    have = gpu_capability() if device == "cuda" else None
    if device != "cuda":
        why = f"needs a GPU, and the device is {device}: use --quantization w8a8"
    elif dtype != "bfloat16":
        why = f"computes in bfloat16, and the dtype is {dtype}: use --dtype bfloat16 or --quantization fp8"
    elif not has_triton():
        why = "needs Triton: pip install 'weft[cuda]', or use --quantization fp8"
    elif have is not None and have < FP8_PRODUCTS:
        why = (
            f"needs a GPU with FP8 products (compute capability {FP8_PRODUCTS[0]}.{FP8_PRODUCTS[1]} or "
            f"more), and this GPU has {have[0]}.{have[1]}: use --quantization fp8"
        )
    else:
        return
    raise ConfigError(f"--quantization w8a8-fp8 {why}", param="--quantization")


def torch_is_cpu_only() -> bool:
    """Return True if the installed torch is a CPU build, by version (``2.13.0+cpu``); False without torch."""
    try:
        return importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def available_memory() -> int | None:
    """Return the memory for new allocations without swapping, within cgroup limits; None if unknown."""
    known = [found for found in (_system_available(), _cgroup_available()) if found is not None]
    return min(known) if known else None


def _system_available() -> int | None:
    """Return the available memory of the machine in bytes, or None if unknown.

    Without /proc/meminfo the result is half of the total memory.
    """
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
    """Return the bytes of memory left under the limit of this container; None without a limit."""
    for limit, used in (
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            most = int((_ROOT / limit).read_text())
            now = int((_ROOT / used).read_text())
        except (OSError, ValueError):
            continue
        # A limit near 2^63 means no limit in cgroup version 1; "max" in version 2 fails to parse.
        return max(most - now, 0) if most < 1 << 60 else None
    return None
