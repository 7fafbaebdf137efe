"""Gated delta net with torch operations, on any device and in any dtype.

    TorchDelta       rows of few tokens token by token; longer rows in chunks of 64 tokens, with a triangular
                     system inside each chunk (Yang et al. 2024, arXiv 2412.06464, section 3.3)
    InvariantDelta   every row token by token, every sum by a fixed tree of additions, so output bits do not
                     depend on the batch. Slow: about twenty small operations per token and layer.

Computes in float32 (float64 in a float64 model) and rounds once. Rows of equal counts need no host column, so
such a segment can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaWeights
from weft.attention.recurrent import (
    FEW,
    ByRowGroups,
    Recurrence,
    convolve,
    read_inputs,
    sigmoid,
    silu,
    softplus,
    tree_sum,
    write_inputs,
)

Tensor = torch.Tensor

CHUNK = 64
LENGTH_EPS = 1e-6


@dataclass(slots=True)
class _DeltaRows:
    """State of a group's rows between passes."""

    past: Tensor
    """[B, conv - 1, channels]: last inputs of the convolution."""
    state: Tensor
    """[B, v_heads, k_dim, v_dim]."""


@dataclass(frozen=True, slots=True)
class _DeltaTokens:
    """Inputs of the recurrence for n tokens: [B, v_heads, n, .]; keys and queries have length 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """[B, v_heads, n]."""
    beta: Tensor
    """[B, v_heads, n]."""


class TorchDelta(ByRowGroups, DeltaBackend):
    """Reference backend of the gated delta net. Stateless, so threads may share an instance."""

    def run(self, qkvz: Tensor, gates: Tensor, out: Tensor, delta: DeltaInput) -> None:
        """See ``DeltaBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        recurrence = _DeltaRecurrence(self, delta.state, delta.weights)
        recurrence.advance((qkvz, gates), out, delta.segment, delta.prepared, each=delta.each)

    def tokens(
        self, qkvz: Tensor, gates: Tensor, rows: _DeltaRows, weights: DeltaWeights, real: Tensor | None
    ) -> Tensor:
        """Return outputs [B, n, v_heads * v_dim] for qkvz [B, n, .] and gates [B, n, .]. Advances ``rows``.

        real: int64 [B], number of real tokens per row, in front of the padding; None: all n.
        """
        v_heads, k_dim, v_dim = rows.state.shape[1:]
        batch, n = qkvz.shape[:2]
        value = v_heads * v_dim
        inputs, z = qkvz.to(rows.state.dtype).split((qkvz.shape[2] - value, value), dim=2)
        mixed, rows.past = convolve(inputs, rows.past, weights.taps, real)
        mixed = silu(mixed)
        key = (mixed.shape[2] - value) // 2
        q, k, v = mixed.split((key, key, value), dim=2)
        # Value heads per key head.
        group = v_heads * k_dim // key
        q, k = (self._length_1(x.view(batch, n, -1, k_dim)).transpose(1, 2) for x in (q, k))
        b, a = gates.to(mixed.dtype).transpose(1, 2).chunk(2, dim=1)  # [B, v_heads, n]
        log_decay = -weights.rate.view(-1, 1) * softplus(a + weights.bias.view(-1, 1))
        beta = sigmoid(b)
        if real is not None:  # padding must leave the state unchanged
            filler = torch.arange(n, device=real.device) >= real.view(-1, 1, 1)
            log_decay = log_decay.masked_fill(filler, 0.0)
            beta = beta.masked_fill(filler, 0.0)
        tokens = _DeltaTokens(
            (q * k_dim**-0.5).repeat_interleave(group, dim=1),
            k.repeat_interleave(group, dim=1),
            v.view(batch, n, v_heads, v_dim).transpose(1, 2),
            log_decay,
            beta,
        )
        o, rows.state = self._recur(tokens, rows.state)
        o = o.transpose(1, 2)  # [B, n, v_heads, v_dim]
        o = o * torch.rsqrt(self._sum(o.square(), 3) / v_dim + weights.eps) * weights.norm
        return o.reshape(batch, n, value) * silu(z)

    def _length_1(self, x: Tensor) -> Tensor:
        """Return x [B, n, heads, dim] with each head divided by its length."""
        return x * torch.rsqrt(self._sum(x.square(), 3) + LENGTH_EPS)

    def _recur(self, tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs [B, v_heads, n, v_dim], state after the last token)."""
        n = tokens.q.shape[2]
        return self._one_by_one(tokens, state) if n <= FEW else _chunked(tokens, state)

    def _one_by_one(self, tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs [B, heads, n, v_dim], state after the last token).

        ``state`` is not changed in place.
        """
        decays = tokens.log_decay.exp()
        made = []
        for t in range(tokens.q.shape[2]):
            state = state * decays[:, :, t, None, None]
            change = (tokens.v[:, :, t] - self._read(tokens.k[:, :, t], state)) * tokens.beta[:, :, t, None]
            state = state + tokens.k[:, :, t, :, None] * change.unsqueeze(2)
            made.append(self._read(tokens.q[:, :, t], state))
        return torch.stack(made, dim=2), state

    def _read(self, x: Tensor, state: Tensor) -> Tensor:
        """Return x [B, heads, k_dim] times state [B, heads, k_dim, v_dim]: [B, heads, v_dim]."""
        return (x.unsqueeze(2) @ state).squeeze(2)

    def _sum(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum over ``dim``, with ``dim`` kept as size 1."""
        return x.sum(dim, keepdim=True)


class InvariantDelta(TorchDelta):
    """``TorchDelta`` token by token, with elementwise operations only."""

    invariant = True

    def _recur(self, tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return self._one_by_one(tokens, state)

    def _read(self, x: Tensor, state: Tensor) -> Tensor:
        return self._sum(x.unsqueeze(3) * state, 2).squeeze(2)

    def _sum(self, x: Tensor, dim: int) -> Tensor:
        """Return the sum over ``dim``, which keeps size 1, in an order that depends on the size only."""
        return tree_sum(x, dim)


class _DeltaRecurrence(Recurrence[_DeltaRows]):
    """The recurrence of one layer: the states of its slots, and the functions of a backend."""

    def __init__(self, backend: TorchDelta, state: tuple[Tensor, ...], weights: DeltaWeights) -> None:
        self._backend = backend
        self._inputs = state[:-1]
        self._recurrent = state[-1]
        self._weights = weights

    def read(self, slots: Tensor, live: Tensor, fresh: Tensor) -> _DeltaRows:
        recurrent = self._recurrent[slots, live].masked_fill(fresh.view(-1, 1, 1, 1), 0.0)
        past = read_inputs(self._inputs, slots, live, fresh)
        return _DeltaRows(past.to(recurrent.dtype), recurrent)

    def write(self, slots: Tensor, copy: int, rows: _DeltaRows) -> None:
        write_inputs(self._inputs, slots, copy, rows.past)
        self._recurrent[:, copy].index_copy_(0, slots, rows.state)

    def tokens(self, inputs: tuple[Tensor, ...], rows: _DeltaRows, real: Tensor | None) -> Tensor:
        qkvz, gates = inputs
        return self._backend.tokens(qkvz, gates, rows, self._weights, real)


def _chunked(tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same as ``_one_by_one``, in chunks of ``CHUNK`` tokens.

    Return (outputs, state after the last token).

    For a chunk that begins with state S, let G_i be the sum of its log decays up to token i. The changes d_i
    = b_i (v_i - k_i (e^G_i S + sum over j < i of e^(G_i - G_j) k_j d_j)) solve a triangular system.
    """
    n = tokens.q.shape[2]
    filler = -n % CHUNK
    q, k, v = (_in_chunks(F.pad(x, (0, 0, 0, filler))) for x in (tokens.q, tokens.k, tokens.v))
    beta = _in_chunks(F.pad(tokens.beta, (0, filler)).unsqueeze(3))  # [B, heads, chunks, CHUNK, 1]
    log_decay = _in_chunks(F.pad(tokens.log_decay, (0, filler)).unsqueeze(3))
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu()
    # e^(G_i - G_j), j <= i, from separate sums: the difference of two large sums would lose digits.
    between = log_decay.expand(-1, -1, -1, -1, CHUNK).masked_fill(later, 0.0).cumsum(3)
    between = between.masked_fill(later.triu(1), -torch.inf).exp()
    system = beta * (k @ k.transpose(3, 4)) * between  # the diagonal is not read
    grown = log_decay.cumsum(3).exp()
    right = torch.cat((beta * v, beta * grown * k), dim=4)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    alone, of_state = solved.split((v.shape[4], k.shape[4]), dim=4)  # d = alone - of_state S
    seen = (q @ k.transpose(3, 4)) * between
    q = q * grown
    k = k * between[:, :, :, -1].unsqueeze(4)
    made = []
    for c in range(q.shape[2]):
        change = alone[:, :, c] - of_state[:, :, c] @ state
        made.append(q[:, :, c] @ state + seen[:, :, c] @ change)
        state = state * grown[:, :, c, -1:] + k[:, :, c].transpose(2, 3) @ change
    return torch.cat(made, dim=2)[:, :, :n], state


def _in_chunks(x: Tensor) -> Tensor:
    """Return [B, heads, chunks, CHUNK, columns] from x [B, heads, chunks * CHUNK, columns]."""
    return x.unflatten(2, (-1, CHUNK))
