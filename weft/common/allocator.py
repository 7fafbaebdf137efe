"""What a process asks of the C library's allocator. Elsewhere than on glibc nothing happens."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
_MMAP_BYTES = 256 << 10
_TRIM_BYTES = 8 << 20
_ARENAS = 2


def keep_heap_small() -> None:
    """Makes large allocations mappings of their own, given back when they are freed.

    By default glibc raises the size from which it maps, up to 32 MiB, when such a mapping is freed; then
    bodies of requests lie in the heap, which they fragment. To be called before threads start.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def trim_heap() -> None:
    """Gives freed memory back to the system, as far as possible. Takes milliseconds, not Python's lock."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


# fmt: off
_INFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)
# fmt: on


class _Info(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [(name, ctypes.c_size_t) for name in _INFO]


def heap_bytes() -> int:
    """Bytes that this process has allocated from the C library; the resident bytes where it does not say."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    ask.restype = _Info
    info = ask()
    return int(info.uordblks) + int(info.hblkhd)
