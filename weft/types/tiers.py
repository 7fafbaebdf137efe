"""Messages about a KV tier: copies of blocks between the caches and a store, and statistics.

``CopyBlocks`` and ``BlocksCopied`` are also frames between an engine process and the ranks of a group
(``weft.types.frames``). No I/O.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np

KEY_BYTES = 16
"""Bytes of a block's key (``weft.kv.hashing``)."""

Entry: TypeAlias = tuple[int, bytes]
"""(number of the KV cache group, key) of a block."""
StoreMode: TypeAlias = Literal["sessions", "reused", "all"]
"""Which blocks a tier stores: of sessions, also of prefixes seen twice, or all."""

LEVELS = ("host", "disk", "remote")
"""Levels of a tier, the fastest first. A set of levels is a number: the sum of ``1 << place``."""
HOST, DISK, REMOTE = 1, 2, 4
EVERY = HOST | DISK | REMOTE
"""All levels: reported by a rank that need not write a block, because other ranks write the same bytes."""


class BlockOutcome(enum.IntEnum):
    """Result of the copy of one block. The result of a group is the minimum over all ranks."""

    LOST = 0
    """The rank's process ended, or missed the command."""
    OFF = 1
    """The store is off after an I/O error."""
    CORRUPT = 2
    """The digest was wrong, so the record was dropped."""
    GONE = 3
    """The store no longer has the record."""
    SKIPPED = 4
    """No level took the block: the block is too large."""
    NO_ROOM = 5
    """The disk had no room, and no other level took the block."""
    SLOW = 6
    """The level was busy with earlier writes or unreachable, and no other level took the block."""
    DONE = 7


class Owner(NamedTuple):
    """The owner of stored blocks: hash of the API key, salt and session. Each may be ""."""

    payer: str = ""
    salt: str = ""
    session: str = ""


class CopyBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Engine to rank: copy blocks to the store, or from the store into blocks. Answered with
    ``BlocksCopied``.

    Without blocks, the frame is a fence: the rank answers when all earlier copies have ended.
    """

    job: int
    load: bool
    kinds: bytes = b""
    """int32 [blocks]: number of the KV cache group."""
    blocks: bytes = b""
    """int32 [blocks]: block id."""
    keys: bytes = b""
    """16 bytes for each block."""
    owner: tuple[str, str, str] = ("", "", "")
    """``Owner`` of the stored blocks."""

    @property
    def size(self) -> int:
        """Number of blocks."""
        return len(self.keys) // KEY_BYTES

    def items(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield (KV cache group, block, key) of each block."""
        kinds: list[int] = np.frombuffer(self.kinds, "<i4").tolist()
        blocks: list[int] = np.frombuffer(self.blocks, "<i4").tolist()
        for number, (kind, block) in enumerate(zip(kinds, blocks, strict=True)):
            yield kind, block, self.keys[KEY_BYTES * number : KEY_BYTES * (number + 1)]


def copy_of(
    job: int, load: bool, items: Sequence[tuple[int, int, bytes]], owner: Owner = Owner()
) -> CopyBlocks:
    """Return the command to copy ``items``: (KV cache group, block, key) of each block."""
    return CopyBlocks(
        job=job,
        load=load,
        kinds=np.array([kind for kind, _, _ in items], "<i4").tobytes(),
        blocks=np.array([block for _, block, _ in items], "<i4").tobytes(),
        keys=b"".join(key for _, _, key in items),
        owner=(owner.payer, owner.salt, owner.session),
    )


class BlocksCopied(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Rank to engine: the copies of a job have ended. The rank no longer accesses the blocks."""

    rank: int
    job: int
    outcomes: bytes = b""
    """One ``BlockOutcome`` for each block."""
    levels: bytes = b""
    """For stored blocks: the set of levels that have each block, one byte per block."""
    nbytes: int = 0
    """Bytes copied by the rank."""
    seconds: float = 0.0
    """Seconds from the start of the job to the end, without the time in the queue."""


class FlushStore(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """Engine to rank: remove records from the store. All fields None: every record of the folder."""

    payer: str | None = None
    salt: str | None = None
    session: str | None = None


class StoredElsewhere(msgspec.Struct, frozen=True):
    """The store has blocks with these keys for other weights, dtypes, layouts or builds."""

    keys: frozenset[bytes]


class StoreChanged(msgspec.Struct, frozen=True):
    """Changes of a level, reported by the engine's rank: records of other processes, evictions, expiry."""

    added: tuple[Entry, ...] = ()
    gone: tuple[Entry, ...] = ()
    level: int = DISK
    whole: bool = False
    """True if all earlier blocks of the level are gone, too."""


class LevelStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Statistics of one level. Counters since the start, except gauges. Measured by the engine's rank."""

    nbytes: int = 0
    """Gauge: bytes in the level; for the disk, all bytes in the folder."""
    blocks: int = 0
    """Gauge: blocks of the model."""
    away: int = 0
    """Gauge: 1 while the level is off, or does not answer."""
    evicted: int = 0
    expired: int = 0
    corrupt: int = 0
    loaded: int = 0
    """Blocks loaded from the level."""
    load_bytes: int = 0
    """Bytes requested from the level, on one rank."""
    stores: dict[str, int] = {}
    """Stored blocks, by reason."""


class StoreState(msgspec.Struct, frozen=True):
    """State of the levels, as seen by the rank of the engine process."""

    levels: dict[str, LevelStats] = {}
    off: str = ""
    """Reason why the tier is off; "" while any level works."""


class TierStats(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Statistics of the disk tier of an engine process. Counters since the start, except gauges."""

    nbytes: int = 0
    """Gauge: bytes in the folder, of all processes."""
    blocks: int = 0
    """Gauge: blocks of the model in the folder."""
    waiting: int = 0
    """Gauge: sequences that wait for a load."""
    pinned: int = 0
    """Gauge: blocks pinned by copies."""
    off: int = 0
    """Gauge: 1 while the tier is off after an error, or while the disk does not answer."""
    loads: dict[str, int] = {}
    """Loads of prompts, by outcome."""
    load_bytes: int = 0
    load_seconds: float = 0.0
    """Seconds for which prompts waited for loads, summed."""
    stores: dict[str, int] = {}
    """Stored blocks, by reason."""
    skipped: dict[str, int] = {}
    """Blocks that were not stored, by reason."""
    evictions: int = 0
    """Records evicted or expired by this process."""
    saved_tokens: int = 0
    """Prompt tokens that were not computed because of loads."""
    levels: dict[str, LevelStats] = {}
    """Statistics by level. Since version 4."""


def summed_tiers(stats: Sequence[TierStats]) -> TierStats | None:
    """Return the sums over engine processes that share a folder; None without tiers. For the fields in
    ``_LARGEST``: the maximum."""
    return _summed(stats) if stats else None


_LARGEST = ("nbytes", "blocks", "off", "away")
_Stats = TypeVar("_Stats", TierStats, LevelStats)


def _summed(stats: Sequence[_Stats]) -> _Stats:
    made: dict[str, Any] = {}
    for name in stats[0].__struct_fields__:
        values = [getattr(one, name) for one in stats]
        if name == "levels":
            names = dict.fromkeys(level for value in values for level in value)
            made[name] = {level: _summed([v[level] for v in values if level in v]) for level in names}
        elif isinstance(values[0], dict):
            made[name] = dict(sum(map(Counter, values), Counter[str]()))
        else:
            made[name] = max(values) if name in _LARGEST else sum(values)
    return type(stats[0])(**made)


TierCommand = CopyBlocks | FlushStore
