"""Mamba 1 with torch operations, on any device and in any dtype.

Computes in float32 (float64 in a float64 model) and rounds once. The state advances token by token. All
operations are elementwise, and the sum over the elements of a state is a fixed tree of additions. So output
bits do not depend on the batch or on chunks. Decays and inputs of a part of the tokens are computed together,
and a token needs two further operations on the states. Rows of equal counts need no host column, so such a
segment can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.attention.mamba1.mamba1_backend import Mamba1Backend, Mamba1Input, Mamba1Weights, Selected
from weft.attention.recurrent import (
    ByRowGroups,
    Convolution,
    Inputs,
    Recurrence,
    convolve,
    silu,
    softplus,
    tree_sum,
)

Tensor = torch.Tensor

MOST_STATES = 1 << 21
"""Maximum elements of the states of all tokens in one part; at least one token of one row.

Bounds the memory: see ``weft.config.sizing.layer_elements.mamba1_elements``.
"""


class TorchMamba1(ByRowGroups, Mamba1Backend):
    """Reference backend of Mamba 1. Stateless, so threads may share an instance."""

    invariant = True

    def convolve(self, x: Tensor, out: Tensor, mamba: Mamba1Input) -> None:
        """See ``Mamba1Backend.convolve``. Does nothing without tokens."""
        convolution = _Convolution(mamba.state[0], mamba.weights)
        convolution.advance((x,), out, mamba.segment, mamba.prepared, each=mamba.each)

    def scan(self, inputs: Selected, out: Tensor, mamba: Mamba1Input) -> None:
        """See ``Mamba1Backend.scan``. Does nothing without tokens."""
        scan = _Scan(mamba.state[1], mamba.weights)
        scan.advance(inputs, out, mamba.segment, mamba.prepared, each=mamba.each)


class _Convolution(Convolution):
    """The convolution of one layer."""

    def __init__(self, state: Tensor, weights: Mamba1Weights) -> None:
        super().__init__((state,))
        self._weights = weights

    def tokens(self, inputs: tuple[Tensor, ...], rows: Inputs, real: Tensor | None) -> Tensor:
        weights = self._weights
        exact = weights.taps.dtype
        made, past = convolve(inputs[0].to(exact), rows.past.to(exact), weights.taps, real)
        rows.past = past.to(rows.past.dtype)
        return silu(made if weights.conv_bias is None else made + weights.conv_bias)


@dataclass(slots=True)
class _States:
    """Recurrent states of a group's rows between passes."""

    state: Tensor
    """[B, heads, state, dim]."""


class _Scan(Recurrence[_States]):
    """The recurrence of one layer."""

    def __init__(self, state: Tensor, weights: Mamba1Weights) -> None:
        self._state = state
        self._weights = weights

    def read(self, slots: Tensor, live: Tensor, fresh: Tensor) -> _States:
        # Indexing makes a copy.
        return _States(self._state[slots, live].masked_fill_(fresh.view(-1, 1, 1, 1), 0.0))

    def write(self, slots: Tensor, copy: int, rows: _States) -> None:
        self._state[:, copy].index_copy_(0, slots, rows.state)

    def tokens(self, inputs: tuple[Tensor, ...], rows: _States, real: Tensor | None) -> Tensor:
        weights = self._weights
        count, n = inputs[0].shape[:2]
        x, steps, b, c, z = (part.to(rows.state.dtype) for part in inputs)
        dt = softplus(steps + weights.step_bias)
        if real is not None:  # padding must leave the state unchanged
            filler = torch.arange(n, device=dt.device) >= real.unsqueeze(1)
            dt = dt.masked_fill(filler.unsqueeze(2), 0.0)
        fed = dt * x
        y = torch.empty_like(x)
        one = rows.state[0].numel()
        together = max(1, MOST_STATES // one)
        for first in range(0, count, together):
            some = slice(first, min(first + together, count))
            span = max(1, MOST_STATES // one // (some.stop - first))
            for begin in range(0, n, span):
                part = (some, slice(begin, begin + span))
                y[part] = self._outputs(dt[part], fed[part], b[part], c[part], rows.state[some])
        return (y + x * weights.skip) * silu(z)

    def _outputs(self, dt: Tensor, fed: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
        """Return S C of n tokens, [B, n, channels]. Advances ``state`` [B, heads, state, dim] in place.

        dt, fed (time step times x): [B, n, channels]; b, c: [B, n, state].
        """
        heads, _, dim = state.shape[1:]
        # [B, n, heads, state, dim]
        decays = (dt.unflatten(2, (heads, 1, dim)) * self._weights.rate).neg_().exp_()
        states = fed.unflatten(2, (heads, 1, dim)) * b[:, :, None, :, None]
        last = state
        for token in range(dt.shape[1]):
            # Not addcmul_, which may fuse product and sum for some elements of a loop only.
            last = states[:, token].add_(decays[:, token].mul_(last))
        state.copy_(last)
        return tree_sum(states.mul_(c[:, :, None, :, None]), 3).flatten(2)
