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

from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaInputs, DeltaWeights
from weft.attention.recurrent import (
    FEW,
    ByRowGroups,
    Recurrence,
    convolve,
    in_parts,
    read_inputs,
    sigmoid,
    silu,
    softplus,
    tree_sum,
    write_inputs,
)

Tensor = torch.Tensor

CHUNK = 64
BLOCK = 16
"""Tokens of a block with a decay for every key channel. Divides ``CHUNK``."""
MOST_BY_CHANNEL = 256
"""Maximum tokens of all rows in one computation with a decay for every key channel. A multiple of CHUNK.

Bounds the memory: see ``weft.config.sizing.layer_elements.recurrent_pass``.
"""
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
    """[B, v_heads, n, 1], or [B, v_heads, n, k_dim] with a decay for every key channel."""
    beta: Tensor
    """[B, v_heads, n]."""

    @property
    def size(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[2]

    def part(self, rows: slice, span: slice) -> _DeltaTokens:
        parts = (self.q, self.k, self.v, self.log_decay, self.beta)
        return _DeltaTokens(*(part[rows, :, span] for part in parts))


class TorchDelta(ByRowGroups, DeltaBackend):
    """Reference backend of the gated delta net. Stateless, so threads may share an instance."""

    def run(self, inputs: DeltaInputs, out: Tensor, delta: DeltaInput) -> None:
        """See ``DeltaBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        recurrence = _DeltaRecurrence(self, delta.state, delta.weights)
        recurrence.advance(inputs, out, delta.segment, delta.prepared, each=delta.each)

    def tokens(
        self, inputs: DeltaInputs, rows: _DeltaRows, weights: DeltaWeights, real: Tensor | None
    ) -> Tensor:
        """Return outputs [B, n, v_heads * v_dim] for ``inputs``, each [B, n, .]. Advances ``rows``.

        real: int64 [B], number of real tokens per row, in front of the padding; None: all n.
        """
        v_heads, k_dim, v_dim = rows.state.shape[1:]
        qkv, z, b, a = (part.to(rows.state.dtype) for part in inputs)
        batch, n = qkv.shape[:2]
        value = v_heads * v_dim
        mixed, rows.past = convolve(qkv, rows.past, weights.taps, real)
        mixed = silu(mixed)
        key = (mixed.shape[2] - value) // 2
        q, k, v = mixed.split((key, key, value), dim=2)
        # Value heads per key head.
        group = v_heads * k_dim // key
        q, k = (self._length_1(x.view(batch, n, -1, k_dim)).transpose(1, 2) for x in (q, k))
        a = a.view(batch, n, v_heads, -1) + weights.bias.view(v_heads, -1)
        # [B, v_heads, n, 1 or k_dim]
        log_decay = _log_decay(a, weights).transpose(1, 2)
        beta = weights.reach * sigmoid(b.transpose(1, 2))
        if real is not None:  # padding must leave the state unchanged
            filler = torch.arange(n, device=real.device) >= real.view(-1, 1, 1)
            log_decay = log_decay.masked_fill(filler.unsqueeze(3), 0.0)
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
        return o.reshape(batch, n, value) * (sigmoid(z) if weights.sigmoid else silu(z))

    def _length_1(self, x: Tensor) -> Tensor:
        """Return x [B, n, heads, dim] with each head divided by its length."""
        return x * torch.rsqrt(self._sum(x.square(), 3) + LENGTH_EPS)

    def _recur(self, tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs [B, v_heads, n, v_dim], state after the last token)."""
        n = tokens.q.shape[2]
        if n <= FEW:
            return self._one_by_one(tokens, state)
        # Rows are padded to whole chunks. Parts keep the padded tokens within the tokens of the rows.
        most = tokens.q.shape[0] * n if tokens.log_decay.shape[3] == 1 else MOST_BY_CHANNEL
        return in_parts(_chunked, tokens, state, most // CHUNK // -(-n // CHUNK), most)

    def _one_by_one(self, tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return (outputs [B, heads, n, v_dim], state after the last token).

        ``state`` is not changed in place.
        """
        decays = tokens.log_decay.exp()
        outputs = []
        for t in range(tokens.q.shape[2]):
            state = state * decays[:, :, t].unsqueeze(3)
            change = (tokens.v[:, :, t] - self._read(tokens.k[:, :, t], state)) * tokens.beta[:, :, t, None]
            state = state + tokens.k[:, :, t, :, None] * change.unsqueeze(2)
            outputs.append(self._read(tokens.q[:, :, t], state))
        return torch.stack(outputs, dim=2), state

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
        return self._backend.tokens(DeltaInputs(*inputs), rows, self._weights, real)


def _log_decay(a: Tensor, weights: DeltaWeights) -> Tensor:
    """Return g of ``DeltaBackend`` for a with its bias: [B, n, v_heads, 1 or k_dim]."""
    rate = weights.rate.view(-1, 1)
    return weights.floor * sigmoid(rate * a) if weights.floor < 0 else -rate * softplus(a)


def _chunked(tokens: _DeltaTokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the same as ``_one_by_one``, in chunks of ``CHUNK`` tokens.

    Return (outputs [B, heads, n, v_dim], state after the last token).

    For a chunk that begins with state S, let G_i be the sum of its log decays up to token i. The changes d_i
    = b_i (v_i - k_i (e^G_i S + sum over j < i of e^(G_i - G_j) k_j d_j)) solve a triangular system.
    """
    n = tokens.q.shape[2]
    filler = -n % CHUNK
    q, k, v, log_decay = (
        _in_chunks(F.pad(x, (0, 0, 0, filler))) for x in (tokens.q, tokens.k, tokens.v, tokens.log_decay)
    )
    beta = _in_chunks(F.pad(tokens.beta, (0, filler)).unsqueeze(3))  # [B, heads, chunks, CHUNK, 1]
    products = _products if log_decay.shape[4] == 1 else _products_by_channel
    of_keys, seen = products(torch.cat((k, q), dim=3), k, log_decay).split(CHUNK, dim=3)
    system = beta * of_keys  # the diagonal is not read
    grown = log_decay.cumsum(3).exp()
    right = torch.cat((beta * v, beta * grown * k), dim=4)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    alone, of_state = solved.split((v.shape[4], k.shape[4]), dim=4)  # d = alone - of_state S
    q = q * grown
    k = k * _after(log_decay).exp()
    outputs = []
    for c in range(q.shape[2]):
        change = alone[:, :, c] - of_state[:, :, c] @ state
        outputs.append(q[:, :, c] @ state + seen[:, :, c] @ change)
        state = state * grown[:, :, c, -1].unsqueeze(3) + k[:, :, c].transpose(2, 3) @ change
    return torch.cat(outputs, dim=2)[:, :, :n], state


def _products(x: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return the products of x_i and e^(G_i - G_j) k_j for j <= i, else 0: [.., rows of x, n].

    x: [.., r n, k_dim], r stacks of n tokens; k: [.., n, k_dim]; log_decay: [.., n, 1].
    """
    between = _between(log_decay).squeeze(-1)
    return (x @ k.transpose(-2, -1)) * torch.cat((between,) * (x.shape[-2] // k.shape[-2]), dim=-2)


def _products_by_channel(x: Tensor, k: Tensor, log_decay: Tensor) -> Tensor:
    """Return the same as ``_products`` for log_decay [.., n, k_dim], in blocks of ``BLOCK`` tokens.

    Products of two blocks are products of matrices: e^(G_i - G_j) is a product of the decays up to i in the
    block of i, of all decays of the blocks between, and of the decays after j in the block of j. No factor
    exceeds 1.
    """
    blocks = k.shape[-2] // BLOCK
    x = x.unflatten(-2, (-1, blocks, BLOCK)).transpose(-4, -3)  # [.., blocks, r, BLOCK, k_dim]
    k, g = (one.unflatten(-2, (blocks, BLOCK)) for one in (k, log_decay))
    whole = g.sum(-2, keepdim=True)
    first = x * g.cumsum(-2).exp().unsqueeze(-3)
    last = _after(g)
    result = x.new_zeros(*x.shape[:-1], blocks, BLOCK)
    for i in range(blocks):
        of_i = first[..., i, :, :, :].flatten(-3, -2)
        past = torch.zeros_like(whole[..., 0, :, :])
        for j in reversed(range(i)):
            of_j = k[..., j, :, :] * (last[..., j, :, :] + past).exp()
            result[..., i, :, :, j, :] = (of_i @ of_j.transpose(-2, -1)).unflatten(-2, (-1, BLOCK))
            past = past + whole[..., j, :, :]
        pairs = k[..., i, None, :, :] * _between(g[..., i, :, :])  # [.., BLOCK of i, BLOCK of j, k_dim]
        inside = pairs @ x[..., i, :, :, :].movedim(-3, -1)  # [.., BLOCK of i, BLOCK of j, r]
        result[..., i, :, :, i, :] = inside.movedim(-1, -3)
    return result.flatten(-2).transpose(-4, -3).flatten(-4, -2)


def _between(log_decay: Tensor) -> Tensor:
    """Return e^(G_i - G_j) for j <= i, else 0: [.., i, j, channels] from log_decay [.., n, channels].

    The sums are separate: the difference of two large sums would lose digits.
    """
    n = log_decay.shape[-2]
    later = torch.ones(n, n, dtype=torch.bool, device=log_decay.device).triu().unsqueeze(2)
    each = log_decay.unsqueeze(-2).expand(*log_decay.shape[:-1], n, -1)
    sums = each.masked_fill(later, 0.0).cumsum(-3)
    return sums.masked_fill(later.squeeze(2).triu(1).unsqueeze(2), -torch.inf).exp()


def _after(log_decay: Tensor) -> Tensor:
    """Return the sum of the log decays after each token: [.., n, channels], 0 for the last token."""
    after = F.pad(log_decay[..., 1:, :], (0, 0, 0, 1))
    return after.flip(-2).cumsum(-2).flip(-2)


def _in_chunks(x: Tensor) -> Tensor:
    """Return [B, heads, chunks, CHUNK, columns] from x [B, heads, chunks * CHUNK, columns]."""
    return x.unflatten(2, (-1, CHUNK))
