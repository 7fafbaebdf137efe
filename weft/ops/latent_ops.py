"""Parts of latent attention around core attention, in torch: cache entries, and the form of a segment.

Importing registers the ops.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from weft.ops import kv_fp8
from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import rms_norm

Tensor = torch.Tensor


class Rotation(NamedTuple):
    """Rotation of T tokens: the arguments of ``rotate_pairs`` behind x."""

    cos: Tensor
    """Wide [T, rope / 2]."""
    sin: Tensor
    interleaved: bool


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return the rotary embedding of x [T, ..., dim] by wide cos, sin [T, dim / 2], in x's dtype, as halves.

    interleaved: pairs are neighbours (2 i, 2 i + 1), otherwise halves (i, i + dim / 2). Scores do not depend
    on the order of dims if queries and keys share the order. Source: Su et al. 2021, arXiv 2104.09864.
    """
    exact = x.to(cos.dtype)
    first, second = (exact[..., ::2], exact[..., 1::2]) if interleaved else exact.chunk(2, dim=-1)
    # [T, 1, .., dim / 2], to broadcast over heads
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[1])
    cos = cos.view(shape)
    sin = sin.view(shape)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x [T, ..., dim] with ``rotate_pairs`` of its first elements, as many as the angles have."""
    rope = 2 * cos.shape[1]
    return torch.cat((rotate_pairs(x[..., :rope], cos, sin, interleaved), x[..., rope:]), dim=-1)


def latent_rope_cache(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    writes: Tensor,
) -> Tensor:
    """Write each token's entry ``[normalized latent | rotated key]``; return the queries' part [T, first].

    joined: [T, first + kv_lora + rope]. q_weight [first]: RMS norm of the queries' part, or None. weight
    [kv_lora]: RMS norm of the latent. cos, sin: [T, rope / 2] (wide). cache: [blocks, block, width] of one
    layer; a line may be longer than latent and key. writes: int64 [T], block id * block + offset.
    """
    q, *entry = _parts(joined, q_weight, weight, eps, cos, sin, interleaved)
    made = torch.cat(entry, dim=1).to(cache.dtype)
    cache.view(-1, cache.shape[2])[:, : made.shape[1]].index_copy_(0, writes, made)
    return q


def latent_rope_cache_fp8(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    cache: Tensor,
    scales: Tensor,
    keys: Tensor,
    writes: Tensor,
) -> Tensor:
    """Compute ``latent_rope_cache`` with a cache in 8 bits.

    cache: latents E4M3 [blocks, block, kv_lora]; scales: float32 [blocks, block]; keys: rotated, in joined's
    dtype, the first elements of [blocks, block, .].
    """
    q, latent, key = _parts(joined, q_weight, weight, eps, cos, sin, interleaved)
    kv_fp8.write(cache, scales, writes, latent)
    keys.view(-1, keys.shape[2])[:, : key.shape[1]].index_copy_(0, writes, key)
    return q


def _parts(
    joined: Tensor,
    q_weight: Tensor | None,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (queries' part, latent, rotated key) of each token; queries and latent are normalized.

    Without ``q_weight``, the queries' part stays as given.
    """
    lora = weight.shape[0]
    rope = 2 * cos.shape[1]
    # [T, first | kv_lora | rope]
    q, latent, key = joined.split((joined.shape[1] - lora - rope, lora, rope), dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    return q, rms_norm(latent, weight, eps), rotate_pairs(key, cos, sin, interleaved)


def latent_up(keys: Tensor, values: Tensor) -> None:
    """Return None: only the C++ backend packs the key and value matrices."""
    return


def head_product(x: Tensor, matrices: Tensor, packed: object) -> Tensor:
    """Multiply x [T, heads, n] by each head's own matrix of ``matrices`` [heads, m, n]: [T, heads, m].

    packed: result of ``latent_up`` for the same matrices; unused here.
    """
    return torch.einsum("thn,hmn->thm", x, matrices)


def head_product_into(x: Tensor, matrices: Tensor, out: Tensor) -> None:
    """Write ``head_product`` to out [T, heads, m], which may be a part of wider rows."""
    torch.bmm(x.transpose(0, 1), matrices.transpose(1, 2), out=out.transpose(0, 1))


class IndexParts(NamedTuple):
    """Input and weights of the key of an indexer."""

    joined: Tensor
    """[T, dim + heads]: key before the norm, weights of the heads. Rows may lie apart."""
    norm: Tensor
    """[dim]."""
    bias: Tensor
    """[dim]."""
    eps: float
    interleaved: bool

    def key(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the keys [T, dim] in the dtype of ``joined``: layer norm, then ``rotate_first``."""
        dim = len(self.norm)
        x, weight, bias = (one.to(cos.dtype) for one in (self.joined[:, :dim], self.norm, self.bias))
        normed = F.layer_norm(x, (dim,), weight, bias, self.eps).to(self.joined.dtype)
        return rotate_first(normed, cos, sin, self.interleaved)


def entry_writer(fp8: bool) -> None:
    """Return None: the key of an indexer is written behind the entries of ``latent_rope_cache``.

    Another implementation returns a function that writes entries and keys in one kernel, with the signature
    of ``triton.latent.latent_rope_cache``; of ``latent_rope_cache_fp8`` for a cache in 8 bits.
    """
    return


def both_forms() -> tuple[str, str]:
    """Return the fastest forms: (prefill segment, decode segment)."""
    return ("expanded", "absorbed")


def one_form() -> tuple[str, str]:
    """Return one form for both segments, so the bits of a token do not depend on its segment."""
    return ("absorbed", "absorbed")


for _op in (latent_rope_cache, latent_rope_cache_fp8):
    register(_op.__name__, Implementation(name="torch", run=_op, invariant=True, devices=("cpu",)))
    register(_op.__name__, Implementation(name="torch-cuda", run=_op, devices=("cuda",)))
register("head_product", Implementation(name="torch", run=head_product))
register("entry_writer", Implementation(name="torch", run=entry_writer, invariant=True))
register("head_product_into", Implementation(name="torch", run=head_product_into))
register("latent_up", Implementation(name="torch", run=latent_up, invariant=True))
register("latent_forms", Implementation(name="expanded and absorbed", run=both_forms, priority=1))
register("latent_forms", Implementation(name="absorbed", run=one_form, invariant=True))
