"""Codes that the loader puts on a parameter, instead of plain weights, until the layer packs the codes.

A parameter may wait on the host for a layer that computes on another device. The functions here
return values on the layer's device, except ``take_apart``.

Several published tensors fill one parameter (for example q, k and v as rows of one matrix), each quantized or
plain. Codes are not written to the parameter's own memory, which stays untouched and therefore occupies no
pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from weft.layers.shard import largest_of
from weft.ops import torch_ops
from weft.ops.coded import Codes, MixedCodes, dequantize, joined, mixed
from weft.ops.stacks import Unstacked, unstacked


class _Piece(NamedTuple):
    row: int
    """First row of the piece in the parameter's matrix."""
    codes: Codes


@dataclass(slots=True)
class Held:
    """Codes waiting on one parameter, and statistics."""

    device: torch.device
    """Device of the layer."""
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    """Pieces by matrix of a stack; 0 for a single matrix."""
    coded: int = 0
    """Bytes of codes in formats without support by the layer."""
    widened: int = 0
    """Bytes of the same codes after dequantization."""


def allow_codes(parameter: nn.Parameter, device: torch.device | None = None) -> nn.Parameter:
    """Let the loader put codes on ``parameter``, [N, K] or [E, N, K]; return ``parameter``.

    The layer must call ``take_codes`` later. ``device``: the layer's device if different from the
    parameter's.
    """
    parameter.held = Held(device or parameter.device)  # type: ignore[attr-defined]
    return parameter


def in_place(parameter: nn.Parameter) -> nn.Parameter:
    """Return ``parameter``, or a copy without notes on the layer's device if the parameter is elsewhere."""
    held = held_on(parameter)
    if held is None or held.device.type == parameter.device.type:
        return parameter
    return nn.Parameter(parameter.data.to(held.device), requires_grad=False)


def largest_in_place(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return ``shard.largest_of`` on the layer's device; None if not noted."""
    held = held_on(parameter)
    largest = largest_of(parameter)
    return largest if held is None or largest is None else largest.to(held.device)


def held_on(parameter: nn.Parameter) -> Held | None:
    """Return the codes record of ``parameter``; None if the layer accepts no codes."""
    held: Held | None = getattr(parameter, "held", None)
    return held


def holds_codes(parameter: nn.Parameter) -> bool:
    """Return True if codes wait on ``parameter``. The parameter's own memory is then incomplete."""
    held = held_on(parameter)
    return held is not None and bool(held.pieces)


def hold_codes(parameter: nn.Parameter, matrix: int, row: int, codes: Codes) -> None:
    """Put ``codes`` on ``parameter`` as rows from ``row`` on of the local ``parameter[matrix]``.

    ``matrix`` is 0 for a single matrix. Earlier codes with the same first row are replaced: weights of a
    checkpoint replace random weights.
    """
    held = held_on(parameter)
    assert held is not None
    pieces = held.pieces.setdefault(matrix, [])
    # Only an equal first row replaces: other pieces are other published tensors of the same matrix.
    pieces[:] = [piece for piece in pieces if piece.row != row]
    pieces.append(_Piece(row, codes))


def take_codes(parameter: nn.Parameter, allowed: bool = True) -> Codes | None:
    """Return all of ``parameter`` as codes on the layer's device, or None if the parameter is complete.

    Codes are dequantized into the memory if ``allowed`` is False, if codes do not cover all rows, or if the
    formats of the rows differ.
    """
    found = take_mixed(parameter, allowed, mixes=False)
    assert not isinstance(found, MixedCodes)
    return found


def take_mixed(parameter: nn.Parameter, allowed: bool, *, mixes: bool) -> Codes | MixedCodes | None:
    """Return like ``take_codes`` (None for a complete parameter); with ``mixes`` the rows of a matrix may
    have different formats.

    The codes leave the parameter.
    """
    held = held_on(parameter)
    codes = _taken(parameter, allowed, mixes)
    if isinstance(codes, Unstacked):
        codes = codes.whole()
    return None if codes is None or held is None else codes.to(held.device)


def take_apart(parameter: nn.Parameter) -> Unstacked | None:
    """Return a stack [E, N, K] like ``take_codes``, on the host and with separate matrices."""
    found = _taken(parameter, allowed=True, mixes=False)
    assert found is None or isinstance(found, Unstacked)
    return found


def _taken(parameter: nn.Parameter, allowed: bool, mixes: bool) -> Codes | MixedCodes | Unstacked | None:
    """Take the waiting codes off ``parameter`` and return the codes.

    Return None without codes, or after dequantizing the codes into the parameter's memory. The result has the
    only references to the codes, so use releases memory.
    """
    waiting = held_on(parameter)
    if waiting is None or not waiting.pieces:
        return None
    held = waiting.pieces
    rows = parameter.shape[-2]
    count = parameter.shape[0] if parameter.dim() == 3 else 1
    # Without codes for every row there is no layout of codes: the memory must be complete instead.
    if allowed and all(_whole(held.get(matrix, ()), rows) for matrix in range(count)):
        matrices = [[piece.codes for piece in sorted(held[matrix], key=_row)] for matrix in range(count)]
        found: Codes | MixedCodes | Unstacked | None
        if parameter.dim() == 3:
            found = unstacked(matrices)
        else:
            found = joined(matrices[0])
            if found is None and mixes:
                found = mixed(matrices[0])
        if found is not None:
            held.clear()
            return found
    _write(parameter, waiting)
    return None


def _row(piece: _Piece) -> int:
    return piece.row


def _whole(pieces: Sequence[_Piece], rows: int) -> bool:
    """Return True if the pieces cover ``rows`` rows, each exactly once."""
    end = 0
    for piece in sorted(pieces, key=_row):
        if piece.row != end:
            return False
        end += len(piece.codes)
    return end == rows


@torch.no_grad()
def _write(parameter: nn.Parameter, held: Held) -> None:
    """Dequantize all waiting codes into the memory of ``parameter``, drop the codes, and count the bytes in
    ``held``.
    """
    for matrix, pieces in held.pieces.items():
        target = parameter.data[matrix] if parameter.dim() == 3 else parameter.data
        for row, codes in pieces:
            rows = target[row : row + len(codes)]
            rows.copy_(dequantize(codes, torch_ops.wide(target.dtype)))
            held.coded += codes.nbytes
            held.widened += rows.nbytes
    held.pieces.clear()
