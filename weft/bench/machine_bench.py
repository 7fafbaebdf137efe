"""``weft bench machine``: what this machine can do, and what Weft's matrix products reach of it."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from weft.common.cores import usable_cores
from weft.ops import cpu
from weft.ops.cpu import linear

_SYSTEM = Path("/sys")
INPUTS = 4096
ROWS = (1, 64)
"""Rows of x: one decoding sequence, which reads memory, and a part of a prompt, which computes."""

#: Format -> function that packs bfloat16 weights.
FORMATS: dict[str, Callable[[torch.Tensor], Any]] = {
    "f32": lambda weight: linear.pack(weight.float()),
    "bf16": linear.pack,
    "w8a8": linear.pack_w8a8,
    "int4": linear.pack_int4,
    "w4a8": linear.pack_w4a8,
}


def facts(system: Path = _SYSTEM) -> dict[str, Any]:
    """Return the facts of the machine from the files of ``system``: cores, NUMA nodes, pages.

    ``core_kinds`` has one entry for each kind: cores of performance and of efficiency are two kinds.
    """
    nodes = sorted((system / "devices/system/node").glob("node[0-9]*"))
    kinds = {
        name: text
        for name in ("cpu_core", "cpu_atom", "cpu")
        if (text := _read(system / "devices" / name / "cpus"))
    }
    return {
        "cores": usable_cores(),
        "cores_online": os.cpu_count() or 1,
        "numa_nodes": {node.name: _read(node / "cpulist") for node in nodes},
        "core_kinds": kinds,
        "huge_pages": _chosen(_read(system / "kernel/mm/transparent_hugepage/enabled")),
    }


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """Return the word in brackets of a setting such as ``always [madvise] never``; "" without one."""
    return text.partition("[")[2].partition("]")[0]


def _least(call: Callable[[], object], turns: int) -> float:
    """Return the shortest time of ``turns`` calls, in seconds, after one call to warm up."""
    call()
    best = float("inf")
    for _ in range(turns):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


def limits(turns: int, megabytes: int = 256) -> dict[str, float]:
    """Return the machine's limits: GB/s of reading and copying memory, GFLOP/s of torch in float32."""
    big = torch.ones(megabytes << 18)
    other = torch.empty_like(big)
    square = torch.randn(1024, 1024)
    return {
        "read_gb_s": big.nbytes / _least(big.sum, turns) / 1e9,
        "copy_gb_s": 2 * big.nbytes / _least(lambda: other.copy_(big), turns) / 1e9,
        "f32_gflop_s": 2 * 1024**3 / _least(lambda: square @ square, turns) / 1e9,
    }


def measure(turns: int = 7, outputs: int = 16384, megabytes: int = 256) -> dict[str, Any]:
    """Return the report: facts, limits, and the products of each format.

    Each product is x [rows, 4096] times one matrix [outputs, 4096]. Without the C++ operations ``products``
    is empty. A product reads packed weights at ``weight_gb_s`` and computes at ``gflop_s``.
    """
    products = []
    if cpu.load():
        for name, pack in FORMATS.items():
            packed = pack((torch.randn(outputs, INPUTS) * 0.02).bfloat16())
            for rows in ROWS:
                x = torch.randn(rows, INPUTS).to(torch.float32 if name == "f32" else torch.bfloat16)
                seconds = _least(functools.partial(linear.linear, x, packed), turns)
                operations = 2 * rows * outputs * INPUTS
                products.append(
                    {
                        "format": name,
                        "rows": rows,
                        "seconds": seconds,
                        "weight_gb_s": packed.data.nbytes / seconds / 1e9,
                        "gflop_s": operations / seconds / 1e9,
                    }
                )
    return {
        **facts(),
        "threads": torch.get_num_threads(),
        "limits": limits(turns, megabytes),
        "products": products,
    }


def summary(report: dict[str, Any]) -> list[str]:
    """Return the report as lines for the terminal."""
    bounds = report["limits"]
    kinds = ", ".join(f"{name} {cpus}" for name, cpus in report["core_kinds"].items()) or "one kind"
    lines = [
        f"cores: {report['cores']} usable of {report['cores_online']}, {report['threads']} threads; {kinds}",
        f"NUMA nodes: {max(1, len(report['numa_nodes']))}; huge pages: {report['huge_pages'] or 'none'}",
        f"memory: read {bounds['read_gb_s']:.1f} GB/s, copy {bounds['copy_gb_s']:.1f} GB/s; "
        f"torch float32: {bounds['f32_gflop_s']:.0f} GFLOP/s",
    ]
    if not report["products"]:
        return [*lines, "the C++ operations are not built: weft build-ops"]
    lines.append(f"{'format':8}{'rows':>5}{'ms':>9}{'GB/s':>8}{'of read':>9}{'GFLOP/s':>9}{'of f32':>8}")
    for one in report["products"]:
        lines.append(
            f"{one['format']:8}{one['rows']:5}{one['seconds'] * 1e3:9.2f}{one['weight_gb_s']:8.1f}"
            f"{one['weight_gb_s'] / bounds['read_gb_s']:9.0%}{one['gflop_s']:9.0f}"
            f"{one['gflop_s'] / bounds['f32_gflop_s']:8.0%}"
        )
    return lines
