"""Codes that the loader leaves on a parameter, in place of plain weights, until its layer packs them.

A parameter is filled by several published tensors (q, k and v by rows of one), each quantized or plain.
What is held as codes is not written to the memory of the parameter itself, which takes none before that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from weft.ops import torch_ops
from weft.ops.coded import Codes, dequantize, joined, stacked


class _Piece(NamedTuple):
    row: int
    """Of its matrix, the first that it fills."""
    codes: Codes


def allow_codes(parameter: nn.Parameter) -> nn.Parameter:
    """Lets the loader hold codes for ``parameter``, [N, K] or [E, N, K]: its layer calls ``take_codes``."""
    parameter.held = {}  # type: ignore[attr-defined]
    return parameter


def allows_codes(parameter: nn.Parameter) -> bool:
    """Whether its layer can take codes."""
    return getattr(parameter, "held", None) is not None


def hold_codes(parameter: nn.Parameter, matrix: int, row: int, codes: Codes) -> None:
    """``codes`` are rows ``row`` and on of the local ``parameter[matrix]`` (of a matrix: 0)."""
    held: dict[int, list[_Piece]] = parameter.held  # type: ignore[attr-defined]
    held.setdefault(matrix, []).append(_Piece(row, codes))


def take_codes(parameter: nn.Parameter, allowed: bool = True) -> Codes | None:
    """All of ``parameter`` as codes, or None: then its own memory has all of it.

    allowed: whether codes are wanted. Those of a part are dequantized, as are parts of different kinds.
    """
    held: dict[int, list[_Piece]] = getattr(parameter, "held", None) or {}
    if not held:
        return None
    shape = parameter.shape[-2:]
    count = parameter.shape[0] if parameter.dim() == 3 else 1
    if allowed and all(_whole(held.get(matrix, ()), shape[0]) for matrix in range(count)):
        made = [joined([piece.codes for piece in sorted(held[matrix], key=_row)]) for matrix in range(count)]
        found = [one for one in made if one is not None]
        if len(found) == count:
            if parameter.dim() == 2:
                held.clear()
                return found[0]
            result = stacked(found)
            if result is not None:
                held.clear()
                return result
    _write(parameter, held)
    return None


def _row(piece: _Piece) -> int:
    return piece.row


def _whole(pieces: Sequence[_Piece], rows: int) -> bool:
    """Whether they are ``rows`` rows, each once."""
    end = 0
    for piece in sorted(pieces, key=_row):
        if piece.row != end:
            return False
        end += len(piece.codes)
    return end == rows


@torch.no_grad()
def _write(parameter: nn.Parameter, held: dict[int, list[_Piece]]) -> None:
    for matrix, pieces in held.items():
        target = parameter.data[matrix] if parameter.dim() == 3 else parameter.data
        for row, codes in pieces:
            values = dequantize(codes, torch_ops.wide(target.dtype))
            target[row : row + len(codes)].copy_(values)
    held.clear()
