"""Gives the pages of CPU tensors back to the operating system. Addresses stay valid."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch


def free_pages(tensors: Iterable[torch.Tensor], shared: bool = False) -> int:
    """Give the whole pages inside contiguous CPU tensors back, and return the bytes.

    The tensors keep their addresses. The contents are lost: zeros, or the bytes of a mapped file. Pages that
    the operating system keeps (locked pages) are not counted.
    ``shared``: the tensors may lie in shared memory of this process, which is emptied, too. Never pass
    ``shared`` for tensors that map a file.
    """
    call = ctypes.CDLL(None).madvise
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    freed = 0
    for tensor in tensors:
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            continue
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        if begin >= end:
            continue
        # MADV_REMOVE empties shared memory. Private memory refuses the call, and takes MADV_DONTNEED.
        removed = shared and call(begin, end - begin, mmap.MADV_REMOVE) == 0
        if removed or call(begin, end - begin, mmap.MADV_DONTNEED) == 0:
            freed += end - begin
    return freed
