"""The part of the protocol buffer wire format needed for a SentencePiece model."""

from __future__ import annotations

from collections.abc import Iterator

Value = int | bytes
"""A varint, or the bytes of any other field."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: bytes) -> Iterator[tuple[int, Value]]:
    """Yield (number, value) of each field of a message, in file order. Raises ValueError for other data."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"unknown wire type {wire}")
        if at + size > len(data):
            raise ValueError("a field is longer than the data")
        yield key >> 3, data[at : at + size]
        at += size


def signed(value: Value) -> int:
    """Return an int32 field. Negative numbers are encoded with 64 bits. Raises ValueError for bytes."""
    if isinstance(value, bytes):
        raise ValueError("bytes instead of a number")
    return value - (1 << 64) if value >= 1 << 63 else value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number (seven bits per byte, lowest first) and the position behind. Raises ValueError."""
    result = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
    raise ValueError("a number does not end")
