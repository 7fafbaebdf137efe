"""Kernels for AArch64: the programs of ``neon/``, cross-compiled and run by qemu-user against scalar code.

Run by ``make test-arm``. Needs ``apt-get install g++-aarch64-linux-gnu qemu-user``, and torch's headers.
"""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.ops.cpu import build, prebuilt

COMPILER = shutil.which("aarch64-linux-gnu-g++")
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
PROGRAMS = Path(__file__).parent / "neon"
LEVELS = {level.name: level for level in prebuilt.ARM_LEVELS}
VECTOR = re.compile(r"\t(\w+)\s+v\d+\.")
"""The mnemonic of an instruction whose first operand is a vector register."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="aarch64-linux-gnu-g++ is not installed"),
    pytest.mark.skipif(EMULATOR is None, reason="qemu-aarch64 is not installed"),
]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return ``compiled_to`` with one folder. Each program is compiled once: a compilation takes a minute."""
    return functools.cache(functools.partial(compiled_to, tmp_path_factory.mktemp("neon")))


def compiled_to(folder: Path, name: str, level: str) -> Path:
    """Return a static program for AArch64. Sections that the program does not use, with torch's symbols, are
    dropped by the linker.
    """
    assert COMPILER is not None
    include = build._torch_folder() / "include"
    program = folder / f"{name}-{level}"
    flags = [*build.FLAGS, *LEVELS[level].flags, "-ffunction-sections", "-fdata-sections", "-fno-PIC"]
    headers = ["-isystem", include, "-isystem", include / "torch/csrc/api/include", "-I", build.SOURCES]
    link = ["-static", "-Wl,--gc-sections", "-o", program]
    subprocess.run([COMPILER, *flags, *headers, PROGRAMS / f"{name}.cpp", *link], check=True)
    return program


def loop_of(program: Path, symbol: str) -> list[str]:
    """Return the instructions of the innermost loop with the most instructions of a function."""
    assert COMPILER is not None
    dump = COMPILER.replace("g++", "objdump")
    text = subprocess.run(
        [dump, "-dC", "--no-show-raw-insn", program], check=True, capture_output=True, text=True
    ).stdout
    body = next(part for part in text.split("\n\n") if symbol in part.splitlines()[0])
    lines = [(int(line.split(":")[0], 16), line) for line in body.splitlines()[1:]]
    loops = []
    for at, line in lines:
        jump = re.search(r"\t(?:b\.\w+|cbn?z|tbn?z)\s.*?\b([0-9a-f]+) <", line)
        if jump and int(jump.group(1), 16) < at:
            loops.append([line for place, line in lines if int(jump.group(1), 16) <= place <= at])
    return max(loops, key=len)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["vectors", "tiles", "attention", "draws", "states", "channels"])
def test_kernels_equal_scalar_code(name: str, level: str, compiled: Callable[[str, str], Path]) -> None:
    """Includes that a row's bits do not depend on the other rows of a tile."""
    program = compiled(name, level)
    assert EMULATOR is not None
    ran = subprocess.run(
        [EMULATOR, "-cpu", "max", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"[1-9]\d* checks, 0 failures", ran.stdout)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("level", "symbol", "product"),
    [
        ("neon_dotprod", "neon_sums<weft::(anonymous namespace)::Bf16, 3>", "fmla"),
        ("neon_dotprod", "byte_dots<6, 2>", "sdot"),
        ("neon_dotprod", "nibble_dots<6, 2>", "sdot"),
        ("neon_i8mm", "neon_sums<weft::(anonymous namespace)::Bf16, 3>", "bfdot"),
        ("neon_i8mm", "byte_squares<6, 2>", "usmmla"),
        ("neon_i8mm", "nibble_squares<6, 2>", "smmla"),
    ],
)
def test_inner_loops_have_only_vector_products(
    level: str, symbol: str, product: str, compiled: Callable[[str, str], Path]
) -> None:
    """At least a third of a loop is the product instruction; no scalar product, and no sum goes to memory."""
    loop = loop_of(compiled("tiles", level), symbol)
    vectors = [found.group(1) for line in loop if (found := VECTOR.search(line))]
    assert vectors.count(product) * 3 >= len(loop), "\n".join(loop)
    assert not any(re.search(r"\t(fmadd|fmul\s+s|madd|str\s+q|stp\s+q)", line) for line in loop), "\n".join(
        loop
    )
