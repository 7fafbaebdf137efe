"""Gated short convolution with torch operations, on any device and in any dtype.

Computes in float32 (float64 in a float64 model) and rounds once. All operations are elementwise, with one
chain of additions over the taps, so output bits do not depend on the batch or on chunks. The stored products
B * x have the model's dtype, in prefill as well as in decode. Segments with rows of equal counts need no host
column, so such a segment can be captured in a CUDA graph.
"""

from __future__ import annotations

import torch

from weft.attention.conv.conv_backend import ConvBackend, ConvInput, ConvWeights
from weft.attention.recurrent import ByRowGroups, Convolution, Inputs, convolve

Tensor = torch.Tensor


class TorchConv(ByRowGroups, ConvBackend):
    """Reference backend of the gated short convolution. Stateless, so threads may share an instance."""

    invariant = True

    def run(self, bcx: Tensor, out: Tensor, conv: ConvInput) -> None:
        """See ``ConvBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        recurrence = _ConvRecurrence(conv.state, conv.weights)
        recurrence.advance((bcx,), out, conv.segment, conv.prepared, each=conv.each)


class _ConvRecurrence(Convolution):
    """The convolution of one layer."""

    def __init__(self, state: tuple[Tensor, ...], weights: ConvWeights) -> None:
        super().__init__(state)
        self._weights = weights

    def tokens(self, inputs: tuple[Tensor, ...], rows: Inputs, real: Tensor | None) -> Tensor:
        weights = self._weights
        exact = weights.taps.dtype
        gate, gate_out, x = (part.to(exact) for part in inputs[0].chunk(3, dim=2))
        # Rounded as in the state, so that a token sees the same products in its own chunk and from the cache.
        product = (gate * x).to(rows.past.dtype).to(exact)
        made, past = convolve(product, rows.past.to(exact), weights.taps, real)
        rows.past = past.to(rows.past.dtype)
        return gate_out * (made if weights.bias is None else made + weights.bias)
