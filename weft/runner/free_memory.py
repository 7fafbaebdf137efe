"""Gives the pages of CPU tensors back to the operating system. Addresses stay valid."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import torch

from weft.ops.mapped import advise


def free_pages(tensors: Iterable[torch.Tensor], shared: bool = False) -> int:
    """Give the whole pages inside contiguous CPU tensors back, and return the bytes.

    The tensors keep their addresses. The contents are lost: zeros, or the bytes of a mapped file. Pages that
    the operating system keeps (locked pages) are not counted.
    ``shared``: the tensors may lie in shared memory of this process, which is emptied, too. Never pass
    ``shared`` for tensors that map a file.
    """
    freed = 0
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin >= end:
            continue
        # MADV_REMOVE empties shared memory. Private memory refuses the call, and takes MADV_DONTNEED.
        removed = shared and advise(begin, end, mmap.MADV_REMOVE)
        if removed or advise(begin, end, mmap.MADV_DONTNEED):
            freed += end - begin
    return freed
