"""The gated delta net's core with torch operations, on any device and in any dtype.

    TorchDelta       rows of few tokens token by token; longer ones in chunks of 64 tokens, whose inner part
                     is a triangular system (Yang et al. 2024, arXiv 2412.06464, section 3.3)
    InvariantDelta   every row token by token, every sum by a fixed tree of additions: a row's bits are its
                     own. Slow: a prompt costs some twenty small operations a token and layer.

Computes in float32 (float64 in a float64 model) and rounds once. Rows of equal counts need no host column, so
that such a segment can be captured in a CUDA graph.

Sigmoid and softplus are written with exp and log: of torch's own ones the last elements of a loop differ from
the others in their last bits (E1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from weft.attention.base import SegmentInput
from weft.attention.delta_backend import DeltaBackend, DeltaWeights
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.upload import upload

Tensor = torch.Tensor

CHUNK = 64
FEW = 16
"""Tokens of a row that are computed one by one."""
SPAN = 2048
"""Tokens of a row that are computed together; bounds what is in memory. A multiple of ``CHUNK``."""
LENGTH_EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """B rows of at most n tokens each, computed side by side."""

    rows: Tensor | None
    """int64 [B]; None: all of the segment."""
    tokens: Tensor | None
    """int64 [B, n]: places in the segment; what fills a row up names its first token. None: all, in order."""
    counts: Tensor | None
    """int64 [B]; None: all n."""
    size: int
    most: int
    """n."""


@dataclass(slots=True)
class _Rows:
    """The state of a group's rows while it moves on."""

    past: Tensor
    """[B, conv - 1, channels]: the convolution's last inputs."""
    state: Tensor
    """[B, v_heads, k_dim, v_dim]."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """What the recurrence reads of n tokens: [B, v_heads, n, .], keys and queries of length 1."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    """[B, v_heads, n]."""
    beta: Tensor
    """[B, v_heads, n]."""


class TorchDelta(DeltaBackend):
    """The reference of the gated delta net's core. Stateless; any number of threads may share it."""

    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Serves everything."""

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> tuple[_Group, ...]:
        return tuple(_groups(segment))

    def run(
        self,
        qkvz: Tensor,
        gates: Tensor,
        out: Tensor,
        state: tuple[Tensor, ...],
        segment: SegmentInput,
        weights: DeltaWeights,
        *,
        each: bool,
        prepared: object = None,
    ) -> None:
        if not segment.tokens:
            return
        groups: tuple[_Group, ...] = prepared if isinstance(prepared, tuple) else tuple(_groups(segment))
        for group in groups:
            self._run(qkvz, gates, out, state, segment, weights, group, each)

    def _run(
        self,
        qkvz: Tensor,
        gates: Tensor,
        out: Tensor,
        state: tuple[Tensor, ...],
        segment: SegmentInput,
        weights: DeltaWeights,
        group: _Group,
        each: bool,
    ) -> None:
        slots, live, starts = (
            column if group.rows is None else column[group.rows]
            for column in (segment.slots, segment.live, segment.starts)
        )
        rows = _read(state, slots, live, starts == 0)
        span = 1 if each else SPAN
        for begin in range(0, group.most, span):
            n = min(span, group.most - begin)
            x, raw = (_take(tensor, group, begin, n) for tensor in (qkvz, gates))
            real = None
            if group.counts is not None:
                real = (group.counts - begin).clamp(0, n)
            made = self._tokens(x, raw, rows, weights, real)
            _put(out, made, group, begin, n)
            if each:
                _write(state, slots, begin, rows)
        if not each:
            _write(state, slots, 0, rows)

    def _tokens(
        self, qkvz: Tensor, gates: Tensor, rows: _Rows, weights: DeltaWeights, real: Tensor | None
    ) -> Tensor:
        """Outputs [B, n, v_heads * v_dim] of qkvz [B, n, .], gates [B, n, .]; moves ``rows`` on.

        real: int64 [B], how many of a row's tokens are real, the first ones; None: all.
        """
        v_heads, k_dim, v_dim = rows.state.shape[1:]
        batch, n = qkvz.shape[:2]
        value = v_heads * v_dim
        inputs, z = qkvz.to(rows.state.dtype).split((qkvz.shape[2] - value, value), dim=2)
        mixed, rows.past = _convolve(inputs, rows.past, weights.taps, real)
        key = (mixed.shape[2] - value) // 2
        q, k, v = mixed.split((key, key, value), dim=2)
        group = v_heads * k_dim // key
        q, k = (self._length_1(x.view(batch, n, -1, k_dim)).transpose(1, 2) for x in (q, k))
        b, a = gates.to(mixed.dtype).transpose(1, 2).chunk(2, dim=1)  # [B, v_heads, n]
        log_decay = -weights.rate.view(-1, 1) * _softplus(a + weights.bias.view(-1, 1))
        beta = _sigmoid(b)
        if real is not None:  # what fills a row up leaves its state as it is
            filler = torch.arange(n, device=real.device) >= real.view(-1, 1, 1)
            log_decay = log_decay.masked_fill(filler, 0.0)
            beta = beta.masked_fill(filler, 0.0)
        tokens = _Tokens(
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
        """x [B, n, heads, dim], each head divided by its length."""
        return x * torch.rsqrt(self._sum(x.square(), 3) + LENGTH_EPS)

    def _recur(self, tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        """(outputs [B, v_heads, n, v_dim], the state after the last token)."""
        n = tokens.q.shape[2]
        return self._one_by_one(tokens, state) if n <= FEW else _chunked(tokens, state)

    def _one_by_one(self, tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        decays = tokens.log_decay.exp()
        made = []
        for t in range(tokens.q.shape[2]):
            state = state * decays[:, :, t, None, None]
            change = (tokens.v[:, :, t] - self._read(tokens.k[:, :, t], state)) * tokens.beta[:, :, t, None]
            state = state + tokens.k[:, :, t, :, None] * change.unsqueeze(2)
            made.append(self._read(tokens.q[:, :, t], state))
        return torch.stack(made, dim=2), state

    def _read(self, x: Tensor, state: Tensor) -> Tensor:
        """x [B, heads, k_dim] times state [B, heads, k_dim, v_dim]: [B, heads, v_dim]."""
        return (x.unsqueeze(2) @ state).squeeze(2)

    def _sum(self, x: Tensor, dim: int) -> Tensor:
        """The sum over ``dim``, which stays with size 1."""
        return x.sum(dim, keepdim=True)


class InvariantDelta(TorchDelta):
    """``TorchDelta`` token by token, in elementwise operations alone."""

    invariant = True

    def _recur(self, tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
        return self._one_by_one(tokens, state)

    def _read(self, x: Tensor, state: Tensor) -> Tensor:
        return self._sum(x.unsqueeze(3) * state, 2).squeeze(2)

    def _sum(self, x: Tensor, dim: int) -> Tensor:
        while (n := x.shape[dim]) > 1:
            half = (n + 1) // 2
            low, high = x.split((half, n - half), dim=dim)
            x = torch.cat((low.narrow(dim, 0, n - half) + high, low.narrow(dim, n - half, 2 * half - n)), dim)
        return x


# --- rows ---


def _groups(segment: SegmentInput) -> Iterator[_Group]:
    """Rows of equal counts where they are few tokens, else of counts within a factor of two."""
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
    """Tokens begin .. begin + n of a group's rows: [B, n, columns] of x [T, columns]."""
    if group.tokens is None:
        return x.unflatten(0, (group.size, group.most))[:, begin : begin + n]
    return x[group.tokens[:, begin : begin + n]]


def _put(out: Tensor, made: Tensor, group: _Group, begin: int, n: int) -> None:
    """``out``'s rows of those tokens. What fills a row up is written first, to a place that is real."""
    if group.tokens is None:
        out.unflatten(0, (group.size, group.most))[:, begin : begin + n] = made
        return
    places = group.tokens[:, begin : begin + n]
    if group.counts is not None:
        # A filler names its row's first token; there it must say what that token says.
        filler = torch.arange(begin, begin + n, device=out.device) >= group.counts.unsqueeze(1)
        first = out[group.tokens[:, 0]] if begin else made[:, 0].to(out.dtype)
        made = torch.where(filler.unsqueeze(2), first.unsqueeze(1), made.to(out.dtype))
    out[places] = made.to(out.dtype)


def _read(state: tuple[Tensor, ...], slots: Tensor, live: Tensor, fresh: Tensor) -> _Rows:
    """Copies of the rows' states, zeros where a row is fresh."""
    *conv, recurrent = (part[slots, live] for part in state)
    flat = [part.transpose(1, 2).flatten(2) for part in conv]  # [B, conv - 1, heads * dim]
    past = torch.cat(flat, dim=2).to(recurrent.dtype)
    return _Rows(
        past.masked_fill(fresh.view(-1, 1, 1), 0.0), recurrent.masked_fill(fresh.view(-1, 1, 1, 1), 0.0)
    )


def _write(state: tuple[Tensor, ...], slots: Tensor, copy: int, rows: _Rows) -> None:
    *conv, recurrent = state
    sizes = [part.shape[2] * part.shape[4] for part in conv]
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
    """(silu of the causal convolution [B, n, channels], the inputs that the next token will look back on).

    inputs: [B, n, channels]; past: [B, conv - 1, channels], those before; real: int64 [B] or None for n.
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
        places = real.unsqueeze(1) + torch.arange(back, device=real.device)
        last = window.gather(1, places.unsqueeze(2).expand(-1, -1, window.shape[2]))
    return made * _sigmoid(made), last


def _chunked(tokens: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """``_one_by_one`` in chunks.

    In a chunk that begins with the state S, with G_i the sum of its log decays up to token i, the changes
    d_i = b_i (v_i - k_i (e^G_i S + sum over j < i of e^(G_i - G_j) k_j d_j)) solve a triangular system.
    """
    n = tokens.q.shape[2]
    filler = -n % CHUNK
    q, k, v = (_in_chunks(F.pad(x, (0, 0, 0, filler))) for x in (tokens.q, tokens.k, tokens.v))
    beta = _in_chunks(F.pad(tokens.beta, (0, filler)).unsqueeze(3))  # [B, heads, chunks, CHUNK, 1]
    log_decay = _in_chunks(F.pad(tokens.log_decay, (0, filler)).unsqueeze(3))
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).triu()
    # e^(G_i - G_j), j <= i, from sums of their own: the difference of two large sums has lost digits.
    between = log_decay.expand(-1, -1, -1, -1, CHUNK).masked_fill(later, 0.0).cumsum(3)
    between = between.masked_fill(later.triu(1), -torch.inf).exp()
    system = beta * (k @ k.transpose(3, 4)) * between  # its diagonal is not read
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
    """[B, heads, chunks, CHUNK, columns] of x [B, heads, chunks * CHUNK, columns]."""
    return x.unflatten(2, (-1, CHUNK))
