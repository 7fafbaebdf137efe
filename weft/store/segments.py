"""The disk tier: blocks of the KV cache in files that outlive the process.

    write       appends a record to this process's segment: header and payload in one system call
    seal        ends the segment with a footer; from then on, other processes read the segment
    scan        finds sealed segments of other processes, and segments of processes that died
    find, read  look a block up in memory; read a record and check every digest
    maintain    age, budget, times of use

A folder has a subfolder for each namespace. Processes of one user share the folder, each with segments of its
own. Nothing in the files is trusted: a record counts if the digest of the header holds, and the bytes of a
record count if the digests of all spans hold. An error of the disk turns the store off, for good: a prompt
is then computed, as without the store.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.disagg.protocol import digests
from weft.store import layout
from weft.store.disk import FLAG, Disk, can_direct, network_file_system, private_folder, safe_root
from weft.store.errors import RecordCorrupt, RecordError, RecordGone, StoreOff
from weft.store.eviction import Cleaner
from weft.store.index import Found, Index
from weft.store.reading import Loaded, Run, damage
from weft.store.records import PAGE, BlockChanges, Owner, RecordBuffer, RecordId, Stored
from weft.store.scanning import Scanner
from weft.store.segment import FOLDER_NAME, Digests
from weft.store.settings import LEAST_BUDGET, StoreSettings, StoreStats
from weft.store.writer import Writer

_log = get_logger(__name__)
__all__ = ["SegmentStore", "StoreSettings", "StoreStats"]

_LEAST_SEGMENTS = 8
"""A segment takes at most this fraction of the budget, so that eviction never removes most of the store."""
_LONGEST_OPEN_S = 3600.0
"""Age at which a segment is sealed."""
_MAINTAIN_S = 10.0
"""Seconds between two looks at all files: 20 ms of CPU time for 800 files."""
_NOBODY = Owner()


class SegmentStore:
    """Records of one namespace, as one process sees them.

    ``find``, ``has`` and ``read`` may be called from any thread, each ``read`` with a buffer of its own. All
    other methods are called by one thread at a time.
    """

    def __init__(
        self,
        settings: StoreSettings,
        *,
        digest: Digests = digests.digest_spans,
        now: Callable[[], float] = time.time,
        disk: Disk | None = None,
    ) -> None:
        """Create the folders and read the index. ``digest``: a faster form of ``digests.digest_spans``.
        ``disk``: for tests.

        Raises ConfigError for a folder that cannot be private, or is on a network without ``shared``.
        """
        self.off = ""
        """The reason why the store has turned itself off; "" while the store is on."""
        if not FOLDER_NAME.fullmatch(settings.namespace):
            raise ValueError(f"not a namespace: {settings.namespace!r}")
        self._settings, self._digest, self._now = settings, digest, now
        if settings.budget < LEAST_BUDGET:
            raise ConfigError(
                f"a KV disk tier of {settings.budget} bytes is too small: set --kv-disk to at least "
                f"{LEAST_BUDGET >> 20}M",
                param="--kv-disk",
            )
        self._namespace = bytes.fromhex(settings.namespace)
        self._root = settings.folder.expanduser()
        self._folder = self._root / settings.namespace
        self._disk = disk or Disk(settings.direct)
        self._prepare()
        self._segment_bytes = min(settings.segment_bytes, settings.budget // _LEAST_SEGMENTS) // PAGE * PAGE
        self._index = Index()
        self._cleaner = Cleaner(self._disk, self._root, self._index, digest, settings.budget)
        self._writer: Writer | None = None
        self._scanner = Scanner(self._disk, self._folder, self._namespace, self._index, digest)
        self._tokens, self._filled = settings.write_rate, now()
        """Bytes that may be written now, and the time of this number."""
        self._maintained = -_MAINTAIN_S
        self._counts = Counter[str]()
        self._skipped = Counter[str]()
        self._counting = threading.Lock()
        self.scan()
        with self._guarded():
            self._cleaner.count()

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

    def write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner = _NOBODY) -> str:
        """Store ``buffer.payload[:nbytes]``.

        Return "" if the record is stored, else the reason: "there" (stored before), "rate" (the limit of
        writes), "large" (more than a segment), "room" (the budget is used by what cannot be removed), "off".
        """
        why = self._refusal(record, nbytes)
        if not why:
            with self._guarded():
                why = self._write(record, buffer, nbytes, owner)
            why = "off" if self.off else why
        if why:
            self._skipped[why] += 1
        return why

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
        """Read the leading ``records``, at least one, with one system call, without a check.

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

    def scan(self) -> None:
        """Look for new segments of other processes and for segments that are gone. See ``take_changes``."""
        if self.off:
            return
        with self._guarded():
            own = self._writer.segment.path if self._writer is not None else None
            damaged, gone = self._scanner.scan(own, self._oldest(), self._now())
            self._count("damaged", damaged)
            self._count("gone", gone)

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

    def maintain(self) -> None:
        """Seal an old segment. Every ``_MAINTAIN_S`` seconds also apply age and budget, and save the times of
        use."""
        with self._guarded():
            now, longest = self._now(), _LONGEST_OPEN_S
            if self._settings.ttl:
                longest = min(longest, self._settings.ttl / 8)
            if self._writer is not None and now - self._writer.opened > longest:
                self._seal()
            if 0 <= now - self._maintained < _MAINTAIN_S:
                return
            self._maintained = now
            own = self._writer.segment if self._writer is not None else None
            self._cleaner.expire(self._oldest(), now, own)
            self._cleaner.save_use()
            self._cleaner.make_room(0)

    def flush(self, *, payer: str | None = None, salt: str | None = None, session: str | None = None) -> int:
        """Remove the records that match all given fields, in every namespace, and return the number. Without
        fields: everything. "" matches records without the field.

        The bytes are gone from the files when the call returns. Another process that stores later than the
        call may store again.
        """
        given = {"payer": payer, "salt": salt, "session": session}
        fields = {name: layout.owner_hash(name, value) for name, value in given.items() if value is not None}
        count = 0
        with self._guarded():
            if not fields:
                self._leave()
                count = self._cleaner.flush_all()
            else:
                own = self._writer.segment if self._writer is not None else None
                count = self._cleaner.flush(fields, own)
        return count

    def seal(self) -> None:
        """End this process's segment: the records are on the disk, and other processes find them."""
        with self._guarded():
            self._seal()

    def close(self) -> None:
        """Seal, save the times of use, and stop."""
        with self._guarded():
            self._seal()
            self._cleaner.save_use()
        self._leave()
        self.off = self.off or "closed"

    def stats(self) -> StoreStats:
        """Return the counts. From any thread."""
        counts, cleaner = self._counts, self._cleaner
        return StoreStats(
            nbytes=cleaner.nbytes,
            records=len(self._index),
            written=counts["written"],
            written_bytes=counts["written_bytes"],
            read=counts["read"],
            read_bytes=counts["read_bytes"],
            corrupt=counts["corrupt"],
            gone=counts["gone"],
            damaged=counts["damaged"],
            evicted=cleaner.evicted,
            expired=cleaner.expired,
            flushed=cleaner.flushed,
            skipped=dict(self._skipped),
        )

    # Writing

    def _refusal(self, record: RecordId, nbytes: int) -> str:
        if self.off:
            return "off"
        if self._index.place(record) is not None:
            return "there"
        if 4 * PAGE + layout.padded(nbytes) > self._segment_bytes:
            return "large"
        return "" if self._may_write(nbytes) else "rate"

    def _may_write(self, nbytes: int) -> bool:
        """Take ``nbytes`` from the tokens of ``write_rate``. A record may overdraw a positive balance, so
        that a record larger than the rate is written, too."""
        rate = self._settings.write_rate
        if not rate:
            return True
        now = self._now()
        self._tokens = min(rate, self._tokens + rate * max(now - self._filled, 0.0))
        self._filled = now
        if self._tokens <= 0:
            return False
        self._tokens -= nbytes
        return True

    def _write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner) -> str:
        writer = self._writer
        if writer is not None and writer.removed():
            self._leave()
            self._index.forget(writer.segment)
            writer = None
        if writer is not None and not writer.fits(nbytes):
            self._seal()
            writer = None
        if writer is None:
            if not self._cleaner.make_room(self._segment_bytes):
                return "room"
            private_folder(self._folder)
            now = self._now()
            size = self._segment_bytes
            writer = self._writer = Writer(self._disk, self._folder, self._namespace, size, now)
            self._index.add(writer.segment, 0.0)
        entry = writer.append(record, buffer, nbytes, owner, self._now(), self._digest)
        self._index.append(writer.segment, record, entry)
        self._count("written", 1)
        self._count("written_bytes", nbytes)
        return ""

    def _seal(self) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        if writer.removed() or not len(writer.segment.living()):
            writer.close()
            self._index.forget(writer.segment)
            writer.segment.path.unlink(missing_ok=True)
        else:
            writer.seal(self._digest)

    def _leave(self) -> None:
        """Give up this process's segment without a footer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # Reading

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

    def _read(self, run: Sequence[Found], buffer: RecordBuffer) -> int:
        """Read the bytes of a run to the start of the buffer. Return their number. Raises RecordGone or
        StoreOff."""
        first, last = run[0], run[-1].entry
        offset = int(first.entry["offset"])
        end = int(last["offset"]) + PAGE + layout.padded(int(last["nbytes"]))
        # A descriptor for each run: another process may remove the file at any time.
        try:
            fd = self._disk.open(first.segment.path, direct=True)
            try:
                return self._disk.read(fd, buffer.memory[: end - offset], offset)
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._drop(first, "gone")
            raise RecordGone("another process has removed the segment") from None
        except OSError as error:
            self._turn_off(error)
            raise StoreOff(self.off) from error

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

    # The folder

    def _prepare(self) -> None:
        try:
            safe_root(self._root)
            private_folder(self._folder)
            name = "" if self._settings.shared else network_file_system(self._folder)
            if name:
                raise ConfigError(
                    f"{self._folder} is on a network file system ({name}): name a folder on a local disk "
                    f"with {FLAG}, or allow the folder with --kv-disk-shared",
                    param=FLAG,
                )
            if self._disk.direct:
                self._disk.direct = can_direct(self._folder)
        except OSError as error:
            message = f"{self._folder} cannot be used ({error.strerror}): name another folder with {FLAG}"
            raise ConfigError(message, param=FLAG) from error

    def _oldest(self) -> float:
        """Return the time of writing from which on records count."""
        return self._now() - self._settings.ttl if self._settings.ttl else 0.0

    def _count(self, name: str, more: int) -> None:
        with self._counting:
            self._counts[name] += more

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Turn an error of the disk into ``off``. A store that is off gives its segment up here, in the
        thread that writes."""
        try:
            yield
        except OSError as error:
            self._turn_off(error)
        if self.off:
            self._leave()

    def _turn_off(self, error: OSError) -> None:
        """Set ``off``. From any thread, so the descriptor of the writer stays open: see ``_guarded``."""
        if not self.off:
            self.off = f"{error.strerror or type(error).__name__}: {self._folder}"
            _log.warning("the KV disk tier is off (%s); prompts are computed", self.off)
