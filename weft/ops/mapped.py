"""Files that are mapped, and their pages: dropped behind what was read, so that no file is in memory beside
what is made of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import re
from dataclasses import dataclass
from pathlib import Path

import torch

#: With a page that is read the system maps those around it that it has: Linux a piece of its cache.
_AROUND = 2 << 20
_LINE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) r[w-][x-]p \S+ \S+ ([1-9]\d*) ", re.ASCII)


@dataclass(frozen=True, slots=True, eq=False)
class Mapped:
    """Addresses of a file that is mapped privately and written by nobody."""

    owner: torch.Tensor
    """One that lies in there: as long as it is, nothing else can."""
    begin: int
    end: int

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether it begins in there; an empty one does not."""
        return tensor.nbytes > 0 and self.begin <= tensor.data_ptr() < self.end

    def drop(self, tensor: torch.Tensor | None = None) -> None:
        """Takes the pages of ``tensor`` and around it, or all, from this process: they are read again.

        Of a tensor that is not in there nothing.
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
        with contextlib.suppress(OSError, AttributeError):  # other systems than Linux may lack it
            _library().madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def mapped_around(tensor: torch.Tensor) -> Mapped | None:
    """The private mapping of a file that ``tensor`` lies in; None where that is other memory, or nobody
    says.
    """
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
    """Of a tensor that is all of what was mapped."""
    return Mapped(tensor, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
