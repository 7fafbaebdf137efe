"""What latent attention has beside core attention, in torch: the cache entry, and which form a segment takes.

Importing registers the ops.
"""

from __future__ import annotations

import torch

from weft.ops import kv_fp8
from weft.ops.registry import Implementation, register
from weft.ops.torch_ops import rms_norm

Tensor = torch.Tensor


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of x [T, ..., dim] by cos, sin [T, dim / 2] (wide), in x's dtype; leaves as halves.

    interleaved: pairs come as neighbours (2 i, 2 i + 1), else as halves (i, i + dim / 2). Scores don't depend
    on the order of dims that queries and keys share. Source: Su et al. 2021, arXiv 2104.09864.
    """
    exact = x.to(cos.dtype)
    first, second = (exact[..., ::2], exact[..., 1::2]) if interleaved else exact.chunk(2, dim=-1)
    shape = (cos.shape[0], *(1,) * (x.dim() - 2), cos.shape[1])
    cos = cos.view(shape)
    sin = sin.view(shape)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


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
    """Writes each token's entry ``[normalized latent | rotated key]``; returns the queries' part [T, first].

    joined: [T, first + kv_lora + rope]. q_weight [first]: RMS norm of the queries' part, None for none;
    weight [kv_lora]: of the latent. cos, sin: [T, rope / 2] (wide). cache: [blocks, block, kv_lora + rope] of
    one layer, written at ``writes``, int64 [T]: block id * block + offset.
    """
    q, *entry = _parts(joined, q_weight, weight, eps, cos, sin, interleaved)
    cache.view(-1, cache.shape[2]).index_copy_(0, writes, torch.cat(entry, dim=1).to(cache.dtype))
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
    """``latent_rope_cache`` into a cache in 8 bits.

    cache: latents E4M3 [blocks, block, kv_lora]; scales: float32 [blocks, block]; keys: rotated, in joined's
    dtype, [blocks, block, rope].
    """
    q, latent, key = _parts(joined, q_weight, weight, eps, cos, sin, interleaved)
    kv_fp8.write(cache, scales, writes, latent)
    keys.view(-1, keys.shape[2]).index_copy_(0, writes, key)
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
    """Of each token the queries' part and the latent, normalized, and the rotated key."""
    lora = weight.shape[0]
    rope = 2 * cos.shape[1]
    q, latent, key = joined.split((joined.shape[1] - lora - rope, lora, rope), dim=1)
    if q_weight is not None:
        q = rms_norm(q, q_weight, eps)
    return q, rms_norm(latent, weight, eps), rotate_pairs(key, cos, sin, interleaved)


def latent_up(keys: Tensor, values: Tensor) -> None:
    """What the C++ backend takes of the key and value matrices: nothing here."""
    return


def head_product(x: Tensor, matrices: Tensor, packed: object) -> Tensor:
    """x [T, heads, n] through each head's own matrix of ``matrices`` [heads, m, n]: [T, heads, m].

    packed: what ``latent_up`` made of the same matrices, for the implementations that take it.
    """
    return torch.einsum("thn,hmn->thm", x, matrices)


def both_forms() -> tuple[str, str]:
    """(prefill segment, decode segment): each the form that it is fastest in."""
    return ("expanded", "absorbed")


def one_form() -> tuple[str, str]:
    """One form for both segments: a token's bits don't depend on the segment that it is computed in."""
    return ("absorbed", "absorbed")


for _op in (latent_rope_cache, latent_rope_cache_fp8):
    register(_op.__name__, Implementation(name="torch", run=_op, invariant=True, devices=("cpu",)))
    register(_op.__name__, Implementation(name="torch-cuda", run=_op, devices=("cuda",)))
register("head_product", Implementation(name="torch", run=head_product))
register("latent_up", Implementation(name="torch", run=latent_up, invariant=True))
register("latent_forms", Implementation(name="expanded and absorbed", run=both_forms, priority=1))
register("latent_forms", Implementation(name="absorbed", run=one_form, invariant=True))
