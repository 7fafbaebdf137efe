"""Private memory in huge pages, for caches and landing memory that a transport registers but does not map."""

from __future__ import annotations

import contextlib
import mmap

import torch

_HUGE = 2 << 20


def huge_memory(nbytes: int) -> torch.Tensor:
    """Return zeroed memory, uint8 [nbytes], in huge pages where the system has huge pages. Pages take no
    memory before the first write.

    A read by another process pins each page, so small pages halve the rate of cross-memory attach.
    """
    pages = mmap.mmap(-1, nbytes + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(pages, dtype=torch.uint8)
    begin = -whole.data_ptr() % _HUGE
    return whole[begin : begin + nbytes]
