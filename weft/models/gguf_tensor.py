"""A weight of a GGUF file as torch sees it: read, and dequantized where it is quantized, part by part."""

from __future__ import annotations

import torch

from weft.gguf.container import PLAIN, dequantized
from weft.gguf.names import Published


class GGUFTensor:
    """The weight; indexing reads the part."""

    def __init__(self, weight: Published) -> None:
        self._weight = weight
        self.shape = weight.shape

    def __getitem__(self, place: tuple[slice, ...]) -> torch.Tensor:
        """``place`` of the weight: float32 where it is quantized, otherwise in its own type. No more rows are
        read than these, unless they are published in another order.
        """
        weight = self._weight
        stored = weight.stored
        data = stored.data if weight.expert is None else stored.data[weight.expert]
        rows = place[:1] if not weight.heads else ()
        data = data[rows] if rows else data
        if stored.kind == "BF16":
            found = torch.from_numpy(data.copy()).view(torch.bfloat16)
        elif stored.kind in PLAIN:
            found = torch.from_numpy(data.copy())
        else:
            found = torch.from_numpy(dequantized(stored.kind, data))
        if weight.heads:
            # From pairs of neighbours to halves: [heads, pair, half] -> [heads, half, pair].
            pairs = found.unflatten(0, (weight.heads, -1, 2))
            return pairs.transpose(1, 2).flatten(0, 2)[place]
        return found[(slice(None), *place[1:])] if place else found
