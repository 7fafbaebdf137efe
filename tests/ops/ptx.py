"""An emulator of the PTX of ``weft.ops.triton.pairs.unpacking_of``, over columns of numpy.

Inline PTX has no interpreter in Triton. The emulator runs the text of the PTX itself, on many words at once.
"""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.uint32]


def run(ptx: str, registers: dict[str, Column]) -> dict[str, Column]:
    """Run ``ptx``. ``registers``: operands by name ("$8"); returns all registers at the end."""
    made = dict(registers)
    for line in ptx.replace("{", "").replace("}", "").replace("\n", "").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        name, rest = line.split(None, 1)
        target, *given = [one.strip() for one in rest.split(",")]
        made[target] = _OPERATIONS[name](*[_value(one, made) for one in given])
    return made


def _value(text: str, registers: dict[str, Column]) -> Column:
    return np.uint32(int(text, 0)) if re.match(r"\d", text) else registers[text]  # type: ignore[return-value]


def _prmt(a: Column, b: Column, selector: Column) -> Column:
    """Bytes of b:a by the four digits of the selector. Digits above 7 (signs) are not used."""
    both = (np.asarray(b, np.uint64) << np.uint64(32)) | np.asarray(a, np.uint64)
    made = np.uint64(0)
    for place in range(4):
        digit = int(selector) >> 4 * place & 15
        assert digit < 8
        made = made | (both >> np.uint64(8 * digit) & np.uint64(255)) << np.uint64(8 * place)
    return np.asarray(made).astype(np.uint32)


def _lop3(a: Column, b: Column, c: Column, table: Column) -> Column:
    """The logical function whose value for (a, b, c) is bit 4 a + 2 b + c of the table."""
    a, b, c = np.broadcast_arrays(a, b, c)
    made = np.zeros(a.shape, np.uint32)
    for case in range(8):
        if int(table) >> case & 1:
            made |= (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    return made


def _halves(a: Column) -> list[NDArray[np.float64]]:
    """The two bfloat16 of a register, lower first."""
    a = np.asarray(a, np.uint32)
    parts = (a << np.uint32(16), a & np.uint32(0xFFFF0000))
    return [np.asarray(part).astype(np.uint32).view(np.float32).astype(np.float64) for part in parts]


def _joined(low: NDArray[np.float64], high: NDArray[np.float64]) -> Column:
    """The register of two numbers that are exact in bfloat16."""
    bits = [np.asarray(one, np.float32).view(np.uint32) for one in (low, high)]
    for one, wide in zip(bits, (low, high), strict=True):
        assert not (one & np.uint32(0xFFFF)).any(), "rounded to bfloat16"
        assert (one.view(np.float32).astype(np.float64) == wide).all(), "rounded to float32"
    return (bits[0] >> np.uint32(16)) | bits[1]


def _sub(a: Column, b: Column) -> Column:
    return _joined(*[x - y for x, y in zip(_halves(a), _halves(b), strict=True)])


def _mul(a: Column, b: Column) -> Column:
    return _joined(*[x * y for x, y in zip(_halves(a), _halves(b), strict=True)])


_OPERATIONS = {
    "mov.b32": lambda a: np.asarray(a, np.uint32),
    "and.b32": lambda a, b: a & b,
    "shl.b32": lambda a, n: np.asarray(a << n, np.uint32),
    "shr.u32": lambda a, n: a >> n,
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "sub.rn.bf16x2": _sub,
    "mul.rn.bf16x2": _mul,
}
