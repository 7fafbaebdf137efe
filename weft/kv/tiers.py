"""The state of a KV tier: the stored blocks, the copies under way, and the blocks to store next.

A tier never assigns blocks to a sequence. A tier brings blocks back into the pool: take a block, fill the
block, insert the block. So a loaded block is an ordinary prefix hit, a partial load is a shorter hit, and no
token depends on the tier.

States of a (KV cache group, key). ``disk`` stands for all levels. A block may be resident and on disk:

    resident ──StoreBlocks──> storing ──Copied──> disk ──Wanted──> loading ──Copied──> resident
        ^                        │ not stored       │ gone, corrupt      │ failed
        ╰────────────────────────╯                  ╰──> nothing <───────╯

Blocks of a copy are pinned until every rank has reported. Nothing else touches the blocks meanwhile, whatever
happens to sequences. After a loss of ranks, the results of earlier copies are void: only the pins end.

Pure: ``on(event, now)`` returns the actions. ``weft.scheduler.loads`` decides for sequences.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from weft.config.resolved import KVConfig
from weft.kv.caches import Caches, agreed
from weft.kv.pool import NULL_BLOCK
from weft.kv.tier_kinds import TierKind
from weft.types.tiers import (
    DISK,
    EVERY,
    LEVELS,
    REMOTE,
    BlockOutcome,
    CopyBlocks,
    Entry,
    Owner,
    StoreMode,
    copy_of,
)

SHARE = 0.25
"""Maximum share of each pool for blocks of copies under way. A disk that never answers occupies the share."""
JOB_BYTES = 4 << 20
"""Bytes of one command that stores blocks, on a rank."""
LOAD_BYTES = 16 << 20
"""Bytes of one command that loads blocks, on a rank: four reads. Three of them run during the check of the
previous read. A load can end early between two commands."""
MOST_JOBS = 2
"""Maximum number of commands under way, for loads and for stores each."""
MOST_WANTED = 1 << 16
"""Maximum number of blocks that wait to be stored. Further blocks are skipped."""
MOST_GHOSTS = 1 << 16
"""Number of keys remembered for the second use."""
STUCK_S = 10.0
"""Seconds after which a command without a report stops all further commands, until the report comes."""
_MISS_REASONS = {"evicted": "unwritten", "full": "slow_store", "slow": "slow_store", "skipped": "too_large"}
"""Reason of a skipped block -> reason in the explanation of a cache miss. Other reasons are the same."""
PIN_S = 600.0
"""Seconds for which the pin of a copy excuses missing blocks."""


class TurnEnded(NamedTuple):
    """A sequence has left its slot. ``hashes``: of the computed full base blocks; the first ``prompt`` of
    them belong to the prompt."""

    hashes: Sequence[bytes]
    prompt: int
    owner: Owner
    preempted: bool = False
    """True if the sequence will continue: the blocks are certain to be used again."""


class Wanted(NamedTuple):
    """Load the blocks ``entries``. ``TierBook.room`` has returned at least ``len(entries)``."""

    entries: Sequence[Entry]


class Copied(NamedTuple):
    """Every rank has reported the end of a command. ``outcomes``: for each block, the minimum
    ``BlockOutcome`` of all ranks."""

    job: int
    outcomes: bytes
    nbytes: int = 0
    seconds: float = 0.0
    levels: bytes = b""
    """For stored blocks: the set of levels in which every rank has stored the block, one byte per block. b""
    means the disk."""


class Changed(NamedTuple):
    """Blocks were added to a level, or removed from the level, without a command."""

    added: Sequence[Entry]
    gone: Sequence[Entry]
    level: int = DISK
    whole: bool = False
    """True if all earlier blocks of the level are gone, too."""


class Stopped(NamedTuple):
    """The store is off, until the engine process ends."""

    why: str


class Lost(NamedTuple):
    """Ranks were lost and all caches were reset."""


class Flushed(NamedTuple):
    """An operator empties the KV cache. Blocks in use stay in use, and are not stored."""


class TierTick(NamedTuple):
    """Time has passed."""


TierEvent = TurnEnded | Wanted | Copied | Changed | Stopped | Lost | Flushed | TierTick


class Resolved(NamedTuple):
    """The loads of the blocks ``entries`` have ended, with success or without."""

    entries: Sequence[Entry]


TierAction = CopyBlocks | Resolved


class Pinner(Protocol):
    """Pins of blocks. See ``weft.scheduler.pins``."""

    def pin(self, kind: int, block: int, until: float) -> None: ...

    def unpin(self, kind: int, block: int) -> None: ...


@dataclass(slots=True)
class _Job:
    """A command under way."""

    load: bool
    items: list[tuple[int, int, bytes]]
    """(KV cache group, block, key)."""
    nbytes: int
    place: int
    """Index in ``LEVELS`` of the level to load from. One command loads from one level. Unused for stores."""
    due: float
    """Time after which the disk counts as stuck."""
    void: bool = False
    """True if the result must be ignored: the caches were reset, so the contents of the blocks are unknown.
    For a load, also if an operator has emptied the cache since."""


class TierBook:
    """The states of all blocks with regard to one store. The size of a block is its bytes on one rank."""

    def __init__(
        self,
        caches: Caches,
        pins: Pinner,
        kv: KVConfig,
        dtype: str,
        mode: StoreMode = "reused",
        write_rate: float = 0.0,
    ) -> None:
        """``caches``, ``pins``: of the scheduler. ``write_rate``: maximum bytes per second that each rank
        writes; 0 for no limit."""
        self._caches, self._pins, self._base = caches, pins, kv.block_size
        each = zip(caches.kinds, kv.pools, strict=True)
        self.kinds = [TierKind(kind, pool, kv.block_size) for kind, pool in each]
        self._bytes = [pool.nbytes(dtype) // (pool.num_blocks + 1) for pool in kv.pools]
        self.mode, self._rate = mode, write_rate
        self._most = [max(1, int(SHARE * kind.num_blocks)) for kind in caches.kinds]
        self._copying = [0] * len(caches.kinds)
        """Blocks of commands under way, for each KV cache group."""
        self._levels_of: list[dict[bytes, int]] = [{} for _ in caches.kinds]
        """The levels that have each stored block, for each KV cache group."""
        self.blocks = [0] * len(LEVELS)
        """Number of blocks in each level."""
        self.loaded = [0] * len(LEVELS)
        """Number of blocks loaded from each level."""
        self._storing: set[Entry] = set()
        self._loading: set[Entry] = set()
        self._wanted: OrderedDict[Entry, tuple[Owner, str]] = OrderedDict()
        """Blocks to store, in order, with the reason. Not pinned: an evicted block is skipped."""
        self._reasons: dict[Entry, str] = {}
        self._ghosts: OrderedDict[Entry, None] = OrderedDict()
        """Keys of blocks after the first use, oldest first. The second use stores the block."""
        self._jobs: dict[int, _Job] = {}
        self._number = 0
        self._allowed = 0.0
        """Bytes that may be written now, under the write rate; as of ``_allowed_at``."""
        self._allowed_at: float | None = None
        self.off = ""
        """Why the store is off; "" while the store works."""
        self.stored: dict[str, int] = {}
        """Blocks stored, by reason."""
        self.stored_in: list[dict[str, int]] = [{} for _ in LEVELS]
        """The same for each level."""
        self.skipped: dict[str, int] = {}
        """Blocks not stored, by reason."""
        self._absent: OrderedDict[Entry, str] = OrderedDict()
        """Why the latest blocks are not in the store. Bounded."""
        self.elsewhere: frozenset[bytes] = frozenset()
        """Keys of blocks that the store has under another namespace."""
        self.failed: dict[Entry, BlockOutcome] = {}
        """Outcome of the last failed load of a block, until the block is stored or loaded again. Bounded."""

    # ---- queries

    def state(self, kind: int, key: bytes) -> str:
        """Return "loading", "storing", "disk", "resident" or ""; the first that holds."""
        entry = (kind, key)
        if entry in self._loading:
            return "loading"
        if entry in self._storing:
            return "storing"
        if key in self._levels_of[kind]:
            return "disk"
        return "resident" if self._caches.kinds[kind].pool.find(key) != NULL_BLOCK else ""

    def hit(self, hashes: Sequence[bytes], limit: int) -> int:
        """Return the longest prefix, at most ``limit``, whose blocks are all in the pool or in the store. In
        tokens."""
        if self.off or not any(self._levels_of):
            return self._caches.hit(hashes, limit)
        each = zip(self.kinds, self._levels_of, strict=True)
        return agreed([partial(kind.hit, hashes, disk) for kind, disk in each], limit)

    def missing(self, hashes: Sequence[bytes], reach: int) -> list[Entry]:
        """Return the blocks that the pool lacks for a hit of ``reach`` tokens, in the order of loading.

        Blocks of windows and of states come first, because no shorter hit is possible without these blocks.
        Then a partial load of the other blocks gives a shorter hit.
        """
        missing = list[Entry]()
        for every in (False, True):
            for number, kind in enumerate(self.kinds):
                if kind.every is every:
                    missing += [(number, key) for key in kind.needed(hashes, reach) if not kind.has(key)]
        return missing

    def bytes_of(self, entries: Sequence[Entry]) -> int:
        """Return the bytes of blocks on one rank."""
        return sum(self._bytes[kind] for kind, _ in entries)

    def place_of(self, entry: Entry) -> int:
        """Return the index in ``LEVELS`` of the fastest level with the block; of the slowest level if no
        level has the block."""
        levels = self._levels_of[entry[0]].get(entry[1], REMOTE)
        return (levels & -levels).bit_length() - 1

    def room(self, entries: Sequence[Entry], promised: Sequence[int]) -> int:
        """Return the number of leading ``entries`` that one command can load now; 0 while no command may
        start.

        ``promised``: blocks of each KV cache group that prefills in progress will take.
        """
        if self.off or sum(job.load for job in self._jobs.values()) >= MOST_JOBS:
            return 0
        left = [most - copying for most, copying in zip(self._most, self._copying, strict=True)]
        free = [kind.available() - take for kind, take in zip(self._caches.kinds, promised, strict=True)]
        room, count = LOAD_BYTES, 0
        for kind, _ in entries:
            left[kind] -= 1
            free[kind] -= 1
            room -= self._bytes[kind]
            if left[kind] < 0 or free[kind] < 0 or (room < 0 and count):
                break
            count += 1
        return count

    def loads(self, job: int) -> bool:
        """Return True if the command ``job`` is under way and loads blocks."""
        return job in self._jobs and self._jobs[job].load

    def is_loading(self, entry: Entry) -> bool:
        """Return True while a command loads the block."""
        return entry in self._loading

    def stalled(self, now: float) -> bool:
        """Return True if the disk has not answered a command for too long."""
        return any(job.due < now for job in self._jobs.values())

    def loads_from(self, job: int) -> int:
        """Return the index in ``LEVELS`` of the level from which the command ``job`` loads."""
        return self._jobs[job].place

    @property
    def loading_bytes(self) -> list[int]:
        """Bytes that commands under way load on each rank, of each level."""
        nbytes = [0] * len(LEVELS)
        for job in self._jobs.values():
            nbytes[job.place] += job.nbytes * job.load
        return nbytes

    @property
    def busy(self) -> bool:
        """True if a command is under way, or blocks wait to be stored."""
        return bool(self._jobs or self._wanted)

    @property
    def num_copying(self) -> int:
        """Number of blocks of commands under way, over all KV cache groups."""
        return sum(self._copying)

    @property
    def num_stored(self) -> int:
        """Number of blocks in the levels together."""
        return sum(map(len, self._levels_of))

    def why(self, entry: Entry) -> str:
        """Return why neither pool nor store has a block; "" if unknown.

        - "storing": the write has not ended;
        - "unwritten": evicted from the pool before the write;
        - "no_room", "slow_store", "too_large", "off", "lost": no level took the block;
        - "off": also if the levels with the block are off or do not answer;
        - "removed": by age, by eviction from the store or by an operator;
        - "first_use": with ``reused``, the second use stores the block;
        - "version": stored under other weights, data types, layouts or builds.
        """
        if entry in self._storing or entry in self._wanted:
            return "storing"
        if entry in self._absent:
            return self._absent[entry]
        if entry[1] in self.elsewhere:
            return "version"
        return "first_use" if entry in self._ghosts else ""

    # ---- events

    def on(self, event: TierEvent, now: float) -> list[TierAction]:
        """Apply ``event`` and return the actions. After any event, further blocks may be stored."""
        actions = list[TierAction]()
        match event:
            case TurnEnded():
                self._ended(event)
            case Wanted(entries):
                actions.append(self._load(entries, now))
            case Copied():
                actions += self._copied(event)
            case Changed(added, gone, level, whole):
                if whole:
                    self._clear(level)
                for kind, key in gone:
                    self._remove(kind, key, level)
                for kind, key in added:
                    self._put(kind, key, level)
            case Stopped(why):
                self._stop(why)
            case Flushed():
                self._wanted.clear()
                self._ghosts.clear()
                for group in self._caches.kinds:
                    group.pool.forget_unused()
                # A load under way may bring back what the operator removes.
                self._void(loads_only=True)
            case Lost():
                self._void()
                self._wanted.clear()
        actions += self._store(now)
        return actions

    def _put(self, kind: int, key: bytes, levels: int) -> None:
        """Record that ``levels`` (bits, see ``weft.types.tiers``) have the block."""
        before = self._levels_of[kind].get(key, 0)
        self._absent.pop((kind, key), None)
        self._levels_of[kind][key] = before | levels
        for place in range(len(LEVELS)):
            self.blocks[place] += (levels & ~before) >> place & 1

    def _remove(self, kind: int, key: bytes, levels: int = EVERY) -> None:
        """Record that ``levels`` (bits) do not have the block any more."""
        before = self._levels_of[kind].pop(key, 0)
        if before & ~levels:
            self._levels_of[kind][key] = before & ~levels
        elif before:
            self._explain((kind, key), "removed")
        for place in range(len(LEVELS)):
            self.blocks[place] -= (before & levels) >> place & 1

    def _clear(self, level: int) -> None:
        """Remove all blocks of a level (``HOST``, ``DISK`` or ``REMOTE``) that is off or does not answer."""
        # A level may have a million blocks, and the step loop waits: so new dicts instead of removals.
        for kind, levels_of in enumerate(self._levels_of):
            lost = [key for key, levels in levels_of.items() if levels == level]
            self._levels_of[kind] = {
                key: levels & ~level for key, levels in levels_of.items() if levels != level
            }
            for key in lost[-MOST_GHOSTS:]:
                self._explain((kind, key), "off")
        self.blocks[level.bit_length() - 1] = 0

    def _void(self, *, loads_only: bool = False) -> None:
        """Ignore the results of all commands under way, or only of loads."""
        for job in self._jobs.values():
            job.void |= job.load or not loads_only

    def _ended(self, turn: TurnEnded) -> None:
        """Choose the blocks of an ended or preempted sequence to store.

        The next turn of a session continues after the whole sequence, or after the prompt if the client
        leaves out reasoning. A preempted sequence continues after the whole sequence. Other blocks are stored
        on their second use: the key of the first use is remembered in a ghost list.
        """
        hashes, prompt, owner, preempted = turn
        if self.off or not hashes:
            return
        session = bool(owner.session)
        if self.mode == "sessions" and not session:
            return
        continues = session or preempted
        next_keys = self._continued(hashes, prompt) if continues else [set()] * len(self.kinds)
        for number, (kind, keys) in enumerate(zip(self.kinds, next_keys, strict=True)):
            for key in kind.resident(hashes):
                entry = (number, key)
                if key in self._levels_of[number] or entry in self._storing or entry in self._wanted:
                    continue
                if self.mode == "all":
                    reason = "all"
                elif key in keys:
                    reason = "session" if session else "preempted"
                elif self.mode == "reused" and self._seen(entry):
                    reason = "reused"
                else:
                    continue
                if len(self._wanted) >= MOST_WANTED:
                    self._skip("full", entry)
                else:
                    self._wanted[entry] = (owner, reason)

    def _continued(self, hashes: Sequence[bytes], prompt: int) -> list[set[bytes]]:
        """Return, for each KV cache group, the keys that a next turn of the session reads."""
        next_keys = [set[bytes]() for _ in self.kinds]
        for part in (hashes, hashes[:prompt]):
            reach = self._caches.hit(part, len(part) * self._base)
            for kind, keys in zip(self.kinds, next_keys, strict=True):
                keys.update(kind.needed(part, reach))
        return next_keys

    def _seen(self, entry: Entry) -> bool:
        """Return True if the key was seen before; else remember the key."""
        if entry in self._ghosts:
            del self._ghosts[entry]
            return True
        self._ghosts[entry] = None
        if len(self._ghosts) > MOST_GHOSTS:
            self._ghosts.popitem(last=False)
        return False

    def _load(self, entries: Sequence[Entry], now: float) -> CopyBlocks:
        """Take and pin a block for each of ``entries``. Return the command that fills the blocks."""
        items = []
        for kind, key in entries:
            pool = self._caches.kinds[kind].pool
            block = pool.take()
            self._pins.pin(kind, block, now + PIN_S)
            pool.release(block, -1)  # the pin alone remains
            self._loading.add((kind, key))
            items.append((kind, block, key))
        return self._command(True, items, now)

    def _store(self, now: float) -> list[TierAction]:
        """Return commands to store waiting blocks, as far as the limits allow."""
        if not self._wanted or self.off or self.stalled(now):
            return []
        commands = list[TierAction]()
        while self._wanted and sum(not job.load for job in self._jobs.values()) < MOST_JOBS:
            items, owner = self._batch(now)
            if not items:
                break
            commands.append(self._command(False, items, now, owner))
        return commands

    def _batch(self, now: float) -> tuple[list[tuple[int, int, bytes]], Owner]:
        """Take the next blocks with the same owner from the waiting blocks, pin the blocks and return
        (blocks, owner). Half of the tier's share of a pool stays for loads."""
        room, items, owner = JOB_BYTES, list[tuple[int, int, bytes]](), Owner()
        self._refill(now)
        copying = list(self._copying)
        while self._wanted:
            entry, (entry_owner, reason) = next(iter(self._wanted.items()))
            kind, key = entry
            pool = self._caches.kinds[kind].pool
            block = pool.find(key)
            if block == NULL_BLOCK:
                del self._wanted[entry]
                self._skip("evicted", entry)
                continue
            size = self._bytes[kind]
            full = copying[kind] >= max(1, self._most[kind] // 2)
            # The first block of a command may have more than JOB_BYTES.
            other_command = items and (entry_owner != owner or room < size)
            if full or other_command or (self._rate and self._allowed < size):
                break
            del self._wanted[entry]
            owner, room = entry_owner, room - size
            pool.share(block)
            self._pins.pin(kind, block, now + PIN_S)
            pool.release(block, -1)
            copying[kind] += 1
            self._storing.add(entry)
            self._reasons[entry] = reason
            items.append((kind, block, key))
            self._allowed -= size if self._rate else 0
        return items, owner

    def _refill(self, now: float) -> None:
        """Add the bytes that the write rate allows since the last call. At most the bytes of one second, of
        one command or of one block add up while nothing is written."""
        if self._rate:
            since = now if self._allowed_at is None else self._allowed_at
            most = max(self._rate, float(JOB_BYTES), *map(float, self._bytes))
            self._allowed, self._allowed_at = min(most, self._allowed + (now - since) * self._rate), now

    def _command(
        self, load: bool, items: list[tuple[int, int, bytes]], now: float, owner: Owner = Owner()
    ) -> CopyBlocks:
        """Register and return a command. ``items``: (KV cache group, block, key)."""
        self._number += 1
        for kind, _, _ in items:
            self._copying[kind] += 1
        nbytes = sum(self._bytes[kind] for kind, _, _ in items)
        place = self.place_of((items[0][0], items[0][2])) if load else 0
        self._jobs[self._number] = _Job(load, items, nbytes, place, now + STUCK_S)
        return copy_of(self._number, load, items, owner)

    def _copied(self, copied: Copied) -> Iterator[TierAction]:
        """Release the blocks of an ended command. Loaded blocks enter the prefix cache first."""
        job = self._jobs.pop(copied.job, None)
        if job is None:
            return
        levels = copied.levels or bytes([DISK]) * len(job.items)
        for (kind, block, key), outcome, stored in zip(job.items, copied.outcomes, levels, strict=True):
            entry, done = (kind, key), outcome == BlockOutcome.DONE
            self._copying[kind] -= 1
            if job.load:
                self._loading.discard(entry)
                self.loaded[job.place] += done
                self._insert_loaded(entry, block, BlockOutcome(outcome), job.void)
            else:
                self._storing.discard(entry)
                reason = self._reasons.pop(entry, "all")
                if done and not stored:  # no level has the parts of all ranks
                    outcome, done = BlockOutcome.SLOW, False
                if done and not job.void:
                    self._put(kind, key, stored)
                    self.failed.pop(entry, None)
                    for place, counts in enumerate(self.stored_in):
                        if stored >> place & 1:
                            counts[reason] = counts.get(reason, 0) + 1
                    self.stored[reason] = self.stored.get(reason, 0) + 1
                elif not done:
                    self._skip(BlockOutcome(outcome).name.lower(), entry)
            self._pins.unpin(kind, block)
        if job.load:
            yield Resolved([(kind, key) for kind, _, key in job.items])
        # The store of one rank is off until the process of the rank ends. Without the rank no block is
        # complete.
        if BlockOutcome.OFF in copied.outcomes and not self.off:
            self._stop("the store of a rank is off")

    def _insert_loaded(self, entry: Entry, block: int, outcome: BlockOutcome, void: bool) -> None:
        """Insert a loaded block into the prefix cache, unless the load has failed or the caches were reset.

        INVARIANT: every rank has filled and checked the block, and no rank was lost since.
        """
        kind, key = entry
        if outcome in (BlockOutcome.CORRUPT, BlockOutcome.GONE):
            self._remove(kind, key)
        if outcome == BlockOutcome.DONE and not void:
            self._caches.kinds[kind].pool.insert(block, key)
            self.failed.pop(entry, None)
        elif len(self.failed) < MOST_GHOSTS:
            self.failed[entry] = BlockOutcome.GONE if outcome == BlockOutcome.DONE else outcome

    def _stop(self, why: str) -> None:
        """Turn the store off, and skip all waiting blocks."""
        self.off = why
        for entry in self._wanted:
            self._skip("off", entry)
        self._wanted.clear()
        for levels_of in self._levels_of:
            levels_of.clear()
        self.blocks = [0] * len(LEVELS)

    def _skip(self, reason: str, entry: Entry) -> None:
        """Count a block that is not stored, and remember why."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        self._explain(entry, _MISS_REASONS.get(reason, reason))

    def _explain(self, entry: Entry, why: str) -> None:
        """Remember why ``entry`` is not in the store, for ``why``."""
        self._absent[entry] = why
        if len(self._absent) > MOST_GHOSTS:
            self._absent.popitem(last=False)
