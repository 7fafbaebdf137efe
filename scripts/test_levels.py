"""Run tests on every lower level of CPUs that this machine executes: ``make test-levels``.

A machine picks the operations of its own level, so without these runs nobody tests the others. For each level
the script builds the C++ operations, runs pytest, and prints a table of results and times. Torch and
oneDNN are held to the same level, because they choose their instructions by themselves.

    python scripts/test_levels.py                 the kernel tests, on every level below this CPU's own
    python scripts/test_levels.py avx2 -- tests   all default tests on one level: what follows -- is pytest's
    python scripts/test_levels.py amx_emulated    the kernel tests with AMX in software
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from weft.ops.cpu import prebuilt

KERNEL_TESTS = ("tests/ops", "tests/attention", "tests/moe", "tests/layers", "tests/models", "tests/e1")
TORCH_LEVELS = {
    "avx2": ("avx2", "AVX2"),
    "avx2_vnni": ("avx2", "AVX2_VNNI"),
    "avx512": ("avx512", "AVX512_CORE"),
    "avx512_vnni": ("avx512", "AVX512_CORE_VNNI"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16"),
    "avx512_intel": ("avx512", "AVX512_CORE_BF16"),
    "amx": ("avx512", "AVX512_CORE_AMX"),
    "amx_emulated": ("avx512", "AVX512_CORE_BF16"),
}
"""Level -> names of its instruction set in ATen and in oneDNN."""


def lower_levels() -> list[str]:
    """Return the levels that this CPU executes, without the best level, which ``make test`` covers.

    ``avx512_bf16`` is only for CPUs of other vendors than Intel if ``avx512_intel`` runs here.
    """
    levels = [level.name for level in prebuilt.LEVELS if level.runs_here]
    return [name for name in levels[1:] if (name, "avx512_intel" in levels) != ("avx512_bf16", True)]


def environment(level: str) -> dict[str, str]:
    """Return this process's environment with Weft, ATen and oneDNN limited to ``level``."""
    aten, onednn = TORCH_LEVELS[level]
    forced = {"WEFT_CPU_LEVEL": level, "ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    return {**os.environ, **forced}


def run(level: str, arguments: Sequence[str]) -> tuple[bool, float]:
    """Build ``level`` and run pytest on it. Return (True if all tests passed, seconds of pytest)."""
    variables = environment(level)
    subprocess.run([sys.executable, "-m", "weft", "build-ops"], env=variables, check=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
    ran = subprocess.run([*command, "-q", *arguments], env=variables, check=False)
    return ran.returncode == 0, time.monotonic() - began


def main(arguments: list[str]) -> int:
    """Return the exit code: 0 if all tests passed on all levels."""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    levels, tests = arguments[:cut] or lower_levels(), arguments[cut + 1 :] or list(KERNEL_TESTS)
    unknown = [level for level in levels if level not in TORCH_LEVELS]
    if unknown:
        print(f"no level of CPUs: {', '.join(unknown)}; there are {', '.join(TORCH_LEVELS)}")
        return 2
    if not levels:
        print("this CPU executes one level at most: there is no lower one to test")
    results = {}
    for level in levels:
        print(f"\n{level}: pytest {' '.join(tests)}", flush=True)
        results[level] = run(level, tests)
    for level, (passed, seconds) in results.items():
        print(f"{level:12} {'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    os.chdir(Path(__file__).parents[1])
    sys.exit(main(sys.argv[1:]))
