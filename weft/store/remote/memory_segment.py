"""A segment in memory before the upload, and the entries of a segment of the object store."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from weft.store import layout
from weft.store.layout import ENTRY, Identity
from weft.store.records import PAGE
from weft.store.remote.objects import Listed
from weft.store.segment import SUFFIX, Digests, Segment, entries_digest

_TAIL = 64 << 10
"""Bytes read for a footer at first: 600 records."""


class OpenSegment:
    """The segment that is being filled, in memory."""

    def __init__(self, folder: str, namespace: bytes, nbytes: int, now: float) -> None:
        identity, self.opened, self.end = Identity(namespace, os.urandom(16)), now, PAGE
        name = f"{folder}/{int(now * 1e6):016x}-{identity.segment[:4].hex()}{SUFFIX}"
        self.segment = Segment(Path(name), identity, np.zeros(0, ENTRY), sealed=False)
        self.memory = np.zeros(nbytes, np.uint8)
        self.memory[:PAGE] = np.frombuffer(layout.segment_page(identity), np.uint8)

    def fits(self, nbytes: int) -> bool:
        """Return True if a record with ``nbytes`` of payload and the footer fit in the segment."""
        entries = layout.padded((self.segment.count + 1) * ENTRY.itemsize)
        return self.end + PAGE + layout.padded(nbytes) + entries + PAGE <= len(self.memory)

    def sealed(self, digest: Digests) -> memoryview:
        """Write the footer. Return the bytes of the object."""
        segment = self.segment
        entries, identity = segment.entries[segment.living()], segment.identity
        footer = layout.footer_of(
            identity, entries, self.end, entries_digest(entries.tobytes(), identity, digest)
        )
        whole = self.memory[: self.end + len(footer)]
        whole[self.end :] = np.frombuffer(footer, np.uint8)
        return whole.data


async def read_segment(
    one: Listed, get: Callable[[str, int, int], Awaitable[memoryview]], digest: Digests
) -> Segment | None:
    """Return a segment with the entries of the footer; None if the footer does not hold. ``get(name, offset,
    nbytes)`` reads an object. Raises the errors of ``get``."""
    begin = max(0, one.nbytes - _TAIL)
    if one.nbytes < 3 * PAGE:
        return None
    page, tail = await asyncio.gather(get(one.name, 0, PAGE), get(one.name, begin, one.nbytes - begin))
    identity = layout.identity_of(bytes(page))
    trailer = None if identity is None else layout.trailer_of(bytes(tail[-PAGE:]), identity, one.nbytes)
    if identity is None or trailer is None:
        return None
    size = trailer.entries * ENTRY.itemsize
    if trailer.offset < begin:
        data = bytes(await get(one.name, trailer.offset, size))
    else:
        data = bytes(tail[trailer.offset - begin : trailer.offset - begin + size])
    if len(data) != size or not size or entries_digest(data, identity, digest) != trailer.digest:
        return None
    return Segment(Path(one.name), identity, np.frombuffer(data, ENTRY), sealed=True)
