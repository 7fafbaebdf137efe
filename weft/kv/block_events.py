"""Changes of a prefix cache in order, with the token ids of stored blocks: the source of events for routers.

    pool ──key──► PrefixLog ──► BlockEvents ◄── Caches.insert: tokens and hashes of the sequence

The index of a pool knows keys only. The sequence that inserts a block knows the token ids. ``BlockEvents``
joins both at the insert, so no second index exists. Pure: no clock, no I/O.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from weft.common.errors import EngineDead
from weft.kv.hashing import media_keys
from weft.types.media_item import MediaItem

POSITION_BYTES = 8
"""Bytes of the relative position at the end of an image key, see ``weft.kv.hashing.media_keys``."""


class Content(Protocol):
    """A sequence, as far as the content of blocks depends on the sequence."""

    @property
    def tokens(self) -> array[int]: ...

    @property
    def salt(self) -> str: ...

    @property
    def adapter(self) -> str: ...

    @property
    def media(self) -> tuple[MediaItem, ...]: ...


ExtraKeys: TypeAlias = tuple[str | tuple[str, int], ...]
"""Further content of a block: salt, digest of the adapter, and (image key in hex, position relative to the
block)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks of one sequence entered the index."""

    keys: list[bytes]
    parent: bytes | None
    """Key of the block before the first block; None at the start of a sequence."""
    tokens: list[int]
    extra: list[ExtraKeys | None]
    """One entry per block; None for a block of token ids alone."""


@dataclass(frozen=True, slots=True)
class Removed:
    """A block left the index."""

    key: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """All blocks left the index."""


BlockEvent: TypeAlias = Stored | Removed | Cleared


class BlockEvents:
    """Records the changes of one pool's index until ``take``.

    The events of a step are bounded: a step inserts at most its own tokens and evicts at most all blocks.
    """

    def __init__(self, positions: int, base_block: int) -> None:
        """``positions``: tokens of a block of the pool. ``base_block``: tokens per hash."""
        self.positions = positions
        self._base = base_block
        self._ratio = positions // base_block
        self._fresh: list[bytes] = []
        """Keys added to the index and not yet described, in order."""
        self._events: list[BlockEvent] = []

    def added(self, key: bytes) -> None:
        """Record a key added to the index. Call ``describe`` before any other change."""
        self._fresh.append(key)

    def removed(self, key: bytes) -> None:
        """Record the removal of a key from the index."""
        self._events.append(Removed(key))

    def cleared(self) -> None:
        """Record the removal of all keys. Earlier events have no effect any more."""
        self._fresh.clear()
        self._events = [Cleared()]

    def describe(self, content: Content, hashes: Sequence[bytes]) -> None:
        """Record the keys added since the last call: blocks of ``content``, with the chain ``hashes``.

        Raises EngineDead for an added key outside ``hashes``.
        """
        if not self._fresh:
            return
        entries = self._entries_of(hashes)
        self._fresh.clear()
        first = 0
        for at in range(1, len(entries) + 1):
            # A block whose content was in the index already ends a run of consecutive new blocks.
            if at == len(entries) or entries[at] != entries[at - 1] + 1:
                self._events.append(self._stored(content, hashes, entries[first], entries[at - 1] + 1))
                first = at

    def take(self) -> list[BlockEvent]:
        """Return all events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _entries_of(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the block number of each fresh key, in ascending order."""
        entry = len(hashes) // self._ratio
        entries: list[int] = []
        # The new blocks are almost always the last blocks, so the search begins at the end.
        for key in reversed(self._fresh):
            entry -= 1
            while entry >= 0 and hashes[(entry + 1) * self._ratio - 1] != key:
                entry -= 1
            if entry < 0:
                raise EngineDead("a block entered the prefix index without its sequence")
            entries.append(entry)
        return entries[::-1]

    def _stored(self, content: Content, hashes: Sequence[bytes], first: int, end: int) -> Stored:
        """Return the event of the blocks ``first`` .. end - 1."""
        ratio = self._ratio
        before = first * ratio
        return Stored(
            keys=list(hashes[before + ratio - 1 : end * ratio : ratio]),
            parent=hashes[before - 1] if before else None,
            tokens=content.tokens[first * self.positions : end * self.positions].tolist(),
            extra=self._extra(content, first, end),
        )

    def _extra(self, content: Content, first: int, end: int) -> list[ExtraKeys | None]:
        """Return the extra keys of the blocks ``first`` .. end - 1. Only the first block of a sequence has
        the salt and the adapter: all later hashes depend on the first."""
        images = media_keys(content.media, self._base) if content.media else {}
        extra: list[ExtraKeys | None] = []
        for entry in range(first, end):
            keys: list[str | tuple[str, int]] = []
            for number in range(entry * self._ratio, (entry + 1) * self._ratio):
                begin = (number - entry * self._ratio) * self._base
                keys += [_image(key, begin) for key in images.get(number, ())]
            if entry == 0:
                keys += [key for key in (content.salt, content.adapter) if key]
            # An image in two base blocks of the block counts once.
            extra.append(tuple(dict.fromkeys(keys)) or None)
        return extra


def _image(key: bytes, begin: int) -> tuple[str, int]:
    """Return (image key, with the lag if any, as 64 hex digits; position relative to the block) of one of
    ``media_keys``.

    ``begin``: position of the base block in the block.
    """
    relative = int.from_bytes(key[-POSITION_BYTES:], "little", signed=True)
    return key[:-POSITION_BYTES].hex().ljust(64, "0"), begin + relative
