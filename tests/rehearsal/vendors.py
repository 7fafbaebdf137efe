"""Stand-ins for third-party kernels: FlashInfer's paged attention."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tests.rehearsal.device import NotCapturable, current
from tests.rehearsal.kernels import BadLaunch

Tensor = torch.Tensor


def _need(holds: bool, what: str) -> None:
    if not holds:
        raise BadLaunch(f"flashinfer: {what}")


class PagedWrapper:
    """``flashinfer.BatchPrefillWithPagedKVCacheWrapper``: planned from host columns, run for each layer."""

    def __init__(self, workspace: Tensor, kv_layout: str) -> None:
        _need(isinstance(workspace, FakeTensor), "the workspace is on the device")
        _need(workspace.dtype == torch.uint8, "the workspace is bytes")
        _need(workspace.numel() >= 128 << 20, "the workspace has 128 MiB at least")
        _need(kv_layout == "HND", "the cache is laid out by heads")
        self._workspace = workspace
        self._planned: dict[str, Any] | None = None

    def plan(
        self,
        queries: Tensor,
        entries: Tensor,
        indices: Tensor,
        last: Tensor,
        heads: int,
        kv_heads: int,
        dim: int,
        block: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        made = current()
        if made.capture is not None:
            raise NotCapturable("FlashInfer plans on the host")
        for column in (queries, entries, last):
            _need(
                not isinstance(column, FakeTensor), "columns of rows are on the host: else it waits for them"
            )
            _need(column.dtype == torch.int32 and column.is_contiguous(), "columns of rows are int32")
        _need(
            isinstance(indices, FakeTensor) and indices.dtype == torch.int32, "blocks are int32 on the device"
        )
        _need(len(queries) == len(entries) == len(last) + 1, "as many entries as rows")
        _need(int(entries[-1]) == len(indices), "every block has an entry")
        _need(bool((last >= 1).all() and (last <= block).all()), "a row's last block is not empty")
        _need(causal and window_left >= -1 and sm_scale > 0, "a scale and a window")
        made.use("flashinfer plan", [indices], [self._workspace])
        self._planned = {
            "tokens": int(queries[-1]),
            "q": (heads, dim),
            "cache": (2, kv_heads, block, dim),
            "dtypes": (q_data_type, kv_data_type),
            "indices": indices,
        }

    def run(self, q: Tensor, cache: Tensor, *, out: Tensor) -> None:
        plan = self._planned
        _need(plan is not None, "a wrapper runs before it is planned")
        assert plan is not None
        _need(tuple(q.shape) == (plan["tokens"], *plan["q"]), f"queries {tuple(q.shape)}, not as planned")
        _need(out.shape == q.shape and out.dtype == q.dtype, "the output is like the queries")
        _need(tuple(cache.shape[1:]) == plan["cache"], f"a cache of {tuple(cache.shape)}, not as planned")
        _need((q.dtype, cache.dtype) == plan["dtypes"], "dtypes as planned")
        _need(q.stride(-1) == 1 and cache.is_contiguous(), "heads are contiguous")
        _need(q.storage_offset() * q.itemsize % 16 == 0, "queries are aligned to 16 bytes")
        current().use("flashinfer run", [q, cache, plan["indices"]], [out, self._workspace])


def install(patch: pytest.MonkeyPatch) -> None:
    """Make ``import flashinfer`` find the stand-in."""
    module: Any = types.ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = PagedWrapper
    patch.setitem(sys.modules, "flashinfer", module)
