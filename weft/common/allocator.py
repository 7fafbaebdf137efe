"""Settings of the C library's allocator. No effect on libraries other than glibc."""

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
    """Make glibc map large allocations separately, so that freed memory returns to the system.

    Does nothing without glibc. By default glibc raises the mapping threshold, up to 32 MiB, after each freed
    mapping. Request bodies are then allocated in the heap and fragment the heap. Call before threads start.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES)
        library.mallopt(_M_ARENA_MAX, _ARENAS)


def trim_heap() -> None:
    """Return freed memory to the system where possible. Takes milliseconds, without holding the GIL."""
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
    """Return the bytes allocated from the C library; without glibc 2.33, the resident bytes."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE
    mallinfo2.restype = _Info
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)
