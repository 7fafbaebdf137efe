"""The finalizer of SplitMix64: a bijection of 64-bit integers in which each bit depends on all bits.

Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators".
"""

from __future__ import annotations

import numpy as np

_U64 = np.uint64
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Return the finalizer of an integer, 0 .. 2^64 - 1."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix_array(values: np.ndarray) -> np.ndarray:
    """Return the finalizer of each element, uint64, with the shape of ``values``."""
    values = (values ^ (values >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> _U64(27))) * _U64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> _U64(31))
    return mixed
