"""Records by name: the part that all stores of records have in common.

A store finds a record in its index, reads runs of records that lie back to back, and checks the digests. A
subclass has the bytes: on a disk (``segments``) or in an object store (``remote``).
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np

from weft.disagg.protocol import digests
from weft.store import layout
from weft.store.errors import RecordCorrupt, RecordError, RecordGone, StoreOff
from weft.store.index import Found, Index
from weft.store.reading import Loaded, Run, damage
from weft.store.records import PAGE, BlockChanges, Owner, RecordBuffer, RecordId, Stored
from weft.store.segment import FOLDER_NAME, Digests
from weft.store.settings import StoreStats


class RecordStore(ABC):
    """Records of one namespace, as one process sees them.

    ``find``, ``has``, ``owner`` and ``read_run`` may be called from any thread, each ``read_run`` with a
    buffer of its own. All other methods are called by one thread at a time.
    """

    level: ClassVar[str]
    """Name of the level: one of ``weft.types.tiers.LEVELS``."""

    def __init__(
        self,
        namespace: str,
        ttl: float,
        digest: Digests = digests.digest_spans,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``namespace``: 32 hex digits. ``ttl``: seconds after which a record does not count; 0: never.
        ``digest``: a faster form of ``digests.digest_spans``."""
        if not FOLDER_NAME.fullmatch(namespace):
            raise ValueError(f"not a namespace: {namespace!r}")
        self.off = ""
        """The reason why the store has turned itself off for good; "" while the store is on."""
        self._namespace, self._ttl = bytes.fromhex(namespace), ttl
        self._digest, self._now = digest, now
        self._index = Index()
        self._counts = Counter[str]()
        self._counting = threading.Lock()
        self._skipped = Counter[str]()
        """Reason of ``write`` -> number of records."""

    @property
    def away(self) -> bool:
        """True while the store does not answer, and may answer again."""
        return False

    def elsewhere(self) -> frozenset[bytes]:
        """Return keys of blocks in other namespaces, for explanations alone. Bounded."""
        return frozenset()

    @abstractmethod
    def write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner = Owner()) -> str:
        """Store ``buffer.payload[:nbytes]``. Return "" if the record is stored, else the reason; "there" if
        the record was stored before, "off" if the store is off."""

    @abstractmethod
    def scan(self) -> None:
        """Look for records of other processes. See ``take_changes``."""

    @abstractmethod
    def maintain(self) -> None:
        """Apply age and limits. Called about once per second."""

    @abstractmethod
    def _flush(self, fields: dict[str, bytes]) -> int:
        """``flush``. ``fields``: hashes of the given fields."""

    @abstractmethod
    def close(self) -> None:
        """Save what is not saved yet, and stop."""

    @abstractmethod
    def stats(self) -> StoreStats:
        """Return the counts, see ``_stats``. From any thread."""

    @abstractmethod
    def _read(self, run: Sequence[Found], buffer: RecordBuffer) -> int:
        """Read the bytes of a run to the start of the buffer. Return their number. Raises RecordGone or
        StoreOff."""

    def flush(self, *, payer: str | None = None, salt: str | None = None, session: str | None = None) -> int:
        """Remove the records that match all given fields, in every namespace, and return the number of
        records known here. Without fields: everything. "" matches records without the field."""
        given = {"payer": payer, "salt": salt, "session": session}
        return self._flush(
            {name: layout.owner_hash(name, value) for name, value in given.items() if value is not None}
        )

    def find(self, kind: int, key: bytes) -> Stored | None:
        """Return the block ``key`` of KV cache group ``kind`` if all parts are there, else None. Without
        I/O."""
        return None if self.off else self._index.find(kind, key, self._oldest())

    def has(self, record: RecordId) -> bool:
        """Return True if the record is there. Without I/O."""
        return not self.off and self._index.place(record) is not None

    def owner(self, record: RecordId) -> layout.OwnerHashes | None:
        """Return the hashes of the owner of a record; None if there is no such record. Without I/O."""
        found = self._index.place(record)
        if found is None:
            return None
        payer, salt, session = (found.entry[name].tobytes() for name in Owner._fields)
        return payer, salt, session

    def read(self, record: RecordId, buffer: RecordBuffer) -> int:
        """Read a record into ``buffer.payload`` and check the digests. Return the number of bytes.

        Raises RecordGone, RecordCorrupt (then the record is dropped) or StoreOff. The buffer must have room:
        ``Stored.nbytes`` is the sum over the parts of the block.
        """
        (found,) = self.check_run(self.read_run([record], buffer))
        if isinstance(found, RecordError):
            raise found
        return len(found)

    def read_run(self, records: Sequence[RecordId], buffer: RecordBuffer) -> Run:
        """Read the leading ``records``, at least one, with one request, without a check.

        A run ends before a record that does not lie behind the record before, or has no room in ``buffer``.
        """
        try:
            found = self._places(records, buffer)
            return Run(records[: len(found)], found, buffer, self._read(found, buffer))
        except RecordError as error:
            return Run(records[:1], [], buffer, 0, error)

    def check_run(self, run: Run) -> list[np.ndarray | RecordError]:
        """Check the digests of a run. Return for each record the payload, uint8 [bytes] of the buffer, or the
        error: see ``read``."""
        if run.error is not None:
            return [run.error]
        made, at = list[np.ndarray | RecordError](), 0
        for record, found in zip(run.records, run.found, strict=True):
            nbytes = int(found.entry["nbytes"])
            size = PAGE + layout.padded(nbytes)
            whole = run.buffer.memory[at : at + size]
            try:
                self._check(Loaded(record, found, whole, min(max(run.nbytes - at, 0), size)))
            except RecordError as error:
                made.append(error)
            else:
                made.append(whole[PAGE : PAGE + nbytes])
            at += size
        return made

    def take_changes(self) -> BlockChanges:
        """Return the complete blocks that came and went since the last call. The first call lists all."""
        added, gone = self._index.changes()
        if not added and not gone:
            return BlockChanges([], [])
        came = dict.fromkeys((record.kind, record.key) for record in added)
        left = dict.fromkeys((record.kind, record.key) for record in gone)
        return BlockChanges(
            [block for block in came if self._index.find(*block, 0.0) is not None],
            [block for block in left if self._index.find(*block, 0.0) is None],
        )

    def _places(self, records: Sequence[RecordId], buffer: RecordBuffer) -> list[Found]:
        """Return the places of the leading records that lie back to back. Raises RecordGone, StoreOff, and
        ValueError for a record larger than the buffer."""
        if self.off:
            raise StoreOff(self.off)
        run, end, room, oldest = list[Found](), 0, len(buffer.memory), self._oldest()
        for record in records:
            found = self._index.place(record)
            if found is None or found.entry["written"] < oldest:
                break
            offset, size = int(found.entry["offset"]), PAGE + layout.padded(int(found.entry["nbytes"]))
            if run and (found.segment is not run[0].segment or offset != end or size > room):
                break
            if size > room:
                raise ValueError(f"a record of {size} bytes, and a buffer for {room}")
            run.append(found)
            end, room = offset + size, room - size
        if not run:
            raise RecordGone("no such record")
        return run

    def _check(self, loaded: Loaded) -> None:
        """Check a record that was read, and count the read. Raises RecordGone or RecordCorrupt."""
        found = loaded.found
        reason = damage(loaded, self._digest)
        if reason:
            self._drop(found, reason)
            where = f"{found.segment.path.name} at {found.entry['offset']}"
            if reason == "gone":
                raise RecordGone(f"the record of {where} was flushed")
            raise RecordCorrupt(f"the record of {where} is damaged")
        found.segment.used = self._now()
        with self._counting:
            self._counts["read"] += 1
            self._counts["read_bytes"] += int(found.entry["nbytes"])

    def _drop(self, found: Found, reason: str) -> None:
        self._index.drop(found.segment, np.array([found.row]))
        self._count(reason, 1)

    def _stats(self, *, nbytes: int, evicted: int, expired: int, flushed: int) -> StoreStats:
        """Return the counts, with the given counts of the subclass."""
        counts = self._counts
        return StoreStats(
            nbytes=nbytes,
            records=len(self._index),
            written=counts["written"],
            written_bytes=counts["written_bytes"],
            read=counts["read"],
            read_bytes=counts["read_bytes"],
            corrupt=counts["corrupt"],
            gone=counts["gone"],
            damaged=counts["damaged"],
            evicted=evicted,
            expired=expired,
            flushed=flushed,
            skipped=dict(self._skipped),
        )

    def _oldest(self) -> float:
        """Return the time of writing from which on records count."""
        return self._now() - self._ttl if self._ttl else 0.0

    def _count(self, name: str, more: int) -> None:
        with self._counting:
            self._counts[name] += more


def extent(run: Sequence[Found]) -> tuple[int, int]:
    """Return (first byte, bytes) of a run in its segment: headers and padded payloads."""
    begin, last = int(run[0].entry["offset"]), run[-1].entry
    return begin, int(last["offset"]) + PAGE + layout.padded(int(last["nbytes"])) - begin
