"""Latent attention of the CPU extension (csrc/latent.cpp), in bf16 and float32, both forms.

One call per segment, including the products with the key and value matrices; nothing is prepared. Within a
form, the bits of a row depend only on its own query and entries.
"""

from __future__ import annotations

import torch

from weft.attention.base import CoreInput
from weft.attention.mla.latent import LatentBackend, LatentInput
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.latent import PackedUp
from weft.ops.cpu.served import check_built, check_served

Tensor = torch.Tensor

MAX_DIM = 1024
"""Maximum elements of an entry, and of a head's key."""


class CpuLatent(LatentBackend):
    """Supports bf16 and float32, any block size and window, and sizes that are multiples of 16.

    Stateless, so threads may share an instance. bf16: products are exact and sums float32. Absorbed queries,
    latent results, expanded keys and values, weights and outputs are rounded to bf16 once each.
    """

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        mla = spec.mla
        assert mla is not None
        check_served("attention backend 'cpu'", dtype, device)
        for what, size in (("kv_lora", mla.kv_lora), ("rope", mla.rope), ("nope", mla.nope), ("v", mla.v)):
            if size % 16:
                raise ConfigError(
                    f"attention backend 'cpu' has no latent attention with {what} of {size}: it needs "
                    "multiples of 16",
                    param="--attention-backend",
                )
        if max(cache.width, mla.nope + mla.rope, mla.v) > MAX_DIM:
            raise ConfigError(
                f"attention backend 'cpu' has no entries or heads of more than {MAX_DIM} elements",
                param="--attention-backend",
            )
        check_built("attention backend 'cpu'")

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, latent: LatentInput) -> None:
        """Write ``out`` by the compiled operation of ``form``; see ``LatentBackend.attend``.

        ``up`` must be packed.
        """
        segment = core.segment
        mla = latent.mla
        packed = latent.up.packed
        assert isinstance(packed, PackedUp)
        op = torch.ops.weft_cpu
        absorbed = latent.form == "absorbed"
        cache = core.caches[latent.kind]
        entries, scales, keys = cache if latent.spec.fp8 else (cache[0], None, None)
        low, more, sums = latent.low, None, None
        if low is not None:
            more = low.queries(q[..., : mla.nope])
            sums = q.new_empty(*q.shape[:2], mla.kv_lora)
        further = {"more": more, "sums": sums} if absorbed else {}
        (op.latent_absorbed if absorbed else op.latent_expanded).default(
            q,
            *latent.angles,
            mla.interleaved,
            out,
            entries,
            segment.q_offsets,
            segment.starts,
            segment.tables[latent.kind],
            packed.absorb if absorbed else packed.keys,
            packed.values,
            mla.kv_lora,
            latent.spec.window,
            core.scale,
            scales=scales,
            rotated=keys,
            **further,
        )
        if low is not None and sums is not None:
            low.add_values(out, sums)
