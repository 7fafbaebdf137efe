"""A store of records that hosts share, in an object store: each sealed segment is one object.

    write       appends a record to a segment in memory; a full or old segment is uploaded in the background
    list        every few seconds: new segments of other hosts; their footers are the index
    read        one range of an object for each run of records; every digest is checked
    away        after an error or a late answer: for a while nothing is asked, and every block is a miss

Objects have the bytes of segment files (``layout``). Names begin with the time of their creation, so a list
of new segments is short. All requests have deadlines and run on a thread of their own (``requests``). Only
``read_run`` waits for a request, in the thread of a tier, which no step waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import numpy as np

from weft.common.log import get_logger
from weft.disagg.protocol import digests
from weft.store import layout
from weft.store.errors import RecordGone
from weft.store.eviction import matching
from weft.store.index import Found
from weft.store.record_store import RecordStore, extent
from weft.store.records import PAGE, BlockChanges, Owner, RecordBuffer, RecordId
from weft.store.remote.memory_segment import OpenSegment, read_segment
from weft.store.remote.objects import MOST_LISTED, Listed, ObjectGone, Objects, RemoteError
from weft.store.remote.requests import Requests, batched
from weft.store.segment import SEGMENT_NAME, Digests, Segment
from weft.store.settings import RemoteSettings, StoreStats
from weft.store.writer import framed

_log = get_logger(__name__)

_FULL_S = 300.0
"""Seconds between two lists of all segments."""
_OVERLAP_S = 120.0
"""A list of new segments goes back so far: for clocks of hosts that differ, and for slow uploads."""
_READ_S, _ASK_S, _PUT_S, _CLOSE_S = 3.0, 5.0, 30.0, 4.0
"""Deadlines of a read of a run, of small requests, of an upload, and of the uploads at the end."""
_LONGEST_AWAY_S = 60.0
"""Seconds without requests after many failures."""
_MOST_UPLOADS = 2
"""Segments in memory whose upload is under way. Further blocks are skipped until an upload ends."""
_MOST_RECORDS = 1 << 20
"""Records in the index, about 200 MB. The oldest segments are left out."""
_MOST_DELETED = 256
"""Expired objects that one list removes."""
_AT_ONCE = 6
"""Segments that a list reads at once, with two requests each. ``requests`` allows more requests, so that no
read of a load waits behind a list of many new segments."""


class RemoteStore(RecordStore):
    """Records of one namespace in an object store, as one process sees them."""

    level = "remote"

    def __init__(
        self,
        settings: RemoteSettings,
        objects: Objects,
        *,
        digest: Digests = digests.digest_spans,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin to list the segments, in the background. Never blocks for the object store."""
        super().__init__(settings.namespace, settings.ttl, digest, now)
        self._settings, self._objects, self._folder = settings, objects, settings.namespace
        self._open: OpenSegment | None = None
        self._memory: dict[Segment, np.ndarray] = {}
        """Segments that are not uploaded yet, with their bytes."""
        self._known: dict[str, Segment] = {}
        """Segments in the object store. Used on the event loop alone, as the three below."""
        self._unreadable = set[str]()
        self._unwanted = set[str]()
        """Objects of this process to remove: an operator removed records during the upload."""
        self._flushes = list[dict[str, bytes]]()
        """Removals that are not complete yet."""
        self._full_at, self._backoff = -_FULL_S, settings.away_s
        self._away: float | None = None
        """Time, of ``time.monotonic``, at which the store is asked again; None while the store answers."""
        self._told_away = False
        self._nbytes = 0
        self._wake = asyncio.Event()
        self._requests = Requests()
        self._requests.start(self._watch())

    @property
    def away(self) -> bool:
        """True while the object store does not answer."""
        return self._away is not None

    # From the thread of the tier

    def has(self, record: RecordId) -> bool:
        return not self.away and super().has(record)

    def write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner = Owner()) -> str:
        """As ``RecordStore.write``; "away" while the object store does not answer, "slow" while uploads are
        behind, "large" for more than a segment."""
        why = self._write(record, buffer, nbytes, owner)
        if why:
            self._skipped[why] += 1
        return why

    def scan(self) -> None:
        """Do nothing: the index follows the object store in the background."""

    def maintain(self) -> None:
        if self._open is not None and self._now() - self._open.opened > self._settings.open_s:
            self._seal()

    def take_changes(self) -> BlockChanges:
        """Return the blocks that came and went, see ``RecordStore``. While the object store is away, no block
        is there; afterwards all come at once."""
        changes = super().take_changes()
        away = self.away  # read once: the event loop may change the answer at any time
        told, self._told_away = self._told_away, away
        if away:
            return BlockChanges([], [], whole=not told)
        return BlockChanges(self._index.blocks(), []) if told else changes

    def _flush(self, fields: dict[str, bytes]) -> int:
        """As ``RecordStore.flush``, but whole segments with a matching record are removed, and the objects
        are removed in the background: again and again while the object store is away."""
        hit = [one for one in self._index.segments() if len(matching(one, fields))]
        count = sum(map(self._index.forget, hit))
        if self._open is not None and self._open.segment in hit:
            self._memory.pop(self._open.segment, None)
            self._open = None
        self._count("flushed", count)
        self._requests.start(self._flush_soon(fields))
        return count

    def close(self) -> None:
        self._seal()
        end = time.monotonic() + _CLOSE_S
        while self._memory and not self.away and time.monotonic() < end:
            time.sleep(0.005)
        self.off = self.off or "closed"
        self._requests.close()

    def stats(self) -> StoreStats:
        counts = self._counts
        return self._stats(
            nbytes=self._nbytes, evicted=0, expired=counts["expired"], flushed=counts["flushed"]
        )

    def _write(self, record: RecordId, buffer: RecordBuffer, nbytes: int, owner: Owner) -> str:
        if self.off or self.away:
            return "off" if self.off else "away"
        if self._index.place(record) is not None:
            return "there"
        size = self._settings.segment_bytes
        if 4 * PAGE + layout.padded(nbytes) > size:
            return "large"
        if self._open is not None and not self._open.fits(nbytes):
            self._seal()
        if self._open is None:
            if len(self._memory) >= _MOST_UPLOADS:
                return "slow"
            self._open = OpenSegment(self._folder, self._namespace, size, self._now())
            self._memory[self._open.segment] = self._open.memory
            self._index.add(self._open.segment, 0.0)
        made, whole = self._open, PAGE + layout.padded(nbytes)
        entry = framed(
            made.segment.identity, record, buffer, nbytes, owner, made.end, self._now(), self._digest
        )
        made.memory[made.end : made.end + whole] = buffer.memory[:whole]
        made.end += whole
        self._index.append(made.segment, record, entry)
        self._count("written", 1)
        self._count("written_bytes", nbytes)
        return ""

    def _seal(self) -> None:
        """Begin to upload the open segment."""
        made, self._open = self._open, None
        if made is None:
            return
        if len(made.segment.living()):
            self._requests.start(self._upload(made.segment, made.sealed(self._digest)))
        else:
            self._memory.pop(made.segment, None)
            self._index.forget(made.segment)

    def _read(self, run: Sequence[Found], buffer: RecordBuffer) -> int:
        segment, (offset, nbytes) = run[0].segment, extent(run)
        memory = self._memory.get(segment)
        if memory is not None:
            buffer.memory[:nbytes] = memory[offset : offset + nbytes]
            return nbytes
        if self.away:
            raise RecordGone("the object store does not answer")
        try:
            data = self._requests.call(self._get(segment.path.as_posix(), offset, nbytes, _READ_S), _READ_S)
        except ObjectGone:
            self._count("gone", self._index.forget(segment))
            raise RecordGone("the object was removed") from None
        except RemoteError as error:
            self._fail(error)
            raise RecordGone("the object store does not answer") from error
        # A short answer counts as damage, see ``damage``.
        buffer.memory[: len(data)] = np.frombuffer(data, np.uint8)
        return len(data)

    def _fail(self, error: Exception) -> None:
        """Send no request for ``_backoff`` seconds. Called from any thread."""
        if self._away is None:
            _log.warning("the remote KV store does not answer (%s); its blocks are computed", error)
        self._away = time.monotonic() + self._backoff
        self._requests.soon(self._wake.set)

    # On the event loop

    async def _get(self, name: str, offset: int, nbytes: int, seconds: float = _ASK_S) -> memoryview:
        return await self._requests.one(lambda: self._objects.get(name, offset, nbytes), seconds)

    async def _upload(self, segment: Segment, data: memoryview) -> None:
        name = segment.path.as_posix()
        try:
            await self._requests.one(lambda: self._objects.put(name, data), _PUT_S)
            if segment in self._index.segments():
                segment.sealed, self._known[name] = True, segment
                self._nbytes += len(data)
        except RemoteError as error:
            self._fail(error)
        finally:
            if name not in self._known:
                if segment not in self._index.segments():
                    # An operator removed records meanwhile. An upload that failed may still arrive.
                    self._unwanted.add(name)
                    self._wake.set()
                self._count("lost", self._index.forget(segment))
            self._memory.pop(segment, None)

    async def _watch(self) -> None:
        """Keep the index up to date, until the loop ends."""
        while True:
            wait = self._settings.list_s if self._away is None else self._away - time.monotonic()
            if self._full_at >= 0 or self._away is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), max(wait, 0.01))
            self._wake.clear()
            # A read that failed while this task slept has moved the time.
            if self._away is not None and self._away > time.monotonic():
                continue
            try:
                await self._look()
                for name in list(self._unwanted):
                    await self._delete(name)
                    self._unwanted.discard(name)
                for fields in list(self._flushes):
                    await self._flush_once(fields)
                    self._flushes.remove(fields)
            except RemoteError as error:
                # The first list is a full list, whenever it succeeds.
                self._fail(error)
                self._backoff = min(2 * self._backoff, _LONGEST_AWAY_S)
            except Exception:
                _log.exception("the remote KV store could not be listed")
                self._away = time.monotonic() + _LONGEST_AWAY_S
            else:
                if self._away is not None:
                    _log.info("the remote KV store answers again")
                self._away, self._backoff = None, self._settings.away_s

    async def _look(self) -> None:
        """Add new segments to the index, and remove what is gone or has expired."""
        full = time.monotonic() - self._full_at >= _FULL_S or self._full_at < 0
        after = "" if full else self._name_at(self._now() - _OVERLAP_S)
        # An upload that ends after the list is not in the list.
        known = list(self._known) if full else []
        there = dict[str, Listed]()
        async for page in self._pages(self._folder, after):
            there.update((one.name, one) for one in page)
        cut = self._name_at(self._oldest()) if self._settings.ttl else ""
        expired = [name for name in there if name < cut][:_MOST_DELETED]
        for names in batched(expired, _AT_ONCE):
            await asyncio.gather(*map(self._expire, names))
        # New segments first: older segments may find no room in the index.
        new = sorted((one for name, one in there.items() if name >= cut and self._is_new(name)), reverse=True)
        for few in batched(new, _AT_ONCE):
            if not self._make_room(few[0].name):
                break
            await asyncio.gather(*map(self._add, few))
        for name in known:
            if name not in there and name in self._known:
                self._count("gone", self._index.forget(self._known.pop(name)))
        if full:
            self._full_at = time.monotonic()
            self._unreadable &= there.keys()
            self._nbytes = sum(one.nbytes for one in there.values())
        else:
            self._nbytes += sum(one.nbytes for one in new)

    async def _pages(self, folder: str, after: str) -> AsyncIterator[list[Listed]]:
        """Yield the segments with names above ``after``, page by page. ``folder``: see ``Objects.listing``.
        Raises RemoteError."""
        while True:
            list_page = partial(self._objects.listing, folder, after)
            page = await self._requests.one(list_page, _ASK_S)
            yield [one for one in page if SEGMENT_NAME.fullmatch(one.name.rpartition("/")[2])]
            if len(page) < MOST_LISTED:
                return
            after = page[-1].name

    def _make_room(self, name: str) -> bool:
        """Remove older segments than ``name`` from a full index. Return False if there is no room."""
        while len(self._index) >= _MOST_RECORDS:
            oldest = min(self._known, default=name)
            if oldest >= name:
                return False
            self._index.forget(self._known.pop(oldest))
        return True

    def _is_new(self, name: str) -> bool:
        # Uploads of this process are in the index already, and known only after the answer.
        own = any(segment.path.as_posix() == name for segment in tuple(self._memory))
        return not own and not any(name in names for names in (self._known, self._unreadable, self._unwanted))

    def _name_at(self, seconds: float) -> str:
        """Return the beginning of the names of segments that are created at this time."""
        return f"{self._folder}/{int(max(seconds, 0.0) * 1e6):016x}"

    async def _add(self, one: Listed) -> None:
        """Add a segment of another process to the index."""
        try:
            segment = await self._segment(one)
        except ObjectGone:
            return
        if segment is None or segment.identity.namespace != self._namespace:
            self._unreadable.add(one.name)
            self._count("damaged", 1)
            return
        self._known[one.name] = segment
        self._index.add(segment, self._oldest())

    async def _segment(self, one: Listed) -> Segment | None:
        return await read_segment(one, self._get, self._digest)

    async def _expire(self, name: str) -> None:
        await self._delete(name)
        if name in self._known:
            self._count("expired", self._index.forget(self._known.pop(name)))

    async def _delete(self, name: str) -> None:
        await self._requests.one(lambda: self._objects.delete(name), _ASK_S)

    async def _flush_soon(self, fields: dict[str, bytes]) -> None:
        self._flushes.append(fields)
        self._wake.set()

    async def _flush_once(self, fields: dict[str, bytes]) -> None:
        """Remove the objects of all namespaces that have a matching record."""
        async for page in self._pages("", ""):
            for few in batched(page, _AT_ONCE):
                await asyncio.gather(*(self._flush_object(one, fields) for one in few))

    async def _flush_object(self, one: Listed, fields: dict[str, bytes]) -> None:
        try:
            segment = self._known.get(one.name) or (await self._segment(one) if fields else None)
        except ObjectGone:
            return
        # An object that cannot be read may have such records: nothing of the object may stay.
        if segment is None or len(matching(segment, fields)):
            await self._delete(one.name)
            known = self._known.pop(one.name, None)
            if known is not None:
                self._index.forget(known)
