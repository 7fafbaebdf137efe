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

import pytest

from tests.support.slowness import deadline

ROOT = Path(__file__).parents[2]


#: Capability -> bytes of shared memory available to one program.
SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
REGISTERS = 1 << 16
"""Registers of a multiprocessor: all threads of one program must fit."""
ATTENTION = {"_attend", "_attend_latent", "_merge"}
LAYERS = {"_add_rms_norm", "_qkv_rope_cache", "_gated_silu", "_linear", "_grouped", "_combine"}
ADAPTERS = {"_low_rank_inner", "_low_rank_outer"}
PACKED = {"_coded", "_add_parts", "_dequantize", "_grouped_codes"}
DRAWS = {"_tops", "_cut", "_score", "_finish"}
ALL = ATTENTION | LAYERS | ADAPTERS | PACKED | DRAWS
FEW = {"_add_rms_norm", "_qkv_rope_cache", "_gated_silu", "_attend", "_merge"}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(platform.system() != "Linux", reason="needs the ptxas of Triton's Linux wheels")
@pytest.mark.parametrize(
    ("capability", "few"),
    [
        pytest.param(90, True, id="hopper, few"),
        pytest.param(80, False, id="ampere", marks=pytest.mark.grid),
        pytest.param(90, False, id="hopper", marks=pytest.mark.slow),
        pytest.param(100, False, id="blackwell", marks=pytest.mark.grid),
    ],
)
def test_kernels_compile_and_fit(capability: int, few: bool, pytestconfig: pytest.Config) -> None:
    """A separate process is needed because this process has interpreted kernels.

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
    made = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("compile_kernels.py")),
            str(capability),
            *["few"] * few,
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert made.returncode == 0, made.stderr[-4000:]
    kernels = [json.loads(line) for line in made.stdout.splitlines()]
    assert {kernel["name"] for kernel in kernels} == (FEW if few else ALL)
    for kernel in kernels:
        assert kernel["shared"] <= SHARED[capability], kernel
        assert kernel["registers"] * 32 * kernel["warps"] <= REGISTERS, kernel
        assert not kernel["stack"], f"registers are spilled to memory: {kernel}"
