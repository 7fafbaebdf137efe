"""Paged attention of the CPU extension (csrc/attention.cpp), in bf16 and float32.

One call per segment for prefill and decode rows; nothing is prepared. Rows are reduced over tiles of keys at
absolute positions, so the bits of a row depend only on its own query, keys and values.
"""

from __future__ import annotations

import torch

from weft.attention.base import AttentionBackend, CoreInput
from weft.attention.gqa.reach import kernel_window
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.served import check_built, check_served

Tensor = torch.Tensor

MAX_DIM = 512
MAX_GROUP = 192
"""Maximum query heads per KV head."""


class CpuAttention(AttentionBackend):
    """Supports bf16 and float32, head sizes that are multiples of 16 up to 512, and any block size,
    window and chunk.

    Stateless, so threads may share an instance. bf16: products are exact, sums and exponentials float32.
    Weights are rounded to bf16 before the product with values, and outputs once.
    """

    invariant = True
    capturable = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        check_served("attention backend 'cpu'", dtype, device)
        if not 0 < cache.head_dim <= MAX_DIM or cache.head_dim % 16:
            raise ConfigError(
                f"attention backend 'cpu' has no heads of {cache.head_dim}: it needs a multiple of 16 "
                f"up to {MAX_DIM}",
                param="--attention-backend",
            )
        if spec.heads % cache.kv_heads:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )
        if spec.heads // cache.kv_heads > MAX_GROUP:
            raise ConfigError(
                f"attention backend 'cpu' lets {MAX_GROUP} query heads share a KV head, "
                f"not {spec.heads // cache.kv_heads}",
                param="--attention-backend",
            )
        check_built("attention backend 'cpu'")

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        segment = core.segment
        tensors = core.caches[kind]
        torch.ops.weft_cpu.attend.default(
            q,
            out,
            tensors[0],
            segment.q_offsets,
            segment.starts,
            segment.tables[kind],
            kernel_window(spec),
            core.scale,
            sinks=core.sinks,
            scales=tensors[1] if spec.fp8 else None,
            softcap=core.softcap,
            ends=segment.end_of(kind),
        )
