"""Memory-mapped files. Pages are released after reading, so a file is not in memory twice."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import torch

# Reading a page also maps cached pages around it. Linux maps one piece of its page cache.
_AROUND = 2 << 20
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r[w-][x-]p \S+ \S+ ([1-9]\d*) ", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Address range of a file that is mapped privately and never written."""

    owner: torch.Tensor
    """A tensor inside the range, which keeps the mapping alive."""
    begin: int
    end: int

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` is not empty and begins in the range."""
        return tensor.nbytes > 0 and self.begin <= tensor.data_ptr() < self.end

    def drop(self, tensor: torch.Tensor | None = None) -> None:
        """Release the pages of ``tensor`` and around it, or of the whole range. Later reads load pages again.

        Does nothing for a tensor outside the range, or on systems without ``madvise``.
        """
        begin, end = self.begin, self.end
        if tensor is not None:
            if not self.has(tensor):
                return
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            behind = tensor.data_ptr() + (last + 1) * tensor.element_size()
            begin = max(begin, tensor.data_ptr() - _AROUND)
            end = min(end, behind + _AROUND)
        first = begin // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError, AttributeError):  # other systems than Linux may lack madvise
            advise(first, end, mmap.MADV_DONTNEED)


def advise(begin: int, end: int, advice: int) -> bool:
    """Give the operating system advice about addresses ``begin`` .. ``end`` - 1. ``begin``: of a page. Return
    False for refused advice."""
    call = _library().madvise
    return call(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice) == 0


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def mapped_around(tensor: torch.Tensor) -> Mapped | None:
    """Return the private file mapping around ``tensor``; None for other memory or without /proc."""
    address = tensor.data_ptr()
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        found = _LINE.match(line)
        if found is not None and int(found[1], 16) <= address < int(found[2], 16):
            return Mapped(tensor, int(found[1], 16), int(found[2], 16))
    return None


def all_mapped(tensor: torch.Tensor) -> Mapped:
    """Return the range of a tensor that spans a whole mapping."""
    return Mapped(tensor, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
