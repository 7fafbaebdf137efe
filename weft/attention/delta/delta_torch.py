"""Gated delta net with torch operations, on any device and in any dtype.

    TorchDelta       rows of few tokens token by token; longer rows in chunks of 64 tokens, with a triangular
                     system inside each chunk (Yang et al. 2024, arXiv 2412.06464, section 3.3)
    InvariantDelta   every row token by token, every sum by a fixed tree of additions, so output bits do not
                     depend on the batch. Slow: about twenty small operations per token and layer.

Computes in float32 (float64 in a float64 model) and rounds once. Rows of equal counts need no host column, so
such a segment can be captured in a CUDA graph.

Sigmoid and softplus are written with exp and log. In torch's own functions the last elements of a loop differ
from the other elements in the last bits, which would break bitwise invariance.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.attention.base import SegmentInput
from weft.attention.delta.delta_backend import DeltaBackend, DeltaInput, DeltaWeights
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.upload import upload

Tensor = torch.Tensor

CHUNK = 64
FEW = 16
"""Maximum tokens of a row for the computation token by token."""
SPAN = 2048
"""Tokens of a row per pass. Bounds the memory. A multiple of ``CHUNK``."""
LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """B rows of at most n tokens each, in one computation."""

    rows: Tensor | None
    """int64 [B]; None: all rows of the segment."""
    tokens: Tensor | None
    """int64 [B, n]: places in the segment; padding names the first token of the row. None: all tokens, in
    order."""
    counts: Tensor | None
    """int64 [B]; None: n for every row."""
    size: int
    most: int
    """n."""


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


class TorchDelta(DeltaBackend):
    """Reference backend of the gated delta net. Stateless, so threads may share an instance."""

    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Accept every model."""

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> tuple[_Group, ...]:
        return tuple(_groups(segment))

    def run(self, qkvz: Tensor, gates: Tensor, out: Tensor, delta: DeltaInput) -> None:
        """See ``DeltaBackend.run``. Writes ``out`` and the states in place; does nothing without tokens."""
        if not delta.segment.tokens:
            return
        prepared = delta.prepared
        groups = prepared if isinstance(prepared, tuple) else tuple(_groups(delta.segment))
        for group in groups:
            self._run(qkvz, gates, out, delta, group)

    def _run(self, qkvz: Tensor, gates: Tensor, out: Tensor, delta: DeltaInput, group: _Group) -> None:
        """Compute the rows of one group in passes of at most ``SPAN`` tokens.

        Writes ``out`` and the states: after each token with ``each``, else after the last token.
        """
        segment = delta.segment
        state = delta.state
        each = delta.each
        slots, live, starts = (
            column if group.rows is None else column[group.rows]
            for column in (segment.slots, segment.live, segment.starts)
        )
        rows = _read(state, slots, live, starts == 0)
        # With ``each`` a pass has one token, because the state after every token is stored.
        span = 1 if each else SPAN
        for begin in range(0, group.most, span):
            n = min(span, group.most - begin)
            x, raw = (_take(tensor, group, begin, n) for tensor in (qkvz, gates))
            real = None
            if group.counts is not None:
                real = (group.counts - begin).clamp(0, n)
            made = self._tokens(x, raw, rows, delta.weights, real)
            _put(out, made, group, begin, n)
            if each:
                _write(state, slots, begin, rows)
        if not each:
            _write(state, slots, 0, rows)

    def _tokens(
        self, qkvz: Tensor, gates: Tensor, rows: _DeltaRows, weights: DeltaWeights, real: Tensor | None
    ) -> Tensor:
        """Return outputs [B, n, v_heads * v_dim] for qkvz [B, n, .] and gates [B, n, .]. Advances ``rows``.

        real: int64 [B], number of real tokens per row, in front of the padding; None: all n.
        """
        v_heads, k_dim, v_dim = rows.state.shape[1:]
        batch, n = qkvz.shape[:2]
        value = v_heads * v_dim
        inputs, z = qkvz.to(rows.state.dtype).split((qkvz.shape[2] - value, value), dim=2)
        mixed, rows.past = _convolve(inputs, rows.past, weights.taps, real)
        key = (mixed.shape[2] - value) // 2
        q, k, v = mixed.split((key, key, value), dim=2)
        # Value heads per key head.
        group = v_heads * k_dim // key
        q, k = (self._length_1(x.view(batch, n, -1, k_dim)).transpose(1, 2) for x in (q, k))
        b, a = gates.to(mixed.dtype).transpose(1, 2).chunk(2, dim=1)  # [B, v_heads, n]
        log_decay = -weights.rate.view(-1, 1) * _softplus(a + weights.bias.view(-1, 1))
        beta = _sigmoid(b)
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
        return o.reshape(batch, n, value) * (z * _sigmoid(z))

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
        # Add the upper half to the lower half until one element is left: the tree depends on the size only.
        while (n := x.shape[dim]) > 1:
            half = (n + 1) // 2
            low, high = x.split((half, n - half), dim=dim)
            x = torch.cat((low.narrow(dim, 0, n - half) + high, low.narrow(dim, n - half, 2 * half - n)), dim)
        return x


# --- rows ---


def _groups(segment: SegmentInput) -> Iterator[_Group]:
    """Yield rows grouped by equal counts (short rows), or by counts within a factor of two (longer rows)."""
    counts = segment.host_counts.astype(np.int64)
    device = segment.starts.device
    if not segment.rows:
        return
    if (counts == counts[0]).all():
        yield _Group(rows=None, tokens=None, counts=None, size=segment.rows, most=int(counts[0]))
        return
    firsts = np.cumsum(counts) - counts
    alike: dict[int, list[int]] = {}
    for row, count in enumerate(counts.tolist()):
        if count:
            alike.setdefault(count if count <= FEW else FEW * count.bit_length(), []).append(row)
    for members in alike.values():
        rows = np.array(members, np.int64)
        each = counts[rows]
        most = int(counts[rows].max())
        within = np.arange(most)
        places = firsts[rows, None] + np.where(within < each[:, None], within, 0)
        yield _Group(
            rows=upload(rows, device),
            tokens=upload(places, device),
            counts=None if (each == most).all() else upload(each, device),
            size=len(members),
            most=most,
        )


def _take(x: Tensor, group: _Group, begin: int, n: int) -> Tensor:
    """Return tokens begin .. begin + n - 1 of the rows of a group: [B, n, columns] from x [T, columns]."""
    if group.tokens is None:
        return x.unflatten(0, (group.size, group.most))[:, begin : begin + n]
    return x[group.tokens[:, begin : begin + n]]


def _put(out: Tensor, made: Tensor, group: _Group, begin: int, n: int) -> None:
    """Write ``made`` [B, n, columns] to the rows of ``out``. Padding writes too, so its value must be
    harmless."""
    if group.tokens is None:
        out.unflatten(0, (group.size, group.most))[:, begin : begin + n] = made
        return
    places = group.tokens[:, begin : begin + n]
    if group.counts is not None:
        # Padding indices point at the first token of the row, so they must write the same value as the first
        # token.
        filler = torch.arange(begin, begin + n, device=out.device) >= group.counts.unsqueeze(1)
        first = out[group.tokens[:, 0]] if begin else made[:, 0].to(out.dtype)
        made = torch.where(filler.unsqueeze(2), first.unsqueeze(1), made.to(out.dtype))
    out[places] = made.to(out.dtype)


def _read(state: tuple[Tensor, ...], slots: Tensor, live: Tensor, fresh: Tensor) -> _DeltaRows:
    """Return copies of the states of rows, zeros where a row is fresh."""
    *conv, recurrent = (part[slots, live] for part in state)
    flat = [part.transpose(1, 2).flatten(2) for part in conv]  # [B, conv - 1, heads * dim]
    past = torch.cat(flat, dim=2).to(recurrent.dtype)
    return _DeltaRows(
        past.masked_fill(fresh.view(-1, 1, 1), 0.0), recurrent.masked_fill(fresh.view(-1, 1, 1, 1), 0.0)
    )


def _write(state: tuple[Tensor, ...], slots: Tensor, copy: int, rows: _DeltaRows) -> None:
    """Write the states of ``rows`` to place ``copy`` of their slots, in place."""
    *conv, recurrent = state
    sizes = [part.shape[2] * part.shape[4] for part in conv]
    # [B, conv - 1, heads * dim] -> [B, heads, conv - 1, dim]
    for part, past in zip(conv, rows.past.split(sizes, dim=2), strict=True):
        heads = past.unflatten(2, (part.shape[2], part.shape[4])).transpose(1, 2)
        part[:, copy].index_copy_(0, slots, heads.to(part.dtype))
    recurrent[:, copy].index_copy_(0, slots, rows.state)


# --- tokens ---


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def _softplus(x: Tensor) -> Tensor:
    return x.clamp(min=0) + (1 + (-x.abs()).exp()).log()


def _convolve(inputs: Tensor, past: Tensor, taps: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return (silu of the causal convolution [B, n, channels], last inputs for the next token).

    inputs: [B, n, channels]; past: [B, conv - 1, channels], the inputs before; real: int64 [B], None for all
    n.
    """
    n = inputs.shape[1]
    back = past.shape[1]
    window = torch.cat((past, inputs), dim=1)
    made = window[:, :n] * taps[0]
    for j in range(1, back + 1):
        made = made + window[:, j : j + n] * taps[j]
    if real is None:
        last = window[:, n:]
    else:
        # The last ``back`` real inputs of each row; padding behind the real inputs is skipped.
        places = real.unsqueeze(1) + torch.arange(back, device=real.device)
        last = window.gather(1, places.unsqueeze(2).expand(-1, -1, window.shape[2]))
    return made * _sigmoid(made), last


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
