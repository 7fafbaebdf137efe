"""Interface of latent attention's core: one entry ``[latent | rotated key]`` per token serves all heads.

    expanded   the entries are expanded to keys and values of every head: [k nope | key] and v. Cheaper for
               many queries.
    absorbed   a query is multiplied with the key matrix and attends to the entries themselves; the sum of
               latents is then multiplied with the value matrix. Cheaper for few queries.

Both forms compute the same function, up to rounding. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from weft.attention.base import Backend, CoreInput
from weft.attention.mla.up_adapters import UpRows
from weft.config.spec import CacheSpec, MLASpec

Tensor = torch.Tensor

Form: TypeAlias = Literal["expanded", "absorbed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpMatrices:
    """Matrices that turn latents into keys and values, per head, in the model's dtype."""

    keys: Tensor
    """[heads, nope, kv_lora]."""
    values: Tensor
    """[heads, v, kv_lora]."""
    packed: Any = None
    """Both matrices in the layouts of the C++ operations; None if the C++ operations do not serve the
    model."""


class LatentInput(NamedTuple):
    """Arguments of core attention that only latent attention takes."""

    angles: tuple[Tensor, Tensor]
    """cos and sin of the positions of the queries, wide [T, rope / 2] each."""
    kind: int
    """KV cache group of the layer."""
    spec: CacheSpec
    """Spec of the group."""
    mla: MLASpec
    up: UpMatrices
    form: Form
    """Preferred form for the segment; a backend with a single form ignores the field."""
    low: UpRows | None = None
    """LoRA adapters of the key and value matrices. Requires the form ``absorbed``; queries are scaled."""


class LatentBackend(Backend):
    """Latent attention over the paged cache. The cache already contains the segment's entries.

    ``check`` rejects everything that a backend does not support, forms included. An invariant backend has
    batch-independent bits within each form; the two forms may differ.
    """

    form = "latent"

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, nope + rope] of this segment, not rotated; rows may lie apart
        out: Tensor,  # [T, heads, v], written
        core: CoreInput,
        latent: LatentInput,
    ) -> None:
        """Attend causally (and within ``latent.spec.window``) to entries in ``core.caches[latent.kind]``.

        Writes ``out``.
        As in ``AttentionBackend.attend``, invisible entries may hold NaN, and a segment may be empty.
        """
