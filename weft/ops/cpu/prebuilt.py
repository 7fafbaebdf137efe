"""Libraries in the wheel: one for each level of CPUs of an architecture, compiled for one version of torch.

    prebuilt/manifest.json          {"torch": "2.13.0", "sources": "<hash>", "compiler": "g++ ..."}
    prebuilt/<level>/libweft_cpu.so

``weft build-ops --wheel FOLDER`` creates the libraries (`scripts/wheel.sh` for `make wheel`). A library built
on the machine has precedence. With another torch version, or with changed sources, the wheel's libraries are
ignored.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from weft.common import env
from weft.common.errors import ConfigError

FOLDER = Path(__file__).parent / "prebuilt"
MANIFEST = "manifest.json"
LIBRARY = "libweft_cpu.so"
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
_CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Level:
    """CPUs that run the same machine code: compiler flags, and required features in /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]
    machine: str = "x86_64"

    @property
    def runs_here(self) -> bool:
        """True if this machine's CPU executes all instructions of the level."""
        return platform.machine() == self.machine and self.needs <= cpu_features()


_AVX2 = Level(
    "avx2", ("-march=x86-64-v3",), frozenset(["avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"])
)
_AVX2_VNNI = Level("avx2_vnni", (*_AVX2.flags, "-mavxvnni"), _AVX2.needs | frozenset(["avx_vnni"]))
_AVX512 = Level(
    "avx512",
    ("-march=x86-64-v4", "-mprefer-vector-width=512"),
    _AVX2.needs | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]),
)
_AVX512_VNNI = Level(
    "avx512_vnni", (*_AVX512.flags, "-mavx512vnni"), _AVX512.needs | frozenset(["avx512_vnni"])
)
_AVX512_BF16 = Level(
    "avx512_bf16",
    (*_AVX512_VNNI.flags, "-mavx512bf16", "-mavx512vbmi", "-mgfni"),
    _AVX512_VNNI.needs | frozenset(["avx512_bf16", "avx512vbmi", "gfni"]),
)
_AVX512_INTEL = Level(
    "avx512_intel",
    (*_AVX512_BF16.flags, "-DWEFT_NO_BF16_DOTS"),  # csrc/common.h
    _AVX512_BF16.needs | frozenset(["GenuineIntel"]),
)
_AMX = Level(
    "amx",
    (*_AVX512_BF16.flags, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    _AVX512_BF16.needs | frozenset(["amx_tile", "amx_int8", "amx_bf16"]),
)
LEVELS = (_AMX, _AVX512_INTEL, _AVX512_BF16, _AVX512_VNNI, _AVX512, _AVX2_VNNI, _AVX2)
"""All levels of x86-64 for which ``csrc`` has code, the best first."""
EMULATED = (Level("amx_emulated", (*_AMX.flags, "-DWEFT_EMULATED_AMX"), _AVX512_BF16.needs),)
"""Levels for tests alone: AMX in software (csrc/amx_emulated.h). No machine chooses such a level."""
ARM_FLAGS = ("-fno-schedule-insns",)
"""On AArch64 GCC's first scheduling moves loads up until sums no longer fit registers."""
_NEON = Level("neon", ("-march=armv8-a", *ARM_FLAGS), frozenset(["asimd"]), "aarch64")
_DOTPROD = Level(
    "neon_dotprod", ("-march=armv8.2-a+dotprod", *ARM_FLAGS), _NEON.needs | frozenset(["asimddp"]), "aarch64"
)
_I8MM = Level(
    "neon_i8mm",
    ("-march=armv8.2-a+dotprod+i8mm+bf16", *ARM_FLAGS),
    _DOTPROD.needs | frozenset(["i8mm", "bf16"]),
    "aarch64",
)
ARM_LEVELS = (_I8MM, _DOTPROD, _NEON)
"""The same for AArch64."""


def levels_here() -> tuple[Level, ...]:
    """Return the levels of this machine's architecture, the best first; empty for other architectures."""
    return tuple(level for level in (*LEVELS, *ARM_LEVELS) if level.machine == platform.machine())


def cpu_features() -> frozenset[str]:
    """Return vendor and features of this CPU as named in /proc/cpuinfo; empty without such a file."""
    found = frozenset[str]()
    with contextlib.suppress(OSError):
        for line in _CPUINFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "vendor_id":
                found |= {value.strip()}
            elif name.strip() in ("flags", "Features"):  # behind the vendor, once per core
                return found | frozenset(value.split())
    return found


def native_flags() -> tuple[str, ...]:
    """Return the compiler's flags for this CPU beside those that name the CPU."""
    return _AVX512_INTEL.flags[-1:] if _AVX512_INTEL.runs_here and not _AMX.runs_here else ()


def torch_version() -> str:
    """Return the version of the installed torch without its build ("+cpu"). All builds share the CPU code."""
    return importlib.metadata.version("torch").partition("+")[0]


def forced_level() -> Level | None:
    """Return the level named by WEFT_CPU_LEVEL; None if the variable is not set.

    Raises ConfigError for an unknown level, and for a level with instructions that the CPU lacks.
    """
    name = env.get("WEFT_CPU_LEVEL")
    if not name:
        return None
    here = [level for level in EMULATED if level.machine == platform.machine()]
    names = {level.name: level for level in (*levels_here(), *here)}
    if name not in names:
        raise ConfigError(f"WEFT_CPU_LEVEL={name} is not a CPU level: set one of {', '.join(names)}")
    if not names[name].runs_here:
        missing = ", ".join(sorted(names[name].needs - cpu_features()))
        able = ", ".join(level.name for level in names.values() if level.runs_here)
        raise ConfigError(f"WEFT_CPU_LEVEL={name}: this CPU does not have {missing}; set one of {able}")
    return names[name]


def find(sources: str) -> Path | None:
    """Return the wheel's best library for the CPU, or the library of `forced_level`.

    Return None if the wheel has no library for the CPU, the torch version and ``sources`` (from
    `build.sources_digest`). Raises OSError if the folder cannot be read, and ConfigError for a bad
    WEFT_CPU_LEVEL.
    """
    try:
        manifest = json.loads((FOLDER / MANIFEST).read_text())
    except FileNotFoundError:
        return None
    if manifest.get("torch") != torch_version() or manifest.get("sources") != sources:
        return None
    # The levels are sorted, so the first level that runs is the best.
    forced = forced_level()
    for level in levels_here() if forced is None else (forced,):
        library = FOLDER / level.name / LIBRARY
        if level.runs_here and library.exists():
            return library
    return None


def write_manifest(folder: Path, sources: str, compiler: str) -> None:
    """Write the manifest of the libraries in ``folder``. Raises OSError."""
    text = json.dumps({"torch": torch_version(), "sources": sources, "compiler": compiler}, indent=1)
    (folder / MANIFEST).write_text(text + "\n")


def platform_tag(libraries: Iterable[Path]) -> str:
    """Return the wheel's platform tag, with the oldest glibc that can load all ``libraries``.

    For example manylinux_2_34_x86_64; the architecture is this machine's.
    """
    minors = [int(minor) for path in libraries for minor in _GLIBC.findall(path.read_bytes())]
    return f"manylinux_2_{max(minors, default=17)}_{platform.machine()}"
