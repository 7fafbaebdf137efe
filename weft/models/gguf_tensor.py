"""Weight of a GGUF file as torch data: values, dequantized and in published form, read part by part; or
codes.

Codes are the mapped file itself if the file has the row order of the published weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from weft.gguf.container import PLAIN, StoredTensor, dequantized
from weft.gguf.gguf_names import MXFP4_BYTES, Published, TensorForm
from weft.models.quantized.coding import CodedPiece
from weft.ops import ggml
from weft.ops.coded import of_blocks
from weft.ops.mapped import all_mapped

Tensor = torch.Tensor
Place = tuple[slice, ...]


class Maps:
    """Mapped tensors of one file, each mapped once, because experts are parts of one tensor. A mapping lives
    as long as any reference."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}

    def bytes_of(self, stored: StoredTensor) -> Tensor:
        """Return uint8 [.., bytes of a row] of a tensor in blocks: mapped memory, made at the first call.

        Writes do not reach the file.
        """
        if stored.name not in self._found:
            # Private mapping: torch warns about memory that cannot be written.
            mapped: Any = np.memmap(stored.path, np.uint8, "c", stored.offset, stored.dims)
            self._found[stored.name] = torch.from_numpy(mapped)
        return self._found[stored.name]


_ROW_ORDERS = (TensorForm.GROUPED, TensorForm.BY_KEY_HEAD)
"""Forms that only reorder rows, so that blocks of codes can be reordered."""
_HALVES = (TensorForm.GATE, TensorForm.UP)


class GGUFTensor:
    """One weight. Indexing reads a part of the weight."""

    def __init__(self, weight: Published, maps: Maps) -> None:
        self._weight = weight
        self._maps = maps
        self.shape = weight.shape
        self.floating = weight.form not in (TensorForm.BLOCKS, TensorForm.SCALES)
        """True for numbers, False for 8-bit codes."""

    @property
    def quantized(self) -> tuple[str, int] | None:
        """(type, bytes in the file) of a weight that is dequantized when read; None for other weights."""
        parts = self._weight.parts
        if not self.floating or parts[0].kind in PLAIN:
            return None
        form = self._weight.form
        matrices = parts[0].shape[0] if form in (TensorForm.EXPERT, *_HALVES) else 1
        matrices *= 2 if form in _HALVES else 1
        return parts[0].kind, sum(math.prod(part.dims) for part in parts) // matrices

    def codes(self, wanted: Callable[[int], bool]) -> tuple[str, Iterator[CodedPiece]] | None:
        """Return (type, pieces of codes) of the weight; None for a type or form without codes.

        Of a stack, only ``wanted`` matrices are returned. Nothing is read, except rows that must be
        reordered.
        """
        weight = self._weight
        kinds = {part.kind for part in weight.parts}
        if len(kinds) > 1 or (kind := kinds.pop()) not in ggml.BLOCKS:
            return None
        parts = [self._maps.bytes_of(part) for part in weight.parts]
        # [experts, rows, bytes of a row] or [rows, bytes of a row]; rows can be reordered without decoding
        # blocks.
        if weight.form in _ROW_ORDERS and (order := weight.row_order) is not None:
            return kind, iter([CodedPiece((), of_blocks(kind, torch.cat(parts)[torch.from_numpy(order)]))])
        match weight.form:
            case TensorForm.STORED if parts[0].dim() == 2:
                return kind, iter([CodedPiece((), of_blocks(kind, parts[0], mapped=all_mapped(parts[0])))])
            case TensorForm.EXPERT:
                one = of_blocks(kind, parts[0][weight.number], mapped=all_mapped(parts[0]))
                return kind, iter([CodedPiece((), one)])
            case TensorForm.GATE | TensorForm.UP:
                half = parts[0][weight.number][_half(weight)]
                return kind, iter([CodedPiece((), of_blocks(kind, half, mapped=all_mapped(parts[0])))])
            case TensorForm.HALVES if parts[0].dim() == 2:
                pairs = parts[0].unflatten(0, (weight.number, -1, 2))
                return kind, iter([CodedPiece((), of_blocks(kind, pairs.transpose(1, 2).flatten(0, 2)))])
            case TensorForm.IN_TURN | TensorForm.TRANSPOSED if parts[0].dim() == 3:
                return kind, (
                    CodedPiece(
                        (i,),
                        of_blocks(kind, torch.stack([part[i] for part in parts], dim=1).flatten(0, 1)),
                        turned=True,
                    )
                    for i in filter(wanted, range(len(parts[0])))
                )
        return None

    def __getitem__(self, place: Place) -> Tensor:
        """Return ``place`` of the weight: float32 if quantized, else in the stored type; codes as uint8.

        Reads only the rows of ``place`` if rows are stored in published order.
        """
        weight = self._weight
        stored = weight.parts[0]
        match weight.form:
            case TensorForm.STORED:
                return _rows(stored, place)
            case TensorForm.EXPERT:
                return _rows(stored, place, weight.number)
            case TensorForm.GATE | TensorForm.UP:
                return _rows(stored, (), weight.number)[_half(weight)][place]
            case TensorForm.HALVES:
                # From pairs of neighbours: [heads, pair, half] -> [heads, half, pair].
                pairs = _rows(stored).unflatten(0, (weight.number, -1, 2))
                return pairs.transpose(1, 2).flatten(0, 2)[place]
            case TensorForm.LATENT:
                keys, values = map(_rows, weight.parts)
                return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)[place]
            case TensorForm.IN_TURN:
                both = torch.stack([_rows(part) for part in weight.parts], dim=2).flatten(1, 2)
                return (both.transpose(1, 2) if both.dim() == 3 else both)[place]
            case TensorForm.TRANSPOSED:
                return _rows(stored).transpose(1, 2)[place]
            case TensorForm.BLOCKS | TensorForm.SCALES:
                return self._codes()[place]
        return self._of_delta_net()[place]

    def _of_delta_net(self) -> Tensor:
        """Return a weight of a model with delta nets, in published order."""
        weight = self._weight
        values = torch.cat([_rows(part) for part in weight.parts])
        if (order := weight.row_order) is not None:
            values = values[torch.from_numpy(order)]
        match weight.form:
            case TensorForm.CENTRED:
                return values.float() - 1
            case TensorForm.RATES:
                return torch.log(-values.double()).float().flatten()
            case TensorForm.FLAT:
                return values.flatten()
            case TensorForm.TAPS:
                return values.reshape(-1, 1, values.shape[-1])
            case TensorForm.ROW:
                return values.reshape(1, -1)
            case TensorForm.GROUPED_COLUMNS:
                assert weight.heads is not None
                return values[:, torch.from_numpy(weight.heads.grouped(values.shape[1]))]
        assert weight.form in _ROW_ORDERS
        return values

    def _codes(self) -> Tensor:
        """Return the MXFP4 blocks or scales in published order.

        A stored block is a scale and 16 bytes; byte i contains numbers i and 16 + i. Published bytes contain
        numbers 2 i and 2 i + 1.
        """
        size = 1 + MXFP4_BYTES
        parts = [part.data.reshape(*part.data.shape[:-1], -1, size) for part in self._weight.parts]
        experts, _, width, _ = parts[0].shape
        blocks = np.stack(parts, axis=2).reshape(experts, -1, width, size)
        if self._weight.form is TensorForm.SCALES:
            return torch.from_numpy(blocks[..., 0].copy())
        codes = blocks[..., 1:]
        numbers = np.concatenate((codes & 15, codes >> 4), axis=-1)
        return torch.from_numpy(numbers[..., ::2] | (numbers[..., 1::2] << 4))


def _half(weight: Published) -> slice:
    """Return the rows of the gate matrix, or of the up matrix, in the matrix of both."""
    rows = weight.shape[0]
    return slice(0, rows) if weight.form is TensorForm.GATE else slice(rows, 2 * rows)


def _rows(stored: StoredTensor, place: Place = (), number: int | None = None) -> Tensor:
    """Return ``place`` of a stored tensor, or of matrix ``number`` of the tensor, as a copy.

    Quantized blocks become float32.
    """
    data = stored.data if number is None else stored.data[number]
    data = data[place[:1]] if place else data
    if stored.kind == "BF16":
        found = torch.from_numpy(data.copy()).view(torch.bfloat16)
    elif stored.kind in PLAIN:
        found = torch.from_numpy(data.copy())
    else:
        found = torch.from_numpy(dequantized(stored.kind, data))
    return found[(slice(None), *place[1:])] if len(place) > 1 else found
