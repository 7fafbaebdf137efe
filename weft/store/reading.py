"""Records that were read, and the check of a record."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.store import layout
from weft.store.errors import RecordError
from weft.store.index import Found
from weft.store.records import PAGE, RecordBuffer, RecordId
from weft.store.segment import Digests


class Loaded(NamedTuple):
    """A record that was read and is not checked yet."""

    record: RecordId
    found: Found
    whole: np.ndarray
    """uint8: header and padded payload."""
    nbytes: int
    """Bytes of ``whole`` that were read."""


class Run(NamedTuple):
    """Records that lay back to back, and were read with one system call, without a check."""

    records: Sequence[RecordId]
    """At least one."""
    found: Sequence[Found]
    """Place of each record; [] after an error."""
    buffer: RecordBuffer
    """The records, from the start on."""
    nbytes: int
    """Bytes that were read."""
    error: RecordError | None = None
    """Why the first record could not be read."""


def damage(loaded: Loaded, digest: Digests) -> str:
    """Return "" if the bytes are the written bytes, "gone" for a removed record, else "corrupt"."""
    record, found, whole, read = loaded
    if read < PAGE:
        return "corrupt"
    identity, entry = found.segment.identity, found.entry
    header = layout.header_of(whole[:PAGE].tobytes(), identity, int(entry["offset"]))
    if header is None:
        # A removed record is a hole of zeros.
        return "corrupt" if whole[:PAGE].any() else "gone"
    if read < len(whole) or header.entry.tobytes() != entry.tobytes():
        return "corrupt"
    nbytes = int(entry["nbytes"])
    payload, seeds = whole[PAGE : PAGE + nbytes], layout.seeds_of(identity, record, nbytes)
    made = digest(payload, layout.spans_of(nbytes), seeds)
    return "" if np.array_equal(made, header.digests) else "corrupt"
