"""Inner loops of the loaded build on x86: sums of products stay in registers.

GCC keeps sums in memory if code after a loop needs many registers. Such a loop takes twice the time, and its
results are right, so only its instructions show the fault.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from weft.ops.cpu import build

OBJDUMP = shutil.which("objdump")
KERNELS = re.compile(r"\b((?:tile|float|widened|byte|nibble|apart_nibble)_sums|sum_bytes)<")
PRODUCT = re.compile(r"\t(?:{vex} )?(vfn?madd\d+ps|vdpbf16ps|vpdpbusds?|vpmaddubsw)\b.*%[yz]mm")
SPILL = re.compile(r"\tv(mov\w+)\s+%[yz]mm\d+,-?(0x[0-9a-f]+)?\(%r[sb]p\)")
JUMP = re.compile(r"\tj\w+\s+([0-9a-f]+) <")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(OBJDUMP is None, reason="objdump is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86; tests/ops/test_neon.py has ARM"),
]


def bodies(library: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the kernels of the library: name, and address and text of each instruction."""
    assert OBJDUMP is not None
    command = [OBJDUMP, "-dwC", "--no-show-raw-insn", library]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for part in text.split("\n\n"):
        name, _, rest = part.partition("\n")
        if KERNELS.search(name):
            yield name, [(int(line.split(":")[0], 16), line) for line in rest.splitlines() if ":\t" in line]


def innermost(lines: list[tuple[int, str]]) -> Iterator[list[str]]:
    """Yield the loops of a function that contain no other loop."""
    places = {address: place for place, (address, _) in enumerate(lines)}
    jumps = ((place, JUMP.search(line)) for place, (_, line) in enumerate(lines))
    ends = [(places.get(int(jump[1], 16), place + 1), place) for place, jump in jumps if jump]
    loops = [(begin, end) for begin, end in ends if begin <= end]
    for begin, end in loops:
        inside = ((b, e) for b, e in loops if (b, e) != (begin, end))
        if not any(begin <= b and e <= end for b, e in inside):
            yield [line for _, line in lines[begin : end + 1]]


def test_sums_stay_in_registers(extension: None) -> None:
    library = build.find()
    assert library is not None
    found = set()
    for name, lines in bodies(str(library)):
        for loop in innermost(lines):
            products = sum(PRODUCT.search(line) is not None for line in loop)
            if products < 4:
                continue
            spills = sum(SPILL.search(line) is not None for line in loop)
            # A tile of all registers may lack some: one sum in seven may be in memory.
            assert spills * 7 <= products, f"{spills} spills, {products} products: {name}\n" + "\n".join(loop)
            found.add(KERNELS.search(name)[1])  # type: ignore[index]
    assert {"apart_nibble_sums", "sum_bytes", "tile_sums"} <= found or {"byte_sums", "float_sums"} <= found, (
        found
    )
