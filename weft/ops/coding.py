"""Formats of packed codes, by the numbers of csrc/coded.h."""

from __future__ import annotations

from typing import NamedTuple


class Coding(NamedTuple):
    """Format of packed codes. Fields and numbers are those of ``Coding`` in csrc/coded.h."""

    numbers: int
    """``Numbers`` in csrc/coded.h: format of a code."""
    scales: int
    """``Scales`` in csrc/coded.h: format of a scale."""
    zeros: int
    """``Zeros`` in csrc/coded.h: middle, zero points or minimums."""
    group: int
    """Inputs that share a scale. Even."""
