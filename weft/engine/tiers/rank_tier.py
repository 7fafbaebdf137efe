"""The KV tier of one rank: a thread that copies blocks between the rank's caches and the levels of the tier.

    step loop     put: queue a command behind the steps launched so far, and return
    this thread   loads first, reading one run of records ahead; then stores
                  each second: records of other processes, expiry, budget
    reports       ``take``; a descriptor becomes readable with each report

The bytes of a load are checked before they are copied into the caches. A failed block does not affect other
blocks. An unexpected error of the thread, or a disk that does not answer, never ends a step: the engine
process gets no report and stops using the tier.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from weft.common.errors import ConfigError, EngineDead
from weft.common.log import get_logger
from weft.disagg.transport.reports import ReportQueue
from weft.engine.tiers.block_copies import BlockCopies
from weft.engine.tiers.read_ahead import ReadAhead
from weft.runner.tier_thread import TierReport
from weft.store.errors import RecordCorrupt, RecordError, RecordGone, StoreOff
from weft.store.host import HostLevel
from weft.store.layout import owner_hashes
from weft.store.record_store import RecordStore
from weft.store.records import BlockChanges, Owner, RecordBuffer, RecordId
from weft.types.tiers import (
    EVERY,
    HOST,
    LEVELS,
    BlockOutcome,
    BlocksCopied,
    CopyBlocks,
    Entry,
    FlushStore,
    LevelStats,
    StoreChanged,
    StoredElsewhere,
    StoreState,
    TierCommand,
)

log = get_logger(__name__)

_TURN_S = 1.0
"""Seconds between two scans of the folder."""
_MOST_CHANGES, _SOON_S = 4096, 0.05
"""Maximum new blocks of a level in one report (about 5 ms of the step loop); seconds until the next
report."""
_END_S = 5.0
"""Maximum seconds to wait for the end of the thread, or for the end of all commands."""
_PREPARED_AT_ONCE = 4
"""Blocks of one step of the preparation."""
_FAILED = {
    RecordCorrupt: BlockOutcome.CORRUPT,
    RecordGone: BlockOutcome.GONE,
    StoreOff: BlockOutcome.OFF,
}
_REFUSED = {
    "room": BlockOutcome.NO_ROOM,
    "slow": BlockOutcome.SLOW,
    "rate": BlockOutcome.SLOW,
    "away": BlockOutcome.SLOW,
    "off": BlockOutcome.OFF,
}
"""Result of a write -> outcome, if no level has the block; any other result: ``SKIPPED``."""
_STORED = ("", "there")
"""Results of a write after which the store has the record."""


class RankTier:
    """Copies of one rank, in a thread of its own."""

    def __init__(
        self,
        copies: BlockCopies,
        open_stores: Callable[[], Sequence[RecordStore]],
        behind_steps: Callable[..., None],
        *,
        leads: bool,
        start: bool = True,
        cancel: Callable[[], None] = lambda: None,
        host: HostLevel | None = None,
        blocks: Sequence[int] = (),
    ) -> None:
        """``open_stores``: called on the thread, returns the stores, the fastest first. The call may take
        long and may raise ConfigError. ``behind_steps``: see ``Runner.behind_steps``. ``leads``: True for the
        rank of the engine process, which reports changes of the levels. ``cancel``: called by ``close``, ends
        a long ``open_stores`` early. ``host``: the level in host memory, read before the stores. ``blocks``:
        for each KV cache group, the maximum number of blocks whose memory is prepared for loads."""
        self._cancel = cancel
        self._copies, self._open, self._behind, self._leads = copies, open_stores, behind_steps, leads
        self._reports = ReportQueue[TierReport]()
        self._host = host
        self._marks: dict[int, Any] = {}
        """Command that stores blocks -> mark of the steps launched before."""
        self._commands: queue.SimpleQueue[TierCommand | threading.Event | None] = queue.SimpleQueue()
        self._loads = deque[CopyBlocks]()
        self._other_commands = deque[CopyBlocks | FlushStore]()
        """Stores, fences and flushes, in order."""
        self._stops = deque[threading.Event]()
        self._done = False
        self._opened = threading.Event()
        self._reported_state = StoreState()
        self._buffer = RecordBuffer(copies.most_bytes)
        self._reads = ReadAhead(copies.most_bytes)
        for buffer in (self._buffer, *self._reads.buffers):
            copies.pin(buffer.memory)
        self.stores: Sequence[RecordStore] = ()
        """The stores, once open."""
        self._off = set[int]()
        """Levels whose store has turned itself off."""
        self._blocks = blocks
        self._prepares = True
        self._prepared: Iterator[bool] = iter(())
        """Steps that prepare memory for loads, one for each turn without a command."""
        self._last_scan = time.monotonic()
        """Time of the last scan of the folder."""
        self._unreported: dict[int, dict[Entry, None]] = {1 << place: {} for place in range(len(LEVELS))}
        """Level -> blocks that were added to the level and are not reported yet."""
        self._thread = threading.Thread(target=self._run, name="weft-tier", daemon=True)
        if start:
            self._thread.start()

    # ---- from other threads

    @property
    def descriptor(self) -> int:
        return self._reports.descriptor

    def wait(self, seconds: float) -> bool:
        return self._opened.wait(seconds)

    def put(self, command: TierCommand) -> None:
        self._behind(self._place, command)

    def take(self) -> list[TierReport]:
        return self._reports.take()

    def stop_preparing(self) -> None:
        self._prepares = False

    def stop_all(self) -> None:
        placed, stopped = threading.Event(), threading.Event()

        def place() -> None:
            self._commands.put(stopped)
            placed.set()

        self._behind(place)  # behind the commands that wait for steps
        ended = placed.wait(_END_S)
        # Opening may take minutes. Until then the thread touches no block, and the first turn handles the
        # event before any command.
        if ended and self._opened.is_set():
            ended = stopped.wait(_END_S)
        if not ended and self._thread.is_alive():
            raise EngineDead("the thread of the KV tier does not stop")

    def close(self) -> None:
        self._cancel()
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(_END_S)
        if self._thread.is_alive():
            log.warning("the disk of the KV tier does not answer; blocks not yet written are lost")
        else:
            self._reads.close()  # only after the end of the thread: a load may still read
        self._reports.close()

    def _place(self, command: TierCommand) -> None:
        """Queue a command, on the thread that launches steps."""
        if isinstance(command, CopyBlocks) and not command.load:
            self._marks[command.job] = self._copies.mark()
        self._commands.put(command)

    # ---- on the thread

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._copies.close()

    def _work(self) -> None:
        try:
            self.stores = self._open()
        except (ConfigError, OSError) as error:
            self._fail(error)
            return
        except Exception as error:
            log.exception("the KV tier could not be opened")
            self._fail(error)
            return
        try:
            self._report_state(every=True)
            if self._leads:
                elsewhere = frozenset[bytes]().union(*(store.elsewhere() for store in self.stores))
                self._reports.tell(StoredElsewhere(elsewhere))
            self._opened.set()
            self._prepared = self._prepare()
            while not self._done:
                self.turn(_SOON_S if any(self._unreported.values()) else _TURN_S)
        except Exception as error:
            log.exception("the KV tier has failed, and is off")
            self._fail(error)
        finally:
            for store in self.stores:
                store.close()

    def _fail(self, error: Exception) -> None:
        """Answer every command with ``OFF``, and report why."""
        why = getattr(error, "message", "") or str(error) or type(error).__name__
        log.warning("the KV tier is off: %s", why)
        if self._leads:
            self._reports.tell(StoreState(off=why))
        self._opened.set()
        try:
            self._copies.settle()
        except Exception:
            # The device may still write to the blocks of the load under way: no answer, the blocks stay
            # reserved.
            log.exception("the copies of the KV tier do not end")
            if self._loads:
                self._loads.popleft()
        for command in (*self._loads, *self._other_commands):
            self._refuse(command)
        for event in self._stops:
            event.set()
        while not self._done:
            match self._commands.get():
                case None:
                    self._done = True
                case threading.Event() as event:
                    event.set()
                case command:
                    self._refuse(command)

    def _refuse(self, command: TierCommand) -> None:
        if isinstance(command, CopyBlocks):
            self._marks.pop(command.job, None)
            self._answer(command, bytes([BlockOutcome.OFF]) * command.size, 0, 0.0)
        else:
            log.warning("records of the KV tier were not removed, because the tier is off")

    def turn(self, seconds: float) -> None:
        """Carry out one command. Without a command, wait up to ``seconds``, then scan the folder."""
        waits = not (self._loads or self._other_commands)
        prepares = waits and next(self._prepared, False)
        # The preparation continues without a pause, but commands come first.
        waits = waits and not prepares
        try:
            self._enqueue(self._commands.get(timeout=seconds) if waits else self._commands.get_nowait())
            while True:
                self._enqueue(self._commands.get_nowait())
        except queue.Empty:
            pass
        idle = not (self._loads or self._other_commands)
        # A command leaves the queue at the end of the command: after an error, ``_fail`` answers the command.
        if self._loads:
            self._load(self._loads[0])
            self._loads.popleft()
        elif self._other_commands:
            self._store_or_flush(self._other_commands[0])
            self._other_commands.popleft()
        if idle:
            for event in self._stops:
                event.set()
            self._stops.clear()
            if self._done:
                return
        # Scan at the latest after _TURN_S, also while commands keep coming: other processes add records. The
        # preparation of a large pool has thousands of turns, so not every such turn scans.
        if (idle and not prepares) or time.monotonic() - self._last_scan >= _TURN_S:
            for store in self.stores:
                store.scan()
                store.maintain()
            self._report_state()
            self._last_scan = time.monotonic()

    def _prepare(self) -> Iterator[bool]:
        """Prepare the memory of the blocks that the first loads will fill. Yield True after each step.

        Where huge pages are rare, the first use of a page costs as much CPU time as ten copies: the system
        zeroes the page, and may have to move other pages. Without the preparation, the first requests after a
        restart would wait.
        """
        stored = sum(store.stats().records for store in self.stores)
        for kind, blocks in enumerate(self._blocks):
            # A new pool gives out blocks in order of the numbers: the first blocks are used first.
            most = min(stored, blocks)
            for first in range(1, most + 1, _PREPARED_AT_ONCE):
                if not self._prepares:
                    return
                self._copies.prepare(kind, first, min(first + _PREPARED_AT_ONCE - 1, most))
                yield True

    def _enqueue(self, command: TierCommand | threading.Event | None) -> None:
        if command is None:
            self._done = True
            self._drop()
        elif isinstance(command, threading.Event):
            self._drop()
            self._stops.append(command)
        elif isinstance(command, CopyBlocks) and command.load:
            self._loads.append(command)
        else:
            self._other_commands.append(command)

    def _drop(self) -> None:
        """Drop all commands."""
        for command in self._other_commands:
            if isinstance(command, CopyBlocks):
                self._marks.pop(command.job, None)
        self._loads.clear()
        self._other_commands.clear()

    def _store_or_flush(self, command: CopyBlocks | FlushStore) -> None:
        if isinstance(command, FlushStore):
            fields = {"payer": command.payer, "salt": command.salt, "session": command.session}
            count = sum(store.flush(**fields) for store in self.stores)
            if self._host is not None:
                count += self._host.flush(command.payer, command.salt, command.session)
            log.info("%d records of the KV tier were removed for an operator", count)
            self._report_state()
        else:
            self._store(command)

    def _load(self, command: CopyBlocks) -> None:
        """Fill each block of a command from the fastest level that has the block."""
        began, nbytes = time.monotonic(), 0
        items, missing = list(command.items()), list[int]()
        outcomes = bytearray([BlockOutcome.GONE]) * len(items)
        for number, (kind, block, key) in enumerate(items):
            host_copy = None if self._host is None else self._host.get(kind, key)
            if host_copy is None:
                missing.append(number)
            else:
                nbytes += self._fill(self._copies.record(kind, key), block, host_copy, outcomes, number)
        self._copies.settle()  # blocks from a store may overwrite these blocks in host memory
        for store in self.stores:
            nbytes += self._load_from(store, items, missing, outcomes)
            missing = [number for number in missing if outcomes[number] != BlockOutcome.DONE]
        for number in missing:
            if outcomes[number] == BlockOutcome.GONE:
                nbytes += self._gather(items[number], outcomes, number)
            elif outcomes[number] == BlockOutcome.OFF and not self._all_off:
                outcomes[number] = BlockOutcome.GONE  # ``OFF`` would also turn off the working levels
        self._answer(command, bytes(outcomes), nbytes, time.monotonic() - began)
        if self._host is not None:
            self._report_state()

    def _load_from(
        self,
        store: RecordStore,
        items: Sequence[tuple[int, int, bytes]],
        missing: Sequence[int],
        outcomes: bytearray,
    ) -> int:
        """Fill the blocks ``missing`` (indices of ``items``) that ``store`` has. Set the outcomes and return
        the bytes. ``items``: (KV cache group, block, key)."""
        records = {number: self._copies.record(items[number][0], items[number][2]) for number in missing}
        stored = [number for number, record in records.items() if store.has(record)]
        done = nbytes = 0
        for payloads in self._reads.runs(store, [records[number] for number in stored]) if stored else ():
            for payload in payloads:
                number = stored[done]
                kind, block, key = items[number]
                nbytes += self._fill(records[number], block, payload, outcomes, number)
                owner = None if self._host is None else store.owner(records[number])
                if self._host is not None and owner is not None and not isinstance(payload, RecordError):
                    self._host.put(kind, key, payload, owner)
                done += 1
            self._copies.settle()  # the next run overwrites the payloads
        return nbytes

    def _fill(
        self,
        record: RecordId,
        block: int,
        payload: np.ndarray | RecordError,
        outcomes: bytearray,
        number: int,
    ) -> int:
        """Start to copy a record to a block and set the outcome. Return the bytes."""
        if isinstance(payload, RecordError):
            outcomes[number] = _FAILED[type(payload)]
            return 0
        self._copies.into(record, block, payload)
        outcomes[number] = BlockOutcome.DONE
        return len(payload)

    def _gather(self, item: tuple[int, int, bytes], outcomes: bytearray, number: int) -> int:
        """Fill a block from the records of a group with another number of ranks, because no record has the
        bytes of this rank only. Set the outcome and return the bytes."""
        # A part may still be missing: open segments of other processes are not visible to this process.
        kind, block, key = item
        nbytes, outcome = 0, BlockOutcome.OFF if self._all_off else BlockOutcome.GONE
        for store in self.stores:
            found = store.find(kind, key)
            if found is None or outcome == BlockOutcome.DONE:
                continue
            parts = self._copies.parts_of(kind, found.parts)
            each = bytearray(len(parts))
            for place, part in enumerate(parts):
                record = RecordId(kind, key, part, found.parts)
                (payload,) = store.check_run(store.read_run([record], self._buffer))
                nbytes += self._fill(record, block, payload, each, place)
                self._copies.settle()
            outcome = BlockOutcome(min(each, default=BlockOutcome.GONE))
        outcomes[number] = outcome
        return nbytes

    def _store(self, command: CopyBlocks) -> None:
        """Write the blocks of a command to every level."""
        began, outcomes, levels, nbytes = time.monotonic(), bytearray(), bytearray(), 0
        owner, ready = Owner(*command.owner), self._marks.pop(command.job, None)
        names = owner_hashes(owner)
        for kind, block, key in command.items():
            writes = self._copies.writes(kind)
            if not writes and self._host is None:
                outcomes.append(BlockOutcome.DONE)
                levels.append(EVERY)
                continue
            size, stored = self._copies.out(kind, block, self._buffer, ready), 0 if writes else EVERY & ~HOST
            outcome = BlockOutcome.SKIPPED
            for store in self.stores if writes else ():
                result = store.write(self._copies.record(kind, key), self._buffer, size, owner)
                stored |= _bit(store) * (result in _STORED)
                outcome = _REFUSED.get(result, BlockOutcome.SKIPPED)
            if outcome == BlockOutcome.OFF and not self._all_off:
                outcome = BlockOutcome.NO_ROOM
            # Each rank has its own host memory. So each rank puts the bytes into host memory, also bytes that
            # another rank writes to the stores.
            if self._host is not None and self._host.put(kind, key, self._buffer.payload[:size], names):
                stored |= HOST
            outcomes.append(BlockOutcome.DONE if stored else outcome)
            levels.append(stored)
            nbytes += size * bool(stored)
        self._answer(command, bytes(outcomes), nbytes, time.monotonic() - began, bytes(levels))
        self._report_state()

    @property
    def _all_off(self) -> bool:
        """True if every level has turned itself off. Host memory never does."""
        return self._host is None and bool(self.stores) and all(store.off for store in self.stores)

    def _answer(
        self, command: CopyBlocks, outcomes: bytes, nbytes: int, seconds: float, levels: bytes = b""
    ) -> None:
        job = command.job
        self._reports.tell(
            BlocksCopied(rank=-1, job=job, outcomes=outcomes, levels=levels, nbytes=nbytes, seconds=seconds)
        )

    def _report_state(self, *, every: bool = False) -> None:
        """Report changes of complete blocks, and the state of the levels if the state has changed.

        The step loop applies the reports. So the many blocks of a newly opened store are reported in parts.
        ``every``: report all blocks at once; used before the first step.
        """
        most = sys.maxsize if every else _MOST_CHANGES
        levels = dict[str, LevelStats]()
        if self._host is not None:
            self._report_changes(HOST, self._host.take_changes(), most)
            levels["host"] = self._host.stats()
        for store in self.stores:
            bit, changes = _bit(store), store.take_changes()  # a store collects changes until they are taken
            if store.off and bit not in self._off:
                self._off.add(bit)
                changes = BlockChanges([], [], whole=True)
            self._report_changes(bit, changes, most)
            now = store.stats()
            levels[store.level] = LevelStats(
                nbytes=now.nbytes,
                blocks=now.records,
                away=int(bool(store.off) or store.away),
                evicted=now.evicted,
                expired=now.expired,
                corrupt=now.corrupt,
            )
        state = StoreState(levels, self.stores[0].off if self._all_off else "")
        if self._leads and state != self._reported_state:
            self._reported_state = state
            self._reports.tell(state)

    def _report_changes(self, level: int, changes: BlockChanges, most: int) -> None:
        """Report the changes of a level, with at most ``most`` added blocks. Further blocks stay in
        ``_unreported``."""
        if not self._leads:
            return
        unreported = self._unreported[level]
        if changes.whole:
            unreported.clear()
        for entry in changes.gone:
            unreported.pop(entry, None)
        unreported.update(dict.fromkeys(changes.added))
        added = tuple(itertools.islice(unreported, most))
        for entry in added:
            del unreported[entry]
        if added or changes.gone or changes.whole:
            self._reports.tell(StoreChanged(added, tuple(changes.gone), level, changes.whole))


def _bit(store: RecordStore) -> int:
    """Return the level of a store as a set of levels."""
    return 1 << LEVELS.index(store.level)
