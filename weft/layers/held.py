"""Codes that the loader leaves on a parameter, in place of plain weights, until its layer packs them.

Such a parameter may wait on the host for a layer that computes elsewhere: what its layer takes is there.

A parameter is filled by several published tensors (q, k and v by rows of one), each quantized or plain.
What is held as codes is not written to the memory of the parameter itself, which takes none before that.
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
    """Of its matrix, the first that it fills."""
    codes: Codes


@dataclass(slots=True)
class Held:
    """What waits on one parameter, and what became of it."""

    device: torch.device
    """Where its layer computes."""
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    """By matrix."""
    coded: int = 0
    """Bytes of codes that its layer could not take."""
    widened: int = 0
    """Bytes that those are dequantized."""


def allow_codes(parameter: nn.Parameter, device: torch.device | None = None) -> nn.Parameter:
    """Lets the loader hold codes for ``parameter``, [N, K] or [E, N, K]: its layer calls ``take_codes``.

    device: where the layer computes, if the parameter is not there.
    """
    parameter.held = Held(device or parameter.device)  # type: ignore[attr-defined]
    return parameter


def in_place(parameter: nn.Parameter) -> nn.Parameter:
    """``parameter``, or what takes its place where its layer computes: its values, nothing noted."""
    held = held_on(parameter)
    if held is None or held.device.type == parameter.device.type:
        return parameter
    return nn.Parameter(parameter.data.to(held.device), requires_grad=False)


def largest_in_place(parameter: nn.Parameter) -> torch.Tensor | None:
    """``shard.largest_of``, where the layer computes."""
    held = held_on(parameter)
    largest = largest_of(parameter)
    return largest if held is None or largest is None else largest.to(held.device)


def held_on(parameter: nn.Parameter) -> Held | None:
    """None where its layer takes no codes."""
    held: Held | None = getattr(parameter, "held", None)
    return held


def holds_codes(parameter: nn.Parameter) -> bool:
    """Whether codes wait on it: then its own memory does not have all of it."""
    held = held_on(parameter)
    return held is not None and bool(held.pieces)


def hold_codes(parameter: nn.Parameter, matrix: int, row: int, codes: Codes) -> None:
    """``codes`` are rows ``row`` and on of the local ``parameter[matrix]`` (of a matrix: 0).

    They replace codes that begin at that row: a checkpoint's weights those that were made up before.
    """
    held = held_on(parameter)
    assert held is not None
    pieces = held.pieces.setdefault(matrix, [])
    pieces[:] = [piece for piece in pieces if piece.row != row]
    pieces.append(_Piece(row, codes))


def take_codes(parameter: nn.Parameter, allowed: bool = True) -> Codes | None:
    """All of ``parameter`` as codes, where its layer computes; or None: then its own memory has all of it.

    allowed: whether codes are wanted. Those of a part are dequantized, as are parts of different kinds.
    """
    found = take_mixed(parameter, allowed, mixes=False)
    assert not isinstance(found, MixedCodes)
    return found


def take_mixed(parameter: nn.Parameter, allowed: bool, *, mixes: bool) -> Codes | MixedCodes | None:
    """Likewise; with ``mixes`` the rows of a matrix may be of different kinds."""
    held = held_on(parameter)
    codes = _taken(parameter, allowed, mixes)
    if isinstance(codes, Unstacked):
        codes = codes.whole()
    return None if codes is None or held is None else codes.to(held.device)


def take_apart(parameter: nn.Parameter) -> Unstacked | None:
    """Likewise of a stack, [E, N, K], on the host: its matrices are still apart."""
    found = _taken(parameter, allowed=True, mixes=False)
    assert found is None or isinstance(found, Unstacked)
    return found


def _taken(parameter: nn.Parameter, allowed: bool, mixes: bool) -> Codes | MixedCodes | Unstacked | None:
    """What it returns has the only references to codes that waited: they go as they are used."""
    waiting = held_on(parameter)
    if waiting is None or not waiting.pieces:
        return None
    held = waiting.pieces
    rows = parameter.shape[-2]
    count = parameter.shape[0] if parameter.dim() == 3 else 1
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
    """Whether they are ``rows`` rows, each once."""
    end = 0
    for piece in sorted(pieces, key=_row):
        if piece.row != end:
            return False
        end += len(piece.codes)
    return end == rows


@torch.no_grad()
def _write(parameter: nn.Parameter, held: Held) -> None:
    for matrix, pieces in held.pieces.items():
        target = parameter.data[matrix] if parameter.dim() == 3 else parameter.data
        for row, codes in pieces:
            rows = target[row : row + len(codes)]
            rows.copy_(dequantize(codes, torch_ops.wide(target.dtype)))
            held.coded += codes.nbytes
            held.widened += rows.nbytes
    held.pieces.clear()
