"""The header of a GGUF file, checked against the file's size before a library reads the file.

Counts and lengths in a header are numbers of 64 bits: a file of 49 bytes can say that a list with 2^40
entries follows. Here no count is believed that the rest of the file cannot hold.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by its type. Strings and arrays have none of their own."""
_LEAST_PAIR = 8 + 4 + 1
"""Bytes of a key with its value, at least: the length of the key, the type, and the value."""
_LEAST_TENSOR = 8 + 4 + 4 + 8
_MOST_DIMS = 8
_MOST_KEY = 1 << 16
"""Bytes of a key, as the specification limits it."""
_MOST_ELEMENTS = 1 << 50
_MOST_PARTS = 1 << 17
"""Tensors, or keys. The largest models have some thousands, with their experts stacked."""
_MOST_ENTRIES = 4 << 20
"""Entries of all lists together. The largest vocabularies with their merges have a third of them; the library
that reads the file makes several objects of each entry.
"""
_ALIGNMENT_KEY = b"general.alignment"
_UINT32 = 4


class Damaged(ValueError):
    """The header contradicts the specification or the file's size. The message says how."""


class HeaderTensor(NamedTuple):
    """A tensor as the header describes it."""

    name: str
    dims: tuple[int, ...]
    """The fastest first, as the file has them."""
    kind: int
    """The number of its GGML type."""
    offset: int
    """In bytes from the beginning of all tensors."""


class Header(NamedTuple):
    """The facts of a header that are checked."""

    tensors: tuple[HeaderTensor, ...]
    data: int
    """Where tensors begin in the file, in bytes."""
    size: int
    """Of the file, in bytes."""


def read_header(path: Path) -> Header:
    """Walk over the header of the GGUF file ``path``. Raises Damaged, and OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
            raise Damaged("it does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _Walk(mapped, size).header()


class _Walk:
    """A position in the file that only moves over bytes that are there."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        self._mapped = mapped
        self._size = size
        self._at = len(_MAGIC)
        self._alignment = 32
        self._entries = 0

    def header(self) -> Header:
        """Every pair and every tensor of the file. Raises Damaged."""
        (version,) = self._numbers("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise Damaged("its numbers are big-endian, and only little-endian files are read")
            raise Damaged(
                f"version {version} of the format is not read, only {_VERSIONS[0]} and {_VERSIONS[1]}"
            )
        tensors, pairs = self._numbers("<QQ", "the counts of tensors and keys")
        self._holds(tensors, _LEAST_TENSOR, "tensors")
        self._holds(pairs, _LEAST_PAIR, "keys")
        if max(tensors, pairs) > _MOST_PARTS:
            raise Damaged(
                f"it has {tensors} tensors and {pairs} keys, at most {_MOST_PARTS} of each are read"
            )
        for _ in range(pairs):
            self._pair()
        found = tuple(self._tensor() for _ in range(tensors))
        data = -(-self._at // self._alignment) * self._alignment
        return Header(found, data, self._size)

    def _pair(self) -> None:
        key = self._string("a key", _MOST_KEY)
        (kind,) = self._numbers("<I", "a value's type")
        if key == _ALIGNMENT_KEY:
            if kind != _UINT32:
                raise Damaged("general.alignment is not a number of 32 bits")
            (alignment,) = self._numbers("<I", "general.alignment")
            if alignment < 8 or alignment & (alignment - 1):
                raise Damaged(f"general.alignment is {alignment}, not a power of two of at least 8")
            self._alignment = alignment
        elif kind == _ARRAY:
            self._array(key)
        elif kind == _STRING:
            self._string("a value")
        else:
            self._skip(self._size_of(kind, key), "a value")

    def _array(self, key: bytes) -> None:
        kind, count = self._numbers("<IQ", "a list's length")
        if kind == _ARRAY:
            raise Damaged(f"{_shown(key)} is a list of lists, which no key of the format is")
        self._entries += count
        if kind != _STRING:
            each = self._size_of(kind, key)
            self._holds(count, each, f"entries of {_shown(key)}")
            self._at += count * each
            self._few_entries(key)
            return
        self._holds(count, 8, f"entries of {_shown(key)}")
        self._few_entries(key)
        for _ in range(count):
            self._string("a text")

    def _few_entries(self, key: bytes) -> None:
        if self._entries > _MOST_ENTRIES:
            raise Damaged(
                f"its lists up to {_shown(key)} have {self._entries} entries, "
                f"at most {_MOST_ENTRIES} are read"
            )

    def _tensor(self) -> HeaderTensor:
        name = self._string("a tensor's name", _MOST_KEY)
        (count,) = self._numbers("<I", "a tensor's number of dims")
        if count > _MOST_DIMS:
            raise Damaged(f"tensor {_shown(name)} has {count} dims")
        dims = self._numbers(f"<{count}Q", "a tensor's dims")
        kind, offset = self._numbers("<IQ", "a tensor's type")
        elements = 1
        for dim in dims:
            elements *= dim  # Python's integers do not overflow, the library's may
        if not elements or elements > _MOST_ELEMENTS:
            raise Damaged(f"tensor {_shown(name)} has dims {list(dims)}")
        try:
            return HeaderTensor(name.decode(), dims, kind, offset)
        except UnicodeDecodeError:
            raise Damaged(f"the name of tensor {_shown(name)} is not UTF-8") from None

    def _size_of(self, kind: int, key: bytes) -> int:
        if kind not in _SIZES:
            raise Damaged(f"{_shown(key)} has a value of the unknown type {kind}")
        return _SIZES[kind]

    def _string(self, what: str, most: int | None = None) -> bytes:
        (length,) = self._numbers("<Q", f"the length of {what}")
        if most is not None and length > most:
            raise Damaged(f"{what} has {length} bytes")
        begin = self._at
        self._skip(length, what)
        return self._mapped[begin : self._at]

    def _numbers(self, form: str, what: str) -> tuple[int, ...]:
        begin = self._at
        self._skip(struct.calcsize(form), what)
        return struct.unpack_from(form, self._mapped, begin)

    def _skip(self, count: int, what: str) -> None:
        left = self._size - self._at
        if count > left:
            raise Damaged(f"{what} takes {count} bytes at {self._at}, and the file has {left} more")
        self._at += count

    def _holds(self, count: int, least: int, what: str) -> None:
        """Raises Damaged unless the rest of the file can hold ``count`` things of ``least`` bytes."""
        left = self._size - self._at
        if count > left // least:
            raise Damaged(f"it says that {count} {what} follow, and the file has {left} more bytes")


def _shown(name: bytes) -> str:
    return repr(name[:80].decode(errors="replace"))
