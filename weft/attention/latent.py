"""Latent attention's core, as an interface: one entry ``[latent | rotated key]`` a token serves all heads.

    expanded   keys and values of every head are made from the entries: [k nope | key] and v. That pays for
               many queries.
    absorbed   a query goes through the key matrix instead and attends to the entries themselves; what it gets
               of their latents goes through the value matrix.

Both are the same function, up to rounding. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch

from weft.attention.base import Backend, SegmentInput
from weft.config.spec import CacheSpec, MLASpec

Tensor = torch.Tensor

Form: TypeAlias = Literal["expanded", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpMatrices:
    """What makes keys and values of latents, for each head; in the model's dtype."""

    keys: Tensor
    """[heads, nope, kv_lora]."""
    values: Tensor
    """[heads, v, kv_lora]."""
    packed: Any = None
    """The same in the layouts of the C++ operations, where they serve the model."""


class LatentBackend(Backend):
    """Latent attention over the paged cache, which holds the segment's own entries.

    A backend that lacks something, a form included, says so in ``check``. Invariant is a backend whose rows'
    bits are their own within each form.
    """

    form = "latent"

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, nope + rope] of this segment, not rotated; rows may lie apart
        angles: tuple[Tensor, Tensor],  # cos and sin of its positions, wide [T, rope / 2]
        out: Tensor,  # [T, heads, v], written
        cache: tuple[Tensor, ...],  # entries [blocks, block, kv_lora + rope] of this layer, or as in 8 bits
        segment: SegmentInput,
        kind: int,
        spec: CacheSpec,
        mla: MLASpec,
        up: UpMatrices,
        form: Form,
        prepared: object = None,
    ) -> None:
        """Attends causally (and within ``spec.window``) to entries that are all in the cache.

        ``form``: what suits the segment; a backend with one form for everything takes that. The rest is as in
        ``AttentionBackend.attend``: entries that no query may see can hold NaN, and a segment can be empty.
        """
