"""Parts of sparse attention and hyper-connections, in torch. No intermediate result is downcast.

Importing registers the ops.
"""

from __future__ import annotations

import functools

import torch

from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import wide

Tensor = torch.Tensor


def rotate_pairs_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last dims of x [T, heads, dim] in place, with neighbours as pairs; return x.

    cos, sin: wide [T, rotated / 2].

    Source: Su et al. 2021, arXiv 2104.09864.
    """
    turned = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    first, second = turned.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    turned.copy_(torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2))
    return x


def pool(entries: Tensor, sources: Tensor, begun: Tensor, bias: Tensor, overlap: int) -> Tensor:
    """Return each group's ``sum of softmax(gate + bias) * kv`` over its sources, per channel: wide [C, n].

    entries: [.., overlap * 2 n], one ``[kv | gate]`` part for each group to which a source contributes, the
    latest group last. sources: int64 [C, S], S = overlap * ratio, oldest first. begun: bool [C, S]; sources
    with False do not contribute. bias: wide [S, n]. A source inside the group contributes its last part; a
    source of an earlier group contributes an earlier part.
    """
    exact = wide(entries.dtype)
    found = []
    width = entries.shape[1] // overlap
    for part, places in enumerate(sources.chunk(overlap, dim=1)):
        # Sources ``overlap - 1 - part`` groups back. Their parts for later groups come first.
        columns = entries[:, part * width : (part + 1) * width]
        found.append(columns.index_select(0, places.reshape(-1)).view(*places.shape, width))
    # [C, S, 2 n] -> kv and gate [C, S, n]
    kv, gate = torch.cat(found, dim=1).to(exact).chunk(2, dim=-1)
    absent = ~begun.unsqueeze(2)
    weights = (gate + bias).masked_fill_(absent, -torch.inf).softmax(dim=1)
    return (kv.masked_fill(absent, 0.0) * weights).sum(dim=1)


def stream_weights(
    mixed: Tensor, scale: Tensor, base: Tensor, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return how N residual streams enter a layer, take its output, and mix: wide [T, N], [T, N], [T, N, N].

    mixed: wide [T, (2 + N) N], a linear function of the streams; scale: [3]; base: [(2 + N) N]. ``mix[t, i,
    j]`` is the contribution of stream i to stream j. Rows, then columns are scaled to sum to 1,
    ``iterations`` times (rows by a softmax the first time); every sum gets ``eps`` added.

    Source: Xie et al. 2025, arXiv 2512.24880.
    """
    sizes = (streams, streams, streams * streams)
    into, out, mix = mixed.split(sizes, dim=-1)
    into_base, out_base, mix_base = base.split(sizes)
    into = logistic(into * scale[0] + into_base) + eps
    out = 2 * logistic(out * scale[1] + out_base)
    mix = (mix * scale[2] + mix_base).unflatten(-1, (streams, streams)).softmax(dim=-1) + eps
    mix = mix / (_added(mix, 1) + eps)
    # The softmax and the column scaling above were the first iteration.
    for _ in range(iterations - 1):
        mix = mix / (_added(mix, 2) + eps)
        mix = mix / (_added(mix, 1) + eps)
    return into, out, mix


def logistic(x: Tensor) -> Tensor:
    """Return ``1 / (1 + exp(-x))``. torch.sigmoid uses another function for the last elements of a loop."""
    return 1.0 / (1.0 + torch.exp(-x))


def sum_streams(x: Tensor, weights: Tensor) -> Tensor:
    """Return ``sum over i of weights[:, i] * x[:, i]``, in order of i, so rows do not affect each other.

    x: [T, N, ...]; weights: wide [T, N] or [T, N, M]. Returns wide [T, ...], or [T, M, ...].
    """
    made = None
    for i in range(x.shape[1]):
        part = x[:, i].to(weights.dtype)
        share = weights[:, i]
        if weights.dim() == 3:
            part = part.unsqueeze(1)
        term = part * share.unsqueeze(-1)
        made = term if made is None else made + term
    assert made is not None
    return made


def mix_streams(
    mixed: Tensor, scale: Tensor, base: Tensor, x: Tensor, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (input of the layer [T, hidden], ``out`` wide [T, N], ``mix`` wide [T, N, N]) for x [T, N,
    hidden]; see ``stream_weights``."""
    into, out, mix = stream_weights(mixed, scale, base, x.shape[1], iterations, eps)
    return sum_streams(x, into).to(x.dtype), out, mix


def add_streams(x: Tensor, made: Tensor, out: Tensor, mix: Tensor) -> Tensor:
    """Return the streams after a layer with output ``made`` [T, hidden]: [T, N, hidden] in x's dtype."""
    # [T, 1, hidden] * [T, N, 1] -> [T, N, hidden]
    given = made.to(mix.dtype).unsqueeze(1) * out.unsqueeze(2)
    return (sum_streams(x, mix) + given).to(x.dtype)


def _added(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a short dim, in order; the dim stays with size 1."""
    return functools.reduce(torch.add, x.split(1, dim=dim))


for _op in (mix_streams, add_streams):
    register(_op.__name__, Implementation(name="torch", run=_op, invariant=True))
register("rotate_neighbours", Implementation(name="torch", run=rotate_pairs_, invariant=True))
