"""Every kernel compiles to machine code for a Hopper GPU, wherever Triton is installed: no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.slowness import deadline

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.skipif(platform.system() != "Linux", reason="needs the ptxas of Triton's Linux wheels")
def test_kernels_compile_for_hopper(pytestconfig: pytest.Config) -> None:
    """In a process of its own: this one's kernels are the interpreter's.

    What was compiled is kept beside pytest's cache: Triton knows it by the source of all that is in it.
    """
    cache = pytestconfig.cache
    assert cache is not None
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache.mkdir("triton-hopper")),
        "PYTHONPATH": str(ROOT),
    }
    made = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("compile_kernels.py"))],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline(280),
    )
    assert made.returncode == 0, made.stderr[-4000:]
    names = {line.split()[0] for line in made.stdout.splitlines()}
    attention = {"_attend", "_attend_latent", "_merge"}
    layers = {"_add_rms_norm", "_qkv_rope_cache", "_gated_silu", "_linear", "_grouped", "_combine"}
    assert names == attention | layers
