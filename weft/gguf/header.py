"""Header of a GGUF file: metadata and tensor descriptions, checked against the file's size.

Counts and lengths in a header have 64 bits: a file of 49 bytes can announce a list with 2^40 entries. Every
count is checked against the rest of the file before use.

Source: the GGUF specification (ggml-org/ggml, docs/gguf.md).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_FORMS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Type number -> ``struct`` format of a number."""
_LEAST_PAIR = 8 + 4 + 1
"""Minimum bytes of a key with a value: length of the key, type, value."""
_LEAST_TENSOR = 8 + 4 + 4 + 8
_MOST_DIMS = 8
_MOST_KEY = 1 << 16
"""Maximum bytes of a key in the specification."""
_MOST_ELEMENTS = 1 << 50
_MOST_PARTS = 1 << 17
"""Maximum number of tensors, and of keys. The largest models have some thousands, with stacked experts."""
_MOST_ENTRIES = 4 << 20
"""Maximum entries of all lists together: three times the largest vocabularies with merges."""
_ALIGNMENT_KEY = "general.alignment"
_UINT32 = 4


class Damaged(ValueError):
    """The header contradicts the specification or the file's size. The message has the details."""


class HeaderTensor(NamedTuple):
    """A tensor as described in the header."""

    name: str
    dims: tuple[int, ...]
    """Dimensions in the file's order, the fastest first."""
    kind: int
    """Number of the GGML type."""
    offset: int
    """Offset in bytes from the start of all tensors."""


class Header(NamedTuple):
    """Checked contents of a header."""

    metadata: dict[str, Any]
    """Metadata by key: numbers, booleans, strings, and lists of these types."""
    tensors: tuple[HeaderTensor, ...]
    data: int
    """Offset of the first tensor in the file, in bytes."""
    size: int
    """Size of the file in bytes."""


def read_header(path: Path) -> Header:
    """Read and check the header of the GGUF file ``path``. Raises Damaged and OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        if size < len(_MAGIC) or file.read(len(_MAGIC)) != _MAGIC:
            raise Damaged("the file does not begin with the letters GGUF")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return _HeaderReader(mapped, size).header()


class _HeaderReader:
    """A read position in the file. Never moves beyond the end of the file."""

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        """``mapped``: the file, with a checked magic. ``size``: bytes of the file."""
        self._mapped = mapped
        self._size = size
        self._at = len(_MAGIC)
        self._alignment = 32
        self._entries = 0

    def header(self) -> Header:
        """Read all keys and tensors of the file. Raises Damaged."""
        (version,) = self._numbers("<I", "the version")
        if version not in _VERSIONS:
            if version & 0xFFFF == 0:
                raise Damaged("the numbers are big-endian, and only little-endian files are supported")
            raise Damaged(
                f"version {version} of the format is not supported, only {_VERSIONS[0]} and {_VERSIONS[1]}"
            )
        tensors, pairs = self._numbers("<QQ", "the counts of tensors and keys")
        # Both counts come from the file: reject impossible counts before any allocation.
        self._check_room(tensors, _LEAST_TENSOR, "tensors")
        self._check_room(pairs, _LEAST_PAIR, "keys")
        if max(tensors, pairs) > _MOST_PARTS:
            raise Damaged(
                f"the file has {tensors} tensors and {pairs} keys; the limit is {_MOST_PARTS} of each"
            )
        metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key, value = self._pair()
            if key in metadata:
                raise Damaged(f"the key {_shown(key)} occurs twice")
            metadata[key] = value
        found = tuple(self._tensor() for _ in range(tensors))
        if len({tensor.name for tensor in found}) < tensors:
            raise Damaged("two tensors have the same name")
        data = -(-self._at // self._alignment) * self._alignment
        return Header(metadata, found, data, self._size)

    def _pair(self) -> tuple[str, Any]:
        """Read one (key, value) and note the alignment. Raises Damaged."""
        key = self._text("a key", _MOST_KEY)
        (kind,) = self._numbers("<I", "a value's type")
        # The alignment is needed to find the tensors, so its type and value are checked here.
        if key == _ALIGNMENT_KEY:
            if kind != _UINT32:
                raise Damaged("general.alignment is not a number of 32 bits")
            (alignment,) = self._numbers("<I", "general.alignment")
            if alignment < 8 or alignment & (alignment - 1):
                raise Damaged(f"general.alignment is {alignment}, not a power of two of at least 8")
            self._alignment = alignment
            return key, alignment
        if kind == _ARRAY:
            return key, self._array(key)
        if kind == _STRING:
            return key, self._text("a value")
        return key, self._numbers(f"<{self._form(kind, key)}", "a value")[0]

    def _array(self, key: str) -> list[Any]:
        """Read a list of numbers or texts. Raises Damaged, also for a list of lists."""
        kind, count = self._numbers("<IQ", "a list's length")
        if kind == _ARRAY:
            raise Damaged(f"{_shown(key)} is a list of lists, which is not allowed")
        form = "" if kind == _STRING else self._form(kind, key)
        # A string takes at least the 8 bytes of its length.
        self._check_room(count, struct.calcsize(f"<{form}") or 8, f"entries of {_shown(key)}")
        self._count_entries(key, count)
        if not form:
            return [self._text("a text") for _ in range(count)]
        return list(self._numbers(f"<{count}{form}", "a list"))

    def _count_entries(self, key: str, count: int) -> None:
        """Count ``count`` further list entries. Raises Damaged above the limit for the file."""
        self._entries += count
        if self._entries > _MOST_ENTRIES:
            raise Damaged(
                f"the lists up to {_shown(key)} have {self._entries} entries in total; the limit is "
                f"{_MOST_ENTRIES}"
            )

    def _tensor(self) -> HeaderTensor:
        """Read the description of one tensor. Raises Damaged."""
        name = self._text("a tensor's name", _MOST_KEY)
        (count,) = self._numbers("<I", "a tensor's number of dims")
        if not 1 <= count <= _MOST_DIMS:
            raise Damaged(f"tensor {_shown(name)} has {count} dims")
        dims = self._numbers(f"<{count}Q", "a tensor's dims")
        kind, offset = self._numbers("<IQ", "a tensor's type")
        elements = 1
        for dim in dims:
            elements *= dim  # Python's integers do not overflow; numpy's integers would
        if not elements or elements > _MOST_ELEMENTS:
            raise Damaged(f"tensor {_shown(name)} has dims {list(dims)}")
        return HeaderTensor(name, dims, kind, offset)

    def _form(self, kind: int, key: str) -> str:
        """Return the struct format of the value type ``kind``. Raises Damaged for an unknown type."""
        if kind not in _FORMS:
            raise Damaged(f"{_shown(key)} has a value of the unknown type {kind}")
        return _FORMS[kind]

    def _text(self, subject: str, most: int | None = None) -> str:
        """Read a text of at most ``most`` bytes. Raises Damaged. ``subject``: name of the text in errors."""
        (length,) = self._numbers("<Q", f"the length of {subject}")
        if most is not None and length > most:
            raise Damaged(f"{subject} has {length} bytes")
        begin = self._at
        self._skip(length, subject)
        try:
            return self._mapped[begin : self._at].decode()
        except UnicodeDecodeError:
            raise Damaged(f"{subject} at {begin} is not UTF-8") from None

    def _numbers(self, form: str, subject: str) -> tuple[Any, ...]:
        begin = self._at
        self._skip(struct.calcsize(form), subject)
        return struct.unpack_from(form, self._mapped, begin)

    def _skip(self, count: int, subject: str) -> None:
        """Move ``count`` bytes forward. Raises Damaged beyond the end of the file."""
        left = self._size - self._at
        if count > left:
            raise Damaged(
                f"{subject} takes {count} bytes at byte {self._at}, and the file has {left} more bytes"
            )
        self._at += count

    def _check_room(self, count: int, least: int, subject: str) -> None:
        """Raise Damaged unless the rest of the file has room for ``count`` items of ``least`` bytes."""
        left = self._size - self._at
        if count > left // least:
            raise Damaged(f"the file claims {count} {subject}, and has {left} more bytes")


def _shown(name: str) -> str:
    return repr(name[:80])
