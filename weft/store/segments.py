"""The disk tier: blocks of the KV cache in files that outlive the process.

    write       appends a record to this process's segment: header and payload in one system call
    publish     writes a footer behind the records so far: other processes read these records
    seal        ends the segment with a footer
    scan        finds published segments of other processes, and segments of processes that died
    find, read  look a block up in memory; read a record and check every digest
    maintain    age, budget, times of use

A folder has a subfolder for each namespace. Processes of one user share the folder, each with segments of its
own. Nothing in the files is trusted: a record counts if the digest of the header holds, and the bytes of a
record count if the digests of all spans hold. An error of the disk turns the store off, for good: a prompt
is then computed, as without the store.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from weft.common.errors import ConfigError
from weft.common.folder import expanded
from weft.common.log import get_logger
from weft.disagg.protocol import digests
from weft.store import layout
from weft.store.disk import FLAG, Disk, can_direct, network_file_system, private_folder, safe_root
from weft.store.errors import RecordGone, StoreOff
from weft.store.eviction import Cleaner, files_of
from weft.store.index import Found
from weft.store.record_store import RecordStore, extent
from weft.store.records import PAGE, Owner, RecordBuffer, RecordId
from weft.store.scanning import Scanner
from weft.store.segment import SUFFIX, Digests, keys_of
from weft.store.settings import LEAST_BUDGET, StoreSettings, StoreStats
from weft.store.writer import Writer

_log = get_logger(__name__)
__all__ = ["SegmentStore", "StoreSettings", "StoreStats"]

_LEAST_SEGMENTS = 8
"""A segment takes at most this fraction of the budget, so that eviction never removes most of the store."""
_LONGEST_OPEN_S = 3600.0
"""Age at which a segment is sealed."""
_PUBLISH_S = 5.0
"""Seconds between two footers of an open segment, for other processes with the folder."""
_MAINTAIN_S = 10.0
"""Seconds between two looks at all files: 20 ms of CPU time for 800 files."""
_MOST_ELSEWHERE, _MOST_KEYS = 64, 1 << 16
"""Segments of other namespaces whose keys are remembered, and keys."""
_NOBODY = Owner()


class SegmentStore(RecordStore):
    """Records of one namespace on a disk, as one process sees them."""

    level = "disk"

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
        super().__init__(settings.namespace, settings.ttl, digest, now)
        self._settings = settings
        if settings.budget < LEAST_BUDGET:
            raise ConfigError(
                f"a KV disk tier of {settings.budget} bytes is too small: set --kv-disk to at least "
                f"{LEAST_BUDGET >> 20}M",
                param="--kv-disk",
            )
        self._root = expanded(settings.folder)
        self._folder = self._root / settings.namespace
        self._disk = disk or Disk(settings.direct)
        self._prepare()
        self._segment_bytes = min(settings.segment_bytes, settings.budget // _LEAST_SEGMENTS) // PAGE * PAGE
        self._cleaner = Cleaner(self._disk, self._root, self._index, digest, settings.budget)
        self._writer: Writer | None = None
        self._scanner = Scanner(self._disk, self._folder, self._namespace, self._index, digest)
        self._tokens, self._filled = settings.write_rate, now()
        """Bytes that may be written now, and the time of this number."""
        self._maintained = self._published = -_MAINTAIN_S
        self.scan()
        with self._guarded():
            self._cleaner.count()

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

    def scan(self) -> None:
        """Look for new segments of other processes and for segments that are gone. See ``take_changes``."""
        if self.off:
            return
        with self._guarded():
            own = self._writer.segment.path if self._writer is not None else None
            damaged, gone = self._scanner.scan(own, self._oldest(), self._now())
            self._count("damaged", damaged)
            self._count("gone", gone)

    def maintain(self) -> None:
        """Seal an old segment, or publish new records. Every ``_MAINTAIN_S`` seconds also apply age and
        budget, and save the times of use."""
        with self._guarded():
            now, longest = self._now(), _LONGEST_OPEN_S
            if self._settings.ttl:
                longest = min(longest, self._settings.ttl / 8)
            if self._writer is not None and now - self._writer.opened > longest:
                self._seal()
            elif self._writer is not None and not 0 <= now - self._published < _PUBLISH_S:
                self._published = now
                if not self._writer.publish(self._digest):
                    self._give_up()
            if 0 <= now - self._maintained < _MAINTAIN_S:
                return
            self._maintained = now
            own = self._writer.segment if self._writer is not None else None
            self._cleaner.expire(self._oldest(), now, own)
            self._cleaner.save_use()
            self._cleaner.make_room(0)

    def _flush(self, fields: dict[str, bytes]) -> int:
        """As ``RecordStore.flush``. The bytes are gone from the files when the call returns. Another process
        that stores later than the call may store again."""
        count = 0
        with self._guarded():
            if not fields:
                self._leave()
                count = self._cleaner.flush_all()
            else:
                own = self._writer.segment if self._writer is not None else None
                count = self._cleaner.flush(fields, own)
        return count

    def elsewhere(self) -> frozenset[bytes]:
        """Return keys of the latest blocks in other namespaces, from footers alone."""
        keys = set[bytes]()
        with self._guarded():
            others = [file for file in files_of(self._root) if file.path.parent != self._folder]
            for file in sorted(others, key=lambda file: file.used)[-_MOST_ELSEWHERE:]:
                if file.path.suffix == SUFFIX and len(keys) < _MOST_KEYS:
                    keys.update(keys_of(self._disk, file.path, self._digest)[:_MOST_KEYS])
        return frozenset(keys)

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
        own = self._cleaner
        return self._stats(nbytes=own.nbytes, evicted=own.evicted, expired=own.expired, flushed=own.flushed)

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
            self._give_up()
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

    def _give_up(self) -> None:
        """Forget this process's segment, whose file another process has removed."""
        if self._writer is not None:
            self._index.forget(self._writer.segment)
        self._leave()

    def _leave(self) -> None:
        """Give up this process's segment without a footer."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    # Reading

    def _read(self, run: Sequence[Found], buffer: RecordBuffer) -> int:
        """Read the bytes of a run to the start of the buffer. Return their number. Raises RecordGone or
        StoreOff."""
        first, (offset, nbytes) = run[0], extent(run)
        # A descriptor for each run: another process may remove the file at any time.
        try:
            fd = self._disk.open(first.segment.path, direct=True)
            try:
                return self._disk.read(fd, buffer.memory[:nbytes], offset)
            finally:
                os.close(fd)
        except FileNotFoundError:
            self._drop(first, "gone")
            raise RecordGone("another process has removed the segment") from None
        except OSError as error:
            self._turn_off(error)
            raise StoreOff(self.off) from error

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
