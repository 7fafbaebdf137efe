"""Pages of CPU tensors that go back to the operating system."""

from __future__ import annotations

import ctypes
import mmap

import torch

from weft.runner.free_memory import free_pages

PAGES = 4


def test_pages_go_and_addresses_stay() -> None:
    """A part of a page stays, as does a tensor with gaps. A locked page is no error."""
    memory = torch.ones((PAGES + 1) * mmap.PAGESIZE, dtype=torch.uint8)
    begin = -memory.data_ptr() % mmap.PAGESIZE
    inside = memory[begin : begin + PAGES * mmap.PAGESIZE]
    assert free_pages([inside[1:-1]]) == (PAGES - 2) * mmap.PAGESIZE
    assert int(inside.sum()) == 2 * mmap.PAGESIZE  # the first and the last page
    assert free_pages([inside[::2]]) == 0
    lock = ctypes.CDLL(None, use_errno=True)
    address, size = ctypes.c_void_p(inside.data_ptr()), ctypes.c_size_t(mmap.PAGESIZE)
    if lock.mlock(address, size) == 0:
        try:
            assert free_pages([inside[: mmap.PAGESIZE]], shared=True) == 0
            assert int(inside[: mmap.PAGESIZE].sum()) == mmap.PAGESIZE
        finally:
            lock.munlock(address, size)
