"""Classification of attention masks, by evaluation of the mask functions of transformers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Any]

FULL, BIDIRECTIONAL, OTHER = "full", "bidirectional", "other"
_LEAST, _MOST = 1 << 13, 1 << 24
"""Smallest and largest number of key positions at which a mask function is evaluated."""
_QUERIES = (0, 1, 5, 63, 200, _LEAST // 2 + 37, _LEAST - 1)
"""Query positions. Two neighbours, small and large distances: a window and a chunk differ at one of them."""
_KEPT = ("__getitem__", "to", "contiguous", "expand", "detach")
"""Tensor methods that keep the meaning of a mask."""


class Mask(torch.Tensor):
    """A mask of the probe. ``kind`` says which keys are visible: see ``classify``.

    Slices and casts keep ``kind``. Every other computation makes a mask of kind ``other``.
    """

    kind: str = OTHER

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        if isinstance(made, Mask) and getattr(func, "__name__", "") in _KEPT:
            made.kind = next((one.kind for one in args if isinstance(one, Mask)), OTHER)
        return made


def make_mask(kind: str) -> Mask:
    """Return a mask of ``kind`` with four dims. Transformers passes such a mask on unchanged."""
    made = torch.zeros(1, 1, 1, 1).as_subclass(Mask)
    made.kind = kind
    return made


def classify(function: MaskFunction, positions: int = 0) -> str:
    """Return the kind of a mask function: ``full``, ``window:N``, ``chunk:N``, ``bidirectional``, ``other``.

    window:N: a query at p sees keys p - N + 1 .. p. chunk:N: a query sees the keys of its block of N, up to
    p. The function gets batch, head, query and key numbers, as in transformers. ``positions``: longest
    context of the model. A shorter window is not full attention.
    """
    size = min(max(positions, _LEAST), _MOST)
    keys = torch.arange(size)
    none = torch.tensor(0)
    firsts = list[tuple[int, int]]()
    for query in sorted({*_QUERIES, size // 2 + 37, size - 1}):
        seen = torch.as_tensor(function(none, none, torch.tensor(query), keys)).expand(size)
        if seen[query + 1 :].any():
            return BIDIRECTIONAL
        first = int(seen.int().argmax())
        if not seen[first : query + 1].all():
            return OTHER
        firsts.append((query, first))
    if all(first == 0 for _, first in firsts):
        return FULL
    widths = {query - first + 1 for query, first in firsts if first}
    if len(widths) == 1:
        width = widths.pop()
        # A query with fewer keys before it than the window must see all of them.
        return f"window:{width}" if all(f or q < width for q, f in firsts) else OTHER
    # The first keys are multiples of the length of a chunk.
    common = math.gcd(*(first for _, first in firsts))
    for parts in range(min(common, _LEAST), 0, -1):
        chunk = common // parts
        if common % parts == 0 and all(first == query // chunk * chunk for query, first in firsts):
            return f"chunk:{chunk}"
    return OTHER
