"""Mamba2 with torch operations, on any device and in any dtype.

    TorchMamba       rows of few tokens token by token; longer rows in chunks of 64 tokens (Dao and Gu 2024,
                     arXiv 2405.21060, section 6)
    InvariantMamba   every row token by token, every sum by a fixed tree of additions, so output bits do not
                     depend on the batch. Slow: about twenty small operations per token and layer.

Computes in float32 (float64 in a float64 model) and rounds once. Rows of equal counts need no host column, so
such a segment can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.attention.mamba.mamba_backend import MambaBackend, MambaInput, MambaWeights
from weft.attention.recurrent import (
    FEW,
    SPAN,
    ByRowGroups,
    Recurrence,
    convolve,
    in_parts,
    read_inputs,
    silu,
    softplus,
    tree_sum,
    write_inputs,
)

Tensor = torch.Tensor

CHUNK = 64
ROWS = SPAN // CHUNK
"""Maximum rows in one computation, where a row needs copies of its state.

Bounds the memory: see ``weft.config.sizing.layer_elements.mamba_elements``.
"""


@dataclass(slots=True)
class _MambaRows:
    """State of a group's rows between passes."""

    past: Tensor
    """[B, taps - 1, channels]: last inputs of the convolution."""
    state: Tensor
    """[B, heads, dim, state]."""


@dataclass(frozen=True, slots=True)
class _MambaTokens:
    """Inputs of the recurrence for n tokens."""

    x: Tensor
    """[B, heads, n, dim], times the time step."""
    b: Tensor
    """[B, groups, n, state]."""
    c: Tensor
    """[B, groups, n, state]."""
    log_decay: Tensor
    """[B, heads, n]."""

    @property
    def size(self) -> tuple[int, int]:
        return self.x.shape[0], self.x.shape[2]

    def part(self, rows: slice, span: slice) -> _MambaTokens:
        return _MambaTokens(*(part[rows, :, span] for part in (self.x, self.b, self.c, self.log_decay)))


class TorchMamba(ByRowGroups, MambaBackend):
    """Reference backend of Mamba2. Stateless, so threads may share an instance."""

    def run(self, zxbcdt: Tensor, out: Tensor, mamba: MambaInput) -> None:
        """See ``MambaBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        recurrence = _MambaRecurrence(self, mamba.state, mamba.weights)
        recurrence.advance((zxbcdt,), out, mamba.segment, mamba.prepared, each=mamba.each)

    def tokens(self, zxbcdt: Tensor, rows: _MambaRows, weights: MambaWeights, real: Tensor | None) -> Tensor:
        """Return outputs [B, n, heads * dim] for zxbcdt [B, n, .]. Advances ``rows``.

        real: int64 [B], number of real tokens per row, in front of the padding; None: all n.
        """
        heads, dim, state = rows.state.shape[1:]
        inner, shared = heads * dim, weights.groups * state
        sizes = (inner, inner + 2 * shared, heads)
        z, inputs, steps = zxbcdt.to(rows.state.dtype).split(sizes, dim=2)
        mixed, rows.past = convolve(inputs, rows.past, weights.taps, real)
        mixed = silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias)
        x, b, c = mixed.split((inner, shared, shared), dim=2)
        x = x.unflatten(2, (heads, dim)).transpose(1, 2)  # [B, heads, n, dim]
        dt = softplus(steps + weights.step_bias).clamp(weights.low, weights.high).transpose(1, 2)
        if real is not None:  # padding must leave the state unchanged
            filler = torch.arange(zxbcdt.shape[1], device=real.device) >= real.view(-1, 1, 1)
            dt = dt.masked_fill(filler, 0.0)
        # [B, groups, n, state]
        b, c = (part.unflatten(2, (weights.groups, state)).transpose(1, 2) for part in (b, c))
        tokens = _MambaTokens(x * dt.unsqueeze(3), b, c, -weights.rate.view(-1, 1) * dt)
        y, rows.state = self._recur(tokens, rows.state)
        y = (y + x * weights.skip.view(-1, 1, 1)).transpose(1, 2).flatten(2)
        return self._finished(y, z, weights)

    def _finished(self, y: Tensor, z: Tensor, weights: MambaWeights) -> Tensor:
        """Return the output of the layer's core for y and z, [B, n, heads * dim]; see ``Finish``."""
        if weights.finish == "later":
            return y
        if weights.norm is None:
            return y * silu(z)
        y = y * silu(z) if weights.finish == "gated" else y
        grouped = y.unflatten(2, (weights.norm_groups, -1))
        mean = self.sum(grouped.square(), 3) / grouped.shape[3]
        normed = (grouped * torch.rsqrt(mean + weights.eps)).flatten(2) * weights.norm
        return normed if weights.finish == "gated" else normed * silu(z)

    def _recur(self, tokens: _MambaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (S C of every token, [B, heads, n, dim]; state after the last token)."""
        count, n = tokens.size
        if n <= FEW:
            return self._one_by_one(tokens, state)
        # Rows are padded to whole chunks. Parts keep the padded tokens within the tokens of the rows.
        most = min(count * n, SPAN)
        return in_parts(_chunked, tokens, state, most // CHUNK // -(-n // CHUNK), SPAN)

    def _one_by_one(self, tokens: _MambaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as ``_recur``. ``state`` is changed in place: a decode step is bound by memory."""
        decays = tokens.log_decay.exp()
        made = []
        for t in range(tokens.x.shape[2]):
            state = state.mul_(decays[:, :, t, None, None])
            self._add(state, tokens.x[:, :, t], tokens.b[:, :, t])
            made.append(self._read(tokens.c[:, :, t], state))
        return torch.stack(made, dim=2), state

    def _add(self, state: Tensor, x: Tensor, b: Tensor) -> None:
        """Add x [B, heads, dim] outer b [B, groups, state] to ``state`` [B, heads, dim, state], in place."""
        state.addcmul_(x.unsqueeze(3), _of_heads(b, state).unsqueeze(2))

    def _read(self, c: Tensor, state: Tensor) -> Tensor:
        """Return state [B, heads, dim, state] times c [B, groups, state]: [B, heads, dim]."""
        rows = state.view(
            c.shape[0] * c.shape[1], -1, c.shape[2]
        )  # [B * groups, heads of a group * dim, state]
        return torch.bmm(c.reshape(-1, 1, c.shape[2]), rows.transpose(1, 2)).view(state.shape[:3])


class InvariantMamba(TorchMamba):
    """``TorchMamba`` token by token, with elementwise operations only."""

    invariant = True

    def _recur(self, tokens: _MambaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        # The products need copies of the state, so few rows are computed together.
        parts = [slice(first, first + ROWS) for first in range(0, len(state), ROWS)]
        made = [self._one_by_one(tokens.part(rows, slice(None)), state[rows])[0] for rows in parts]
        return torch.cat(made), state

    def _add(self, state: Tensor, x: Tensor, b: Tensor) -> None:
        # Not addcmul_, which may fuse product and sum for some elements of a loop only.
        state.add_(x.unsqueeze(3) * _of_heads(b, state).unsqueeze(2))

    def _read(self, c: Tensor, state: Tensor) -> Tensor:
        return self.sum(state * _of_heads(c, state).unsqueeze(2), 3).squeeze(3)

    def sum(self, x: Tensor, dim: int) -> Tensor:
        return tree_sum(x, dim)


def _of_heads(x: Tensor, state: Tensor) -> Tensor:
    """Return x [B, groups, columns] for each head of ``state`` [B, heads, ..]: [B, heads, columns]."""
    return x.repeat_interleave(state.shape[1] // x.shape[1], dim=1)


class _MambaRecurrence(Recurrence[_MambaRows]):
    """The recurrence of one layer: the states of its slots, and the functions of a backend."""

    def __init__(self, backend: TorchMamba, state: tuple[Tensor, ...], weights: MambaWeights) -> None:
        self._backend = backend
        self._inputs = state[:-1]
        self._recurrent = state[-1]
        self._weights = weights
        places = state[1].shape[2] // weights.groups
        self._repeats = (1, places, places)

    def read(self, slots: Tensor, live: Tensor, fresh: Tensor) -> _MambaRows:
        recurrent = self._recurrent[slots, live].masked_fill_(fresh.view(-1, 1, 1, 1), 0.0)  # a copy
        past = read_inputs(self._inputs, slots, live, fresh, self._repeats)
        return _MambaRows(past.to(recurrent.dtype), recurrent)

    def write(self, slots: Tensor, copy: int, rows: _MambaRows) -> None:
        write_inputs(self._inputs, slots, copy, rows.past, self._repeats)
        self._recurrent[:, copy].index_copy_(0, slots, rows.state)

    def tokens(self, inputs: tuple[Tensor, ...], rows: _MambaRows, real: Tensor | None) -> Tensor:
        return self._backend.tokens(inputs[0], rows, self._weights, real)


def _chunked(tokens: _MambaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same as ``_one_by_one``, in chunks of ``CHUNK`` tokens.

    For a chunk that begins with state S, let G_i be the sum of its log decays up to token i. Then y_i = e^G_i
    S C_i + sum over j <= i of e^(G_i - G_j) (C_i B_j) x_j.
    """
    n = tokens.x.shape[2]
    filler = -n % CHUNK
    x, b, c = (_in_chunks(F.pad(part, (0, 0, 0, filler))) for part in (tokens.x, tokens.b, tokens.c))
    log_decay = _in_chunks(F.pad(tokens.log_decay, (0, filler)).unsqueeze(3))  # [B, heads, chunks, CHUNK, 1]
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=x.device).triu()
    # e^(G_i - G_j), j <= i, from separate sums: the difference of two large sums would lose digits.
    between = log_decay.expand(-1, -1, -1, -1, CHUNK).masked_fill(later, 0.0).cumsum(3)
    between = between.masked_fill(later.triu(1), -torch.inf).exp()
    grown = log_decay.cumsum(3).exp()
    each = x.shape[1] // b.shape[1]
    seen = (c @ b.transpose(3, 4)).repeat_interleave(each, dim=1) * between
    alone = seen @ x
    b = b.repeat_interleave(each, dim=1) * between[:, :, :, -1].unsqueeze(4)
    c = c.repeat_interleave(each, dim=1) * grown
    made = []
    for chunk in range(x.shape[2]):
        made.append(alone[:, :, chunk] + c[:, :, chunk] @ state.transpose(2, 3))
        state = state * grown[:, :, chunk, -1:] + x[:, :, chunk].transpose(2, 3) @ b[:, :, chunk]
    return torch.cat(made, dim=2)[:, :, :n], state


def _in_chunks(x: Tensor) -> Tensor:
    """Return [B, heads, chunks, CHUNK, columns] from x [B, heads, chunks * CHUNK, columns]."""
    return x.unflatten(2, (-1, CHUNK))
