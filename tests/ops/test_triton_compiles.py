"""Every kernel compiles to machine code for three generations of GPUs and fits, without a GPU.

Some kernels for Hopper run by default, all of them with ``make test-slow``, other GPUs with ``make
test-grid``. The resources of a program come from the compiled binary.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.slowness import deadline

ROOT = Path(__file__).parents[2]


#: Capability -> bytes of shared memory available to one program.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 1 << 16
"""Registers of a multiprocessor: all threads of one program must fit."""
ATTENTION = {"_attend", "_attend_latent", "_latent_rope_cache", "_merge", "_delta_states", "_delta_outputs"}
LAYERS = {
    "_add_rms_norm",
    "_qkv_rope_cache",
    "_gated_silu",
    "_sigmoid_gate",
    "_linear",
    "_grouped",
    "_combine",
}
MIXERS = {"_mamba_states", "_mamba_outputs", "_mamba1_states", "_short_conv"}
ROUTING = {"_router", "_route", "_cut"}
ADAPTERS = {"_low_rank_inner", "_low_rank_outer"}
PACKED = {"_coded", "_add_parts", "_dequantize", "_grouped_codes"}
FEW = {"_add_rms_norm", "_qkv_rope_cache", "_gated_silu", "_sigmoid_gate", "_attend", "_merge"}
SPARSE = {
    *("_index_scores", "_choose", "_attend_lines", "_head_product"),
    *("_mix_streams", "_add_streams", "_rotate_neighbours", "_write_lines"),
}
DRAWS = {"_tops", "_limit", "_score", "_finish"}
ALL = ATTENTION | MIXERS | LAYERS | ROUTING | ADAPTERS | PACKED | DRAWS | SPARSE | {"_meet"}


COSTS = {
    "int4": (2.8, 4.0, 4.5, 4.8),
    "int4 groups of 64": (3.3, 4.5, 5.3, 6.4),
    "int4 zeros": (4.1, 6.0, 7.0),
    "int8": (3.4, 4.4, 5.0, 5.3),
    "fp8 blocks": (3.5, 4.4, 5.0, 5.5),
    "mxfp8": (3.7, 4.7, 5.3, 5.8),
    "mxfp4": (3.6, 4.5, 5.2, 5.6),
    "nvfp4": (3.9, 4.9, 5.6, 5.9),
}
"""Format -> most instructions of a thread by weight, in the forms of 16, 32, 64 and 128 rows."""
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
needs_ptxas = pytest.mark.skipif(
    platform.system() != "Linux", reason="needs the ptxas of Triton's Linux wheels"
)


def compiled(capability: int, which: str, pytestconfig: pytest.Config) -> list[dict[str, Any]]:
    """Compile kernels in a process of its own, because this process has interpreted kernels.

    Compiled kernels stay beside pytest's cache; Triton keys them by source.
    """
    cache = pytestconfig.cache
    assert cache is not None
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache.mkdir(f"triton-{capability}")),
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).with_name("compile_kernels.py")
    made = subprocess.run(
        [sys.executable, str(script), str(capability), *[which] * bool(which)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert made.returncode == 0, made.stderr[-4000:]
    return [json.loads(line) for line in made.stdout.splitlines()]


@needs_triton
@needs_ptxas
@pytest.mark.slow
def test_instructions_by_weight(pytestconfig: pytest.Config) -> None:
    """Loops of packed products have few instructions, no loads that wait, and no spilled registers."""
    kernels = [kernel for kernel in compiled(90, "words", pytestconfig) if "cost" in kernel]
    for name, limits in COSTS.items():
        made = {kernel["rows"]: kernel for kernel in kernels if kernel["format"] == name}
        assert len(made) == len(limits), name
        for kernel, limit in zip(made.values(), limits, strict=True):
            assert 1 < kernel["cost"] <= limit, kernel
            assert not kernel["loads"], kernel
            assert not kernel["stack"], kernel
            assert kernel["shared"] <= SHARED[90], kernel


@needs_triton
@needs_ptxas
@pytest.mark.parametrize(
    ("capability", "few"),
    [
        pytest.param(90, True, id="hopper, few", marks=pytest.mark.grid),
        pytest.param(80, False, id="ampere", marks=pytest.mark.grid),
        pytest.param(90, False, id="hopper", marks=pytest.mark.slow),
        pytest.param(100, False, id="blackwell", marks=pytest.mark.grid),
    ],
)
def test_kernels_compile_and_fit(capability: int, few: bool, pytestconfig: pytest.Config) -> None:
    kernels = compiled(capability, "few" if few else "", pytestconfig)
    expected = FEW if few else ALL if capability < 89 else ALL | {"_round_rows"}
    assert {kernel["name"] for kernel in kernels} == expected
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, kernel
        assert not kernel["stack"], f"registers are spilled to memory: {kernel}"
        assert kernel.get("ordered", True), f"states may be read before they are stored: {kernel}"
    assert any("ordered" in kernel for kernel in kernels), "no decode merges its splits"
