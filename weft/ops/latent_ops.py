"""What latent attention has beside core attention, in torch: the cache line, and which form a segment takes.

Importing registers the ops.
"""

from __future__ import annotations

import torch

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
    cos, sin = cos.view(shape), sin.view(shape)
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
    """Writes each token's line ``[normalized latent | rotated key]``; returns the queries' part [T, first].

    joined: [T, first + kv_lora + rope]. q_weight [first]: RMS norm of the queries' part, None for none;
    weight [kv_lora]: of the latent. cos, sin: [T, rope / 2] (wide). cache: [blocks, block, kv_lora + rope] of
    one layer, written at ``writes``, int64 [T]: block id * block + offset.
    """
    lora, rope = weight.shape[0], 2 * cos.shape[1]
    q, latent, key = joined.split((joined.shape[1] - lora - rope, lora, rope), dim=1)
    line = torch.cat((rms_norm(latent, weight, eps), rotate_pairs(key, cos, sin, interleaved)), dim=1)
    cache.view(-1, lora + rope).index_copy_(0, writes, line.to(cache.dtype))
    return q if q_weight is None else rms_norm(q, q_weight, eps)


def latent_up(keys: Tensor, values: Tensor) -> None:
    """What the C++ backend takes of the key and value matrices: nothing here."""
    return


def both_forms() -> tuple[str, str]:
    """(prefill segment, decode segment): each the form that it is fastest in."""
    return ("expanded", "absorbed")


def one_form() -> tuple[str, str]:
    """The same for both: a token's bits don't depend on the segment that it is computed in."""
    return ("absorbed", "absorbed")


register(
    "latent_rope_cache",
    Implementation(name="torch", run=latent_rope_cache, invariant=True, devices=("cpu",)),
)
register("latent_rope_cache", Implementation(name="torch-cuda", run=latent_rope_cache, devices=("cuda",)))
register("latent_up", Implementation(name="torch", run=latent_up, invariant=True))
register("latent_forms", Implementation(name="expanded and absorbed", run=both_forms, priority=1))
register("latent_forms", Implementation(name="absorbed", run=one_form, invariant=True))
