"""Every environment variable that Weft reads. Settings of the server are flags, not variables."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_INFINIBAND = Path("/sys/class/infiniband")

#: name -> meaning. A test fails when Weft reads an unlisted variable.
VARIABLES = {
    "WEFT_LOG_LEVEL": "debug, info, warning or error; the default of --log-level",
    "WEFT_API_KEY": "key(s) that clients must send, separated by commas; --api-key takes precedence",
    "WEFT_CHAT_API_KEY": "the key that weft chat sends; --api-key takes precedence",
    "XDG_STATE_HOME": "parent folder of the history of weft chat; ~/.local/state by default",
    "XDG_CACHE_HOME": "parent folder of Weft's cache; ~/.cache by default",
    "WEFT_ADMIN_KEY": "key(s) of the admin routes, separated by commas; --admin-key takes precedence",
    "WEFT_DIRECTORY": "directory of engines and API servers; --directory takes precedence",
    "WEFT_ADVERTISE": "address of weft engine for other hosts; --advertise takes precedence",
    "KUBERNETES_SERVICE_HOST": "Kubernetes' API server, set in each pod; for --directory kubernetes:",
    "KUBERNETES_SERVICE_PORT": "port of Kubernetes' API server",
    "WEFT_CORE_DUMPS": "1 allows core dumps of child processes",
    "WEFT_OPS_CACHE": "folder of compiled C++ operations; ~/.cache/weft/ops by default",
    "WEFT_DISABLE_CPU_OPS": "1 uses torch's operations instead of the C++ operations",
    "WEFT_CPU_LEVEL": "build and load the C++ operations of this level (avx2, avx512, ..): for tests",
    "WEFT_PROBE_SECONDS": "maximum seconds of the probe of a class of transformers; 600 by default",
    "WEFT_PROBE_MEMORY": "maximum memory of the probe, for example 8GiB; 4GiB by default",
    "WEFT_LINK_DELAY_MS": "delay of every collective, which simulates a slow network: for benchmarks",
    "WEFT_STAGED_POOLS": "1 sends caches between groups as if they were on a GPU: for tests and benchmarks",
    "CUDA_VISIBLE_DEVICES": "the GPUs that may be used; each rank of a host gets one of these GPUs",
    "ONEDNN_MAX_CPU_ISA": "instructions that torch's products may use; part of the name of caches on disk",
    "MKL_CBWR": "code path of MKL; part of the name of caches on disk",
    "CXX": "the C++ compiler of weft build-ops",
    "OMP_NUM_THREADS": "maximum CPU threads of an engine, also when more cores become usable",
    "GOMP_SPINCOUNT": "spin count of waiting CPU threads; the default spins for about 20 us",
    "OMP_WAIT_POLICY": "active or passive: wait policy of CPU threads, instead of GOMP_SPINCOUNT",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "collector of request traces; --otlp-traces-endpoint takes precedence",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "the collector's full URL for traces; takes precedence",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "values except http/protobuf turn both endpoints off",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "the protocol for traces; takes precedence",
    "OTEL_TRACES_EXPORTER": "none turns the endpoints of the environment off",
    "OTEL_SDK_DISABLED": "true turns the endpoints of the environment off",
    "AWS_ENDPOINT_URL": "the object store of --kv-remote s3://..; http: allows requests without TLS",
    "HF_HUB_OFFLINE": "1 forbids the hub client to use the network",
}


def get(name: str, default: str = "") -> str:
    """Return the variable's value. Raises KeyError for a name outside ``VARIABLES``."""
    if name not in VARIABLES:
        raise KeyError(f"{name} is not a declared environment variable")
    return os.environ.get(name, default)


def with_changes(changes: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process with ``changes``, for a child process."""
    return {**os.environ, **changes}


def is_set(name: str) -> bool:
    """Return True if the variable is set, even if empty. Raises KeyError for a name outside ``VARIABLES``."""
    return bool(get(name)) or name in os.environ


def spin_briefly() -> None:
    """Make waiting OpenMP threads sleep soon, unless the user has set a wait policy. Call before torch is
    imported.

    By default the threads spin for milliseconds. With one other busy process on two cores, a decode step took
    350 ms with the default and 16 ms with brief spinning. On an idle machine both took 10 ms (docs/adr/0007).
    """
    if not get("OMP_WAIT_POLICY") and not get("GOMP_SPINCOUNT"):
        os.environ["GOMP_SPINCOUNT"] = str(spin_turns(_CPUINFO))


def spin_turns(cpuinfo: Path) -> int:
    """Return the number of spin turns for about 20 us. One turn is a pause instruction: 140 cycles on Intel
    CPUs, 40 to 65 on AMD CPUs.
    """
    with contextlib.suppress(OSError), cpuinfo.open() as lines:
        for line in lines:
            if line.startswith("vendor_id"):
                return 300 if "GenuineIntel" in line else 1000
    return 1000


def prepare_nccl(one_host: bool) -> None:
    """Set NCCL's environment variables, unless already set by the user. Call before the first communicator.

    torch's watchdog would end a process after a failed or hung collective. In Weft the engine process decides
    about a rank, so the watchdog only logs. On one host NCCL's sockets listen on loopback.
    """
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if one_host:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def prepare_ucx() -> None:
    """Disable UCX's InfiniBand modules on a host without InfiniBand, unless the user has set the modules. The
    modules would crash the process at exit if verbs libraries are installed without a device.
    """
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        os.environ.setdefault("UCX_MODULES", "^ib")


def child_environment(**extra: str | None) -> dict[str, str]:
    """Return the environment of a child process: the current environment with ``extra``. None removes a
    variable.
    """
    return {name: value for name, value in {**os.environ, **extra}.items() if value is not None}


def replace(environment: Mapping[str, str]) -> None:
    """Replace the environment of the process, also for C libraries. Values already read by a library stay."""
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
