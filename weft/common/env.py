"""Every environment variable that Weft reads. Infrastructure only; settings are flags."""

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
    "WEFT_API_KEY": "key(s) that clients of weft serve must send, separated by commas; --api-key wins",
    "WEFT_CHAT_API_KEY": "the key that weft chat sends; --api-key wins",
    "XDG_STATE_HOME": "under which weft chat keeps its history; ~/.local/state by default",
    "XDG_CACHE_HOME": "under which a GGUF file's small files are kept; ~/.cache by default",
    "WEFT_ADMIN_KEY": "key(s) of the routes that control the server, separated by commas; --admin-key wins",
    "WEFT_DIRECTORY": "where weft engine and weft front meet; --directory wins",
    "WEFT_ADVERTISE": "address of this host for other hosts, for weft engine; --advertise wins",
    "KUBERNETES_SERVICE_HOST": "the API server of Kubernetes, set in each pod, for --directory kubernetes:",
    "KUBERNETES_SERVICE_PORT": "its port",
    "WEFT_CORE_DUMPS": "1 leaves core dumps on in child processes",
    "WEFT_OPS_CACHE": "where weft build-ops keeps the C++ operations; ~/.cache/weft/ops by default",
    "WEFT_DISABLE_CPU_OPS": "1 runs torch's operations in place of the C++ ones",
    "WEFT_CPU_LEVEL": "build and load the C++ operations of this level (avx2, avx512, ..): for tests",
    "WEFT_PROBE_SECONDS": "seconds for the probe of a class of transformers; 600 by default",
    "WEFT_PROBE_MEMORY": "memory that this probe may allocate, for example 8GiB; 4GiB by default",
    "WEFT_LINK_DELAY_MS": "every collective of a rank ends so much later: a slow network, for benchmarks",
    "WEFT_STAGED_POOLS": "1 sends caches between groups as if they were on a GPU: for tests and benchmarks",
    "CUDA_VISIBLE_DEVICES": "the GPUs that may be used; of those each rank of a host gets one",
    "ONEDNN_MAX_CPU_ISA": "instructions that torch's products may use; part of the name of caches on disk",
    "MKL_CBWR": "code path of MKL; part of the name of caches on disk",
    "CXX": "the C++ compiler of weft build-ops",
    "OMP_NUM_THREADS": "most CPU threads of an engine, also when more cores become usable",
    "GOMP_SPINCOUNT": "turns that waiting CPU threads spin; by default those of about 20 us",
    "OMP_WAIT_POLICY": "active or passive: how waiting CPU threads wait, in place of the default above",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "URL of a collector that gets request traces, if no flag names one",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "the same, with the path; wins over the variable before",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "other values than http/protobuf ignore the two variables before",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "the same; wins over the variable before",
    "OTEL_TRACES_EXPORTER": "none ignores the variables of the collector",
    "OTEL_SDK_DISABLED": "true ignores the variables of the collector",
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
    """Make waiting OpenMP threads sleep soon, unless the user has set how threads wait. Call before torch is
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
    """Keep UCX from loading its InfiniBand modules on a host without such a network, unless the user has set
    the modules. With the system's verbs libraries but without a device, the process crashes at its end.
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
