"""Sparse attention of the CPU extension (csrc/sparse.cpp), in bf16 and float32.

One call per segment for the choice of groups, and one call for core attention; nothing is planned. The bits
of a token depend on its own query and on the visible entries in order, not on other tokens or threads.
"""

from __future__ import annotations

import torch

from weft.attention.base import CoreInput, LayerCache, SegmentInput
from weft.attention.sparse.sparse import Reads, SparseBackend
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.cpu.served import check_built, check_served

Tensor = torch.Tensor

MAX_DIM = 1024
"""Maximum elements of a query, and of an indexer's key."""


class CpuSparse(SparseBackend):
    """Supports bf16 and float32, any window and block size, and sizes that are multiples of 16.

    Stateless, so threads may share an instance. bf16: products are exact, sums and exponentials float32.
    Weights are rounded to bf16 before the product with values, and outputs once.
    """

    invariant = True
    capturable = True
    by_token = True

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError for an unsupported model, dtype or device, or without the compiled operations."""
        check_served("attention backend 'cpu'", dtype, device)
        sizes = _sizes(spec)
        if cache.fp8:
            sizes.append(("codes of an entry in 8 bits", cache.width - cache.exact))
        for what, size in sizes:
            if size % 16 or not 0 < size <= MAX_DIM:
                raise ConfigError(
                    f"attention backend 'cpu' has no sparse attention with {what} of {size}: it needs a "
                    f"multiple of 16 up to {MAX_DIM}",
                    param="--attention-backend",
                )
        check_built("attention backend 'cpu'")

    def plan(self, segment: SegmentInput, reads: Reads, caches: LayerCache) -> None:
        return None

    def select(self, q: Tensor, weights: Tensor, core: CoreInput, reads: Reads) -> Tensor:
        """Return the chosen groups of each token; see ``SparseBackend.select``."""
        assert reads.groups is not None
        segment = core.segment
        made: Tensor = torch.ops.weft_cpu.sparse_select.default(
            q,
            weights.contiguous(),
            core.caches[reads.groups][-1],
            segment.q_offsets,
            segment.starts,
            segment.tables[reads.groups],
            reads.ratio,
            reads.top,
        )
        return made

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, reads: Reads, selected: Tensor | None) -> None:
        """Write ``out`` by the compiled operation; see ``SparseBackend.attend``."""
        segment = core.segment
        entries, entry_scales, entry_exact, entry_table = _cache(core, reads.entries)
        groups, group_scales, group_exact, group_table = _cache(core, reads.groups)
        torch.ops.weft_cpu.sparse_attend.default(
            q,
            out,
            segment.q_offsets,
            segment.starts,
            entries,
            entry_table,
            reads.window,
            groups,
            group_table,
            reads.ratio,
            selected,
            core.sinks,
            core.scale,
            entry_scales=entry_scales,
            entry_exact=entry_exact,
            group_scales=group_scales,
            group_exact=group_exact,
        )


def _cache(core: CoreInput, kind: int | None) -> tuple[Tensor | None, ...]:
    """Return (entries or codes, scales, exact elements, block table) of a KV cache group; None: not there."""
    if kind is None:
        return (None, None, None, None)
    first, *beside = core.caches[kind]
    scales, exact = beside or (None, None)
    return (first, scales, exact, core.segment.tables[kind])


def _sizes(spec: ModelSpec) -> list[tuple[str, int]]:
    """Return the sizes of entries and queries to check, with names."""
    if spec.mla is not None and spec.index is not None:
        mla = spec.mla
        return [
            ("kv_lora + rope", mla.kv_lora + mla.rope),
            ("kv_lora", mla.kv_lora),
            ("index_head_dim", spec.index.dim),
        ]
    sizes = [("head_dim", spec.head_dim)]
    if spec.sparse is not None and "chosen" in spec.sparse.types:
        sizes.append(("index_head_dim", spec.sparse.index_dim))
    return sizes
