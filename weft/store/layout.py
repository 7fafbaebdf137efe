"""The bytes of a segment file. Pure.

    page 0      segment page: magic, version, namespace, id of the segment
    records     header page, payload padded to whole pages; back to back
    footer      only in a sealed segment: one entry for each record, padded to whole pages
    last page   trailer: number of entries, place and digest of the footer

A header counts if its digest holds and if it names this segment and its own place. So a header that was
copied, torn or flipped does not count. The trailer and the footer only save the reading of all headers: a
segment whose trailer or footer is damaged is read header by header.
"""

from __future__ import annotations

import functools
import struct
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from weft.common.splitmix import mix_array
from weft.disagg.protocol.digests import span_seeds
from weft.store.records import KEY_BYTES, PAGE, Owner, RecordId

VERSION = 1
"""Version of the bytes. A segment of another version is not read."""
SPAN = 64 << 10
"""Payload bytes for each digest. Longer payloads have longer spans: see ``span_bytes``."""
_SUM = 16
_SEGMENT_MAGIC, _HEADER_MAGIC, _TRAILER_MAGIC = b"weftkvsg", b"weftkvrc", b"weftkvft"
_SEGMENT = struct.Struct("<8sI4x16s16s")
_HEADER = struct.Struct("<8sII16s16sQ16sHHHH16s16s16sQd")
_TRAILER = struct.Struct("<8sI4x16s16sQQQ")
_MOST_SPANS = (PAGE - _SUM - _HEADER.size) // 8

ENTRY = np.dtype(
    [
        *[("key", f"V{KEY_BYTES}"), ("kind", "<u2"), ("part", "<u2"), ("parts", "<u2"), ("zero", "<u2")],
        *[("payer", "V16"), ("salt", "V16"), ("session", "V16")],
        *[("offset", "<u8"), ("nbytes", "<u8"), ("written", "<f8")],
    ]
)
"""One record in a footer. The first ``NAME`` bytes are the name of the record."""
NAME = KEY_BYTES + 8
_NAME = struct.Struct(f"<{KEY_BYTES}sHHHH")


class Identity(NamedTuple):
    """Identity of a segment."""

    namespace: bytes
    """16 bytes."""
    segment: bytes
    """16 random bytes."""


def padded(nbytes: int) -> int:
    """Return ``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE) * PAGE


def span_bytes(nbytes: int) -> int:
    """Return the bytes of each span of a payload: ``SPAN``, or more if the digests would fill the header."""
    span = SPAN
    while nbytes > span * _MOST_SPANS:
        span *= 2
    return span


@functools.lru_cache(64)
def spans_of(nbytes: int) -> np.ndarray:
    """Return offset and length of each span of a payload, int64 [n, 2]. The result is shared: do not change
    it."""
    span = span_bytes(nbytes)
    offsets = np.arange(0, nbytes, span, dtype=np.int64)
    return np.stack([offsets, np.minimum(nbytes - offsets, span)], axis=1)


def seeds_of(identity: Identity, record: RecordId, nbytes: int) -> np.ndarray:
    """Return the seed of each span's digest, uint64 [n]. The seeds depend on namespace, name, version, and on
    place and length of the span. ``nbytes``: of the payload."""
    made = blake2b(name_bytes(record), key=identity.namespace, digest_size=8)
    seed = np.uint64(int.from_bytes(made.digest(), "little") ^ VERSION)
    return mix_array(_place_seeds(nbytes) ^ seed)


@functools.lru_cache(64)
def _place_seeds(nbytes: int) -> np.ndarray:
    """Return a number for place and length of each span of a payload, uint64 [n]."""
    spans = spans_of(nbytes)
    return span_seeds(0, 0, spans[:, 0], spans[:, 1])


def name_bytes(record: RecordId) -> bytes:
    """Return the name as ``NAME`` bytes, as in an entry. Raises ValueError for an impossible name."""
    if len(record.key) != KEY_BYTES or not 0 <= record.part < record.parts < 1 << 16:
        raise ValueError(f"not the name of a record: {record}")
    return _NAME.pack(record.key, record.kind, record.part, record.parts, 0)


def record_of(name: bytes) -> RecordId:
    """Return the record of ``name_bytes``."""
    key, kind, part, parts, _ = _NAME.unpack(name)
    return RecordId(kind, key, part, parts)


OwnerHashes = tuple[bytes, bytes, bytes]


def owner_hashes(owner: Owner) -> OwnerHashes:
    """Return 16 bytes each for payer, salt and session; zeros for an absent one."""
    payer, salt, session = (owner_hash(*pair) for pair in zip(Owner._fields, owner, strict=True))
    return payer, salt, session


def owner_hash(field: str, value: str) -> bytes:
    """Return the hash of a field of ``Owner``, 16 bytes."""
    if not value:
        return bytes(16)
    return blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16, person=field.encode()).digest()


def entry_of(record: RecordId, owner: Owner, offset: int, nbytes: int, written: float) -> np.ndarray:
    """Return the entry of a record, ``ENTRY`` [1]."""
    rest = struct.pack("<QQd", offset, nbytes, written)
    return np.frombuffer(name_bytes(record) + b"".join(owner_hashes(owner)) + rest, ENTRY)


def names_of(entries: np.ndarray) -> list[bytes]:
    """Return the names of ``entries``, ``NAME`` bytes each."""
    rows = np.ascontiguousarray(entries).view(np.uint8).reshape(len(entries), ENTRY.itemsize)
    names: list[bytes] = np.ascontiguousarray(rows[:, :NAME]).view(f"V{NAME}").ravel().tolist()
    return names


def segment_page(identity: Identity) -> bytes:
    """Return the first page of a segment."""
    return _page(_SEGMENT.pack(_SEGMENT_MAGIC, VERSION, identity.namespace, identity.segment))


def identity_of(page: bytes) -> Identity | None:
    """Return the identity in the first page of a segment; None if the page is none of this version."""
    if not _holds(page, _SEGMENT_MAGIC):
        return None
    _, version, namespace, segment = _SEGMENT.unpack_from(page)
    return Identity(namespace, segment) if version == VERSION else None


def header_page(identity: Identity, entry: np.ndarray, digests: np.ndarray) -> bytes:
    """Return the header of a record. entry: ``ENTRY`` [1]; digests: uint64, one for each span."""
    (key, kind, part, parts, _, payer, salt, session, offset, nbytes, written) = entry[0].tolist()
    facts = _HEADER.pack(
        *(_HEADER_MAGIC, VERSION, len(digests), identity.namespace, identity.segment, offset),
        *(key, kind, part, parts, 0, payer, salt, session, nbytes, written),
    )
    return _page(facts + digests.astype("<u8").tobytes())


class Header(NamedTuple):
    """A header that holds."""

    entry: np.ndarray
    """``ENTRY`` [1]."""
    digests: np.ndarray
    """uint64, one for each span."""


def header_of(page: bytes, identity: Identity, offset: int) -> Header | None:
    """Return the header at ``offset`` of a segment; None if ``page`` is no header of this place."""
    if not _holds(page, _HEADER_MAGIC):
        return None
    facts = _HEADER.unpack_from(page)
    _, version, count, namespace, segment, at, key, kind, part, parts, zero, *owners, nbytes, written = facts
    if (version, namespace, segment, at) != (VERSION, *identity, offset) or count != len(spans_of(nbytes)):
        return None
    rest = struct.pack("<QQd", offset, nbytes, written)
    entry = np.frombuffer(_NAME.pack(key, kind, part, parts, zero) + b"".join(owners) + rest, ENTRY)
    return Header(entry, np.frombuffer(page, "<u8", count, _HEADER.size))


def footer_of(identity: Identity, entries: np.ndarray, offset: int, digest: int) -> bytes:
    """Return footer and trailer of a segment. ``offset``: place of the footer; ``digest``: of the entries."""
    data = entries.tobytes()
    facts = _TRAILER.pack(_TRAILER_MAGIC, VERSION, *identity, len(entries), offset, digest)
    return data + bytes(padded(len(data)) - len(data)) + _page(facts)


class Trailer(NamedTuple):
    """A trailer that holds."""

    entries: int
    """Number of entries."""
    offset: int
    """Place of the footer."""
    digest: int
    """Digest of the entries."""


def trailer_of(page: bytes, identity: Identity, size: int) -> Trailer | None:
    """Return the trailer in the last page of a file of ``size`` bytes; None if the page is none."""
    if not _holds(page, _TRAILER_MAGIC):
        return None
    _, version, namespace, segment, count, offset, digest = _TRAILER.unpack_from(page)
    if (version, namespace, segment) != (VERSION, *identity):
        return None
    whole = offset + padded(count * ENTRY.itemsize) + PAGE
    return Trailer(count, offset, digest) if whole == size else None


def entries_seed(identity: Identity) -> int:
    """Return the seed of the digest of a footer."""
    return int.from_bytes(blake2b(identity.segment, key=identity.namespace, digest_size=8).digest(), "little")


def _page(facts: bytes) -> bytes:
    body = facts + bytes(PAGE - _SUM - len(facts))
    return body + blake2b(body, digest_size=_SUM).digest()


def _holds(page: bytes, magic: bytes) -> bool:
    if len(page) != PAGE or not page.startswith(magic):
        return False
    return blake2b(page[:-_SUM], digest_size=_SUM).digest() == page[-_SUM:]
