"""A segment in memory, before the upload."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from weft.store import layout
from weft.store.layout import ENTRY, Identity
from weft.store.records import PAGE
from weft.store.segment import SUFFIX, Digests, Segment, entries_digest


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
