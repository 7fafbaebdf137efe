"""Notes about parameters, and codes that the loader leaves for a layer instead of plain weights.

A layer notes which part of a parameter a rank stores and in which form the layer takes the values. The loader
reads the notes and fills the parameter, or leaves codes in the note until the layer packs the codes.

A parameter may wait on the host for a layer that computes on another device. The functions here
return values on the layer's device, except ``take_apart``.

Several published tensors fill one parameter (for example q, k and v as rows of one matrix), each quantized or
plain. Codes are not written to the parameter's own memory, which stays untouched and therefore occupies no
pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft.layers.shard import Shard
from weft.ops import torch_ops
from weft.ops.coded import Codes, MixedCodes, dequantize, joined, mixed
from weft.ops.stacks import Unstacked, unstacked


class _Piece(NamedTuple):
    row: int
    """First row of the piece in the parameter's matrix."""
    codes: Codes


@dataclass(slots=True)
class PendingCodes:
    """Codes waiting for the layer of one parameter, and statistics."""

    device: torch.device
    """Device of the layer."""
    pieces: dict[int, list[_Piece]] = field(default_factory=dict)
    """Pieces by matrix of a stack; 0 for a single matrix."""
    coded: int = 0
    """Bytes of codes in formats without support by the layer."""
    widened: int = 0
    """Bytes of the same codes after dequantization."""


@dataclass(slots=True)
class Note:
    """Facts about one parameter that a layer and the loader exchange."""

    shard: Shard | None = None
    """Part of the global parameter that this rank stores; None: all."""
    largest: torch.Tensor | None = None
    """[..., 1] wide: the loader writes the largest magnitude of each whole row; None: not wanted. For weights
    with cut rows that are rounded to a scale per row: all ranks use the same scale."""
    rounds: Callable[[torch.Tensor], Codes] | None = None
    """The loader rounds whole rows with this function before cutting the rank's part; None: rows may be
    rounded after the cut. For weights with cut rows that are rounded to scales of groups: all ranks use the
    same groups."""
    held: PendingCodes | None = None
    """Codes for the layer, which must call ``take_codes``; None: the layer accepts no codes."""


class Weight(NamedTuple):
    """A parameter with its note."""

    parameter: nn.Parameter
    note: Note

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global parameter."""
        shape = list(self.parameter.shape)
        shard = self.note.shard
        if shard is not None:
            shape[shard.dim] = shard.size
        return tuple(shape)


class Notes:
    """Notes about the parameters of one model, owned by the ``Build`` and the model.

    A note ends with its parameter: the table does not keep the parameter alive.
    """

    def __init__(self) -> None:
        self._notes = WeakTensorKeyDictionary()

    def weight(self, parameter: nn.Parameter) -> Weight:
        """Return ``parameter`` with its note. The note of a parameter without facts is empty."""
        note = self._notes.get(parameter)
        if note is None:
            note = self._notes[parameter] = Note()
        return Weight(parameter, note)

    def weights(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Weight]:
        """Return named parameters by name, with their notes."""
        return {name: self.weight(parameter) for name, parameter in parameters}


def in_place(weight: Weight) -> nn.Parameter:
    """Return the parameter, or a copy without notes on the layer's device if the parameter is elsewhere."""
    parameter, held = weight.parameter, weight.note.held
    if held is None or held.device.type == parameter.device.type:
        return parameter
    return nn.Parameter(parameter.data.to(held.device), requires_grad=False)


def largest_in_place(weight: Weight) -> torch.Tensor | None:
    """Return ``Note.largest`` on the layer's device; None if not noted."""
    largest, held = weight.note.largest, weight.note.held
    return largest if held is None or largest is None else largest.to(held.device)


def has_pending_codes(weight: Weight) -> bool:
    """Return True if codes wait for the layer. The parameter's own memory is then incomplete."""
    held = weight.note.held
    return held is not None and bool(held.pieces)


def put_codes(weight: Weight, matrix: int, row: int, codes: Codes) -> None:
    """Leave ``codes`` for the layer, as rows from ``row`` on of the local ``parameter[matrix]``.

    ``matrix`` is 0 for a single matrix. Earlier codes with the same first row are replaced: weights of a
    checkpoint replace random weights.
    """
    held = weight.note.held
    assert held is not None
    pieces = held.pieces.setdefault(matrix, [])
    # Only an equal first row replaces: other pieces are other published tensors of the same matrix.
    pieces[:] = [piece for piece in pieces if piece.row != row]
    pieces.append(_Piece(row, codes))


def take_codes(weight: Weight, allowed: bool = True) -> Codes | None:
    """Return all of the parameter as codes on the layer's device, or None if the parameter is complete.

    Codes are dequantized into the memory if ``allowed`` is False, if codes do not cover all rows, or if the
    formats of the rows differ.
    """
    found = take_mixed(weight, allowed, mixes=False)
    assert not isinstance(found, MixedCodes)
    return found


def take_mixed(weight: Weight, allowed: bool, *, mixes: bool) -> Codes | MixedCodes | None:
    """Return like ``take_codes`` (None for a complete parameter); with ``mixes`` the rows of a matrix may
    have different formats.

    The codes leave the note.
    """
    held = weight.note.held
    codes = _taken(weight, allowed, mixes)
    if isinstance(codes, Unstacked):
        codes = codes.whole()
    return None if codes is None or held is None else codes.to(held.device)


def take_apart(weight: Weight) -> Unstacked | None:
    """Return a stack [E, N, K] like ``take_codes``, on the host and with separate matrices."""
    found = _taken(weight, allowed=True, mixes=False)
    assert found is None or isinstance(found, Unstacked)
    return found


def _taken(weight: Weight, allowed: bool, mixes: bool) -> Codes | MixedCodes | Unstacked | None:
    """Take the waiting codes out of the note, or dequantize the codes into the parameter and return None.

    Return None without codes, or after dequantizing the codes into the parameter's memory. The result has the
    only references to the codes, so use releases memory.
    """
    parameter, waiting = weight.parameter, weight.note.held
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
def _write(parameter: nn.Parameter, held: PendingCodes) -> None:
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
