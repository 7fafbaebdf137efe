"""Paged attention by FlashInfer, if installed: ``--attention-backend flashinfer``.

FlashInfer's paged layout "HND" equals Weft's layout, so FlashInfer reads the cache directly. A wrapper is
planned once per step, for each segment and KV cache group, from host columns. The plan serves every layer.
Plans are staged through pinned memory of the wrapper. So a wrapper is reused only after its last plan has no
reader and the staging copy has ended.

Lengths come from the host's upper bounds, which are exact unless a verify row is in flight.

Source: Ye et al. 2025, arXiv 2501.01005.
"""

from __future__ import annotations

import importlib
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from weft.attention.base import AttentionBackend, CoreInput, SegmentInput, refuse_fp8
from weft.attention.gqa.reach import refuse_traits
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec, ModelSpec
from weft.ops.upload import upload

Tensor = torch.Tensor

WORKSPACE = 256 << 20
"""Bytes for the states of split keys, shared by all wrappers: launches on one stream run one after the
other."""
DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Input of FlashInfer's plan for one segment. int32 on the host, except ``indices``."""

    queries: Tensor
    """[R + 1]: first query of each row."""
    entries: Tensor
    """[R + 1]: first page of each row."""
    last: Tensor
    """[R]: number of positions in each row's last page, 1 .. block."""
    indices: Tensor
    """int32 on the device: blocks of every row, from the first block visible to the row's first query."""


def pages_of(segment: SegmentInput, table: Tensor, window: int, block: int) -> Pages:
    """Return the blocks of each row, for queries and keys of the segment.

    Blocks outside a window are left out, because other sequences may own them. ``block``: positions per
    block.
    """
    starts = segment.host_starts.astype(np.int64)
    ends = starts + segment.host_counts
    # [R]: first visible block of each row, and number of blocks from there
    first = np.maximum(starts - window + 1, 0) // block if window else np.zeros_like(starts)
    count = -(-ends // block) - first
    offsets = np.concatenate(([0], np.cumsum(count)))
    rows = np.repeat(np.arange(segment.rows), count)
    entries = np.arange(offsets[-1]) + np.repeat(first - offsets[:-1], count)
    where = upload(np.stack([rows, entries]), table.device)
    queries = np.concatenate(([0], np.cumsum(segment.host_counts)))
    return Pages(
        queries=_column(queries),
        entries=_column(offsets),
        last=_column((ends - 1) % block + 1),
        indices=table[where[0], where[1]].int(),
    )


def _column(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


@dataclass(slots=True, weakref_slot=True)
class _FlashInferPrepared:
    """Plan of a segment: made at the first layer, because ``prepare`` does not know the heads."""

    wrapper: Any = None


@dataclass(slots=True)
class _Wrapper:
    wrapper: Any
    user: weakref.ref[_FlashInferPrepared]
    staged: torch.cuda.Event


class FlashInferAttention(AttentionBackend):
    """FlashInfer's prefill kernels for both segments. For decode rows the prefill kernels also use the matrix
    units."""

    def __init__(self) -> None:
        self._wrappers: list[_Wrapper] = []
        self._workspace: Tensor | None = None

    def check(
        self, cache: CacheSpec, spec: ModelSpec, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raise ConfigError without the library, and for a model, dtype or device without support."""
        refuse_traits("flashinfer", cache, spec)
        try:
            importlib.import_module("flashinfer")
        except ImportError as error:
            raise ConfigError(
                f"attention backend 'flashinfer' needs flashinfer-python, which does not import ({error}): "
                "pip install flashinfer-python",
                param="--attention-backend",
            ) from error
        if device.type != "cuda":
            raise ConfigError(
                f"attention backend 'flashinfer' does not run on {device.type}", param="--device"
            )
        refuse_fp8("flashinfer", cache)
        if dtype not in DTYPES:
            raise ConfigError(f"attention backend 'flashinfer' has no {dtype}", param="--dtype")
        if spec.heads % cache.kv_heads:
            raise ConfigError(
                f"{spec.heads} query heads cannot share {cache.kv_heads} KV heads", param="--model"
            )
        if spec.sinks:
            raise ConfigError(
                "attention backend 'flashinfer' has no attention sinks", param="--attention-backend"
            )
        if cache.head_dim not in DIMS:
            raise ConfigError(
                f"attention backend 'flashinfer' has heads of {', '.join(map(str, DIMS))} dims, not of "
                f"{cache.head_dim}",
                param="--attention-backend",
            )

    def prepare(
        self, segment: SegmentInput, kind: int, spec: CacheSpec, block_size: int, dtype: torch.dtype
    ) -> _FlashInferPrepared:
        return _FlashInferPrepared()

    def attend(self, q: Tensor, out: Tensor, core: CoreInput, kind: int, spec: CacheSpec) -> None:
        """Write ``out``; see ``AttentionBackend.attend``.

        The first layer of a step plans, and the plan stays in ``prepared`` for the other layers.
        """
        if not core.segment.tokens:
            return
        prepared = core.prepared if isinstance(core.prepared, _FlashInferPrepared) else _FlashInferPrepared()
        if prepared.wrapper is None:
            prepared.wrapper = self._plan(prepared, q, core, kind, spec)
        prepared.wrapper.run(q, core.caches[kind][0], out=out)

    def _plan(
        self, prepared: _FlashInferPrepared, q: Tensor, core: CoreInput, kind: int, spec: CacheSpec
    ) -> Any:
        """Plan the kernels for all layers of a step and return the library's wrapper.

        Copies to the device.
        """
        cache = core.caches[kind][0]
        pages = pages_of(core.segment, core.segment.tables[kind], spec.window, cache.shape[3])
        entry = self._take(prepared, q.device)
        entry.wrapper.plan(
            pages.queries,
            pages.entries,
            pages.indices,
            pages.last,
            q.shape[1],
            spec.kv_heads,
            spec.head_dim,
            cache.shape[3],
            causal=True,
            sm_scale=core.scale,
            window_left=spec.window - 1 if spec.window else -1,
            q_data_type=q.dtype,
            kv_data_type=cache.dtype,
        )
        entry.staged.record()
        return entry.wrapper

    def _take(self, user: _FlashInferPrepared, device: torch.device) -> _Wrapper:
        """Return an unused wrapper, with its last plan staged. Makes a new wrapper if no other is free."""
        for entry in self._wrappers:
            # ``user`` is dead once the step of the last plan is gone; then no launch of the plan can follow.
            if entry.user() is None and entry.staged.query():
                entry.user = weakref.ref(user)
                return entry
        library: Any = importlib.import_module("flashinfer")
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, kv_layout="HND")
        entry = _Wrapper(wrapper, weakref.ref(user), torch.cuda.Event())
        self._wrappers.append(entry)
        return entry
