"""The KV cache's memory: for each cache kind one allocation, for each layer a view of it."""

from __future__ import annotations

import torch

from weft.config.resolved import KVConfig


def allocate(kv: KVConfig, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """One tensor a layer, in layer order: ``[1 + num_blocks, 2, kv_heads, block, head_dim]``.

    Block 0 is the null block: padding of tables points at it, no row's own positions ever do.
    """
    layers: dict[int, torch.Tensor] = {}
    for pool in kv.pools:
        cache = pool.cache
        memory = torch.zeros(
            len(cache.layers),
            1 + pool.num_blocks,
            2,
            cache.kv_heads,
            pool.block_size,
            cache.head_dim,
            dtype=dtype,
            device=device,
        )
        layers.update(zip(cache.layers, memory, strict=True))
    return [layers[number] for number in sorted(layers)]
