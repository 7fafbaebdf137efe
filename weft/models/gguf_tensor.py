"""A weight of a GGUF file as torch sees it: read, dequantized, put in its published form, part by part."""

from __future__ import annotations

import numpy as np
import torch

from weft.gguf.container import PLAIN, StoredTensor, dequantized
from weft.gguf.names import MXFP4_BYTES, Form, Published

Tensor = torch.Tensor
Place = tuple[slice, ...]


class GGUFTensor:
    """The weight; indexing reads the part."""

    def __init__(self, weight: Published) -> None:
        self._weight = weight
        self.shape = weight.shape
        self.floating = weight.form not in (Form.BLOCKS, Form.SCALES)
        """Whether it is numbers, not codes of 8 bits."""

    def __getitem__(self, place: Place) -> Tensor:
        """``place`` of the weight: float32 where it is quantized, otherwise in its own type; codes as uint8.

        No more rows are read than these where they are stored as they are published.
        """
        weight = self._weight
        stored = weight.parts[0]
        match weight.form:
            case Form.STORED:
                return _rows(stored, place)
            case Form.EXPERT:
                return _rows(stored, place, weight.number)
            case Form.HALVES:
                # From pairs of neighbours: [heads, pair, half] -> [heads, half, pair].
                pairs = _rows(stored).unflatten(0, (weight.number, -1, 2))
                return pairs.transpose(1, 2).flatten(0, 2)[place]
            case Form.LATENT:
                keys, values = map(_rows, weight.parts)
                return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)[place]
            case Form.IN_TURN:
                both = torch.stack([_rows(part) for part in weight.parts], dim=2).flatten(1, 2)
                return (both.transpose(1, 2) if both.dim() == 3 else both)[place]
            case Form.TRANSPOSED:
                return _rows(stored).transpose(1, 2)[place]
            case Form.BLOCKS | Form.SCALES:
                return self._codes()[place]
        raise AssertionError("unreachable")

    def _codes(self) -> Tensor:
        """A block is a scale and 16 bytes, of which byte i has the numbers i and 16 + i; published are the
        numbers 2 i and 2 i + 1.
        """
        size = 1 + MXFP4_BYTES
        parts = [part.data.reshape(*part.data.shape[:-1], -1, size) for part in self._weight.parts]
        experts, _, width, _ = parts[0].shape
        blocks = np.stack(parts, axis=2).reshape(experts, -1, width, size)
        if self._weight.form is Form.SCALES:
            return torch.from_numpy(blocks[..., 0].copy())
        codes = blocks[..., 1:]
        numbers = np.concatenate((codes & 15, codes >> 4), axis=-1)
        return torch.from_numpy(numbers[..., ::2] | (numbers[..., 1::2] << 4))


def _rows(stored: StoredTensor, place: Place = (), number: int | None = None) -> Tensor:
    """``place`` of a stored tensor, or of a matrix of it."""
    data = stored.data if number is None else stored.data[number]
    data = data[place[:1]] if place else data
    if stored.kind == "BF16":
        found = torch.from_numpy(data.copy()).view(torch.bfloat16)
    elif stored.kind in PLAIN:
        found = torch.from_numpy(data.copy())
    else:
        found = torch.from_numpy(dequantized(stored.kind, data))
    return found[(slice(None), *place[1:])] if len(place) > 1 else found
