"""Images of prompts in the engine: stored embeddings, users of embeddings, and the encoding work of a step.

Ranks decide nothing. The plan names the images to encode (``Encode``), the moves (``MoveMedia``) and the
embedding of each row (``BindMedia``). The key of an embedding is the key of the image. So other prompts with
the same image use the embedding until memory is needed: see ``weft.kv.embeddings``.

    a chunk computes the first position of an image   encoded or found; in use by the sequence from now on
    a chunk computes the last position of an image    unused by the sequence once the plan is made
    memory is needed                                  unused embeddings go first, least recently used first;
                                                      then embeddings of later sequences, encoded again later

INVARIANT: the first prefilling sequence in order can always continue. One image fits into the memory, and
everything else may be evicted, except embeddings read by rows of the same plan, and destination blocks of
open transfers; transfers end at a deadline.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from weft.common.errors import EngineDead, InvalidRequest
from weft.config.resolved import MediaLimits
from weft.kv.embeddings import Embedded, EmbeddingCache
from weft.scheduler.images.whole_images import binding
from weft.scheduler.sequence import Sequence
from weft.types.media_item import MediaItem, items_within, spans_of
from weft.types.plan import BindMedia, Encode, GatherMedia, SlotUpdate, column

MOST_PIXELS = 64 << 20
"""Maximum bytes of pixels of one image, and of a plan with several images: a plan is one frame."""

MOST_LAG = 1 << 20
"""Maximum rope positions from the first to the last group of frames of a video. Positions behind many such
videos fit into int32."""


def patches_of(item: MediaItem) -> int:
    """Return the number of patches of an image or frame group before merging: the work of the tower."""
    frames, rows, columns = item.grid
    return frames * rows * columns


def encoding(item: MediaItem, held: Embedded) -> Encode:
    """Return the slot update to encode ``item`` into the blocks of ``held``."""
    return Encode(blocks=held.ids, count=item.count, grid=item.grid, pixels=item.pixels, shared=item.shared)


def check_media(
    media: tuple[MediaItem, ...], length: int, limits: MediaLimits | None, computes: bool
) -> None:
    """Raise InvalidRequest unless ``media`` can be the images of a prompt of ``length`` tokens.

    ``limits``: None if the model takes no images; then every call raises, also for an empty ``media``.
    ``computes``: True if this group computes the prompt and so needs all embeddings.
    """
    if limits is None or (computes and not (limits.tower or limits.takes)):
        raise InvalidRequest("this model takes no images: leave them out", param="media")
    if len(media) > limits.most_items:
        raise InvalidRequest(
            f"the prompt has {len(media)} images; at most {limits.most_items} are allowed "
            "(--limit-mm-per-prompt)",
            param="media",
        )
    # Items must be in prompt order and must not overlap.
    end = 0
    before: MediaItem | None = None
    for item in media:
        if len(item.key) != 16:
            raise InvalidRequest("the key of an image is not 16 bytes", param="media")
        frames, rows, columns = item.grid
        sides_fit = min(item.grid) > 0 and rows % limits.merge == 0 and columns % limits.merge == 0
        too_many = limits.averaged and frames > limits.frames
        if not sides_fit or too_many or item.count != limits.tokens_of(item.grid):
            raise InvalidRequest("the grid of an image does not match its tokens", param="media")
        if item.start < end or item.start + item.count > length:
            raise InvalidRequest("the tokens of an image lie outside of the prompt", param="media")
        _check_lag(item, before, limits)
        end, before = item.start + item.count, item
        too_large = limits.blocks_of(item.count) > limits.blocks and (limits.tower or limits.takes)
        if len(item.pixels) > MOST_PIXELS or too_large:
            also = " (or raise --mm-cache-bytes, which must hold its embedding)" if too_large else ""
            raise InvalidRequest(
                f"an image of {columns * limits.patch} x {rows * limits.patch} pixels is too large: use a "
                f"smaller image{also}",
                param="media",
            )
        _check_source(item, limits, computes)
        # Bytes of one RGB frame. A frame group has 1 .. limits.frames frames per grid frame, or exactly one.
        size = rows * columns * limits.patch**2 * 3
        may_lack = limits.takes or not computes
        if not item.pixels and may_lack:
            continue
        most = frames if limits.averaged else frames * limits.frames
        if len(item.pixels) not in range(frames * size, most * size + 1, size):
            raise InvalidRequest("the pixels of an image do not match its grid", param="media")
    _check_transfers(media, limits)


def _check_lag(item: MediaItem, before: MediaItem | None, limits: MediaLimits) -> None:
    """Raise InvalidRequest if ``item`` has a lag and cannot continue the video of the item ``before``."""
    if item.lag is None:
        return
    follows = before is not None and before.start + before.count == item.start and before.grid == item.grid
    if before is None or not follows or not limits.sections:
        raise InvalidRequest("a group of frames does not follow a group of the same video", param="media")
    if item.lag < (before.lag or 0):
        raise InvalidRequest("the lags of the groups of a video are not in order", param="media")
    if item.lag > MOST_LAG:
        raise InvalidRequest(
            f"the frames of a video are too far apart in time: the model counts {item.lag} positions, and at "
            f"most {MOST_LAG} are allowed; send fps or timestamps of a shorter video",
            param="media",
        )


def _check_source(item: MediaItem, limits: MediaLimits, computes: bool) -> None:
    """Raise InvalidRequest if the embedding cannot come from the source of the item."""
    if item.transfer is not None and not (limits.takes and computes):
        raise InvalidRequest(
            "the image must be encoded by another group, but this group accepts no embeddings "
            "(--take-embeddings)",
            param="media",
        )
    if computes and item.pixels and item.transfer is None and not limits.tower:
        raise InvalidRequest(
            "this group encodes no images (--language-model-only): an encode group must encode the image",
            param="media",
        )


def _check_transfers(media: tuple[MediaItem, ...], limits: MediaLimits) -> None:
    """Raise InvalidRequest unless all received images of a prompt fit into memory together.

    No position is computed before all images are received.
    """
    coming = {item.key: item.count for item in media if item.transfer is not None}
    needed = sum(limits.blocks_of(count) for count in coming.values())
    if needed > limits.blocks:
        block = limits.block_rows * limits.row_bytes
        raise InvalidRequest(
            f"the {len(coming)} images of the prompt are too large together: use fewer or smaller images "
            f"(or raise --mm-cache-bytes to {needed * block} where images come from encode groups)",
            param="media",
        )


@dataclass(slots=True)
class _Use:
    """A sequence's need for an embedding."""

    order: tuple[int, int, int]
    """Scheduling order of the sequence, ``Sequence.key``."""
    step: int = -1
    """The last plan with a read of the embedding for the sequence."""
    over: bool = False
    """True if ``step`` is the last plan with a read."""
    runs: bool = False
    """True if the sequence has a slot. Without a slot, the sequence may wait for the slot of another
    sequence, which in turn may lack the memory of the embedding."""
    counted: bool = False
    """True if the arrival of the embedding (hit or encoding) was already counted."""


class MediaBook:
    """The embeddings stored on the ranks of one group, and the sequences with a need for each.

    Does nothing for a model without images.
    """

    def __init__(self, limits: MediaLimits | None) -> None:
        self._limits = limits
        self.cache = EmbeddingCache(
            0 if limits is None else limits.blocks,
            0 if limits is None else limits.host_blocks,
            row_bytes=1 if limits is None else limits.row_bytes,
            block_rows=1 if limits is None else limits.block_rows,
            dropped=self._forget,
            wanted=self.wants,
        )
        self._users: dict[bytes, dict[int, _Use]] = {}
        """Embedding key -> sequence id -> use."""
        self._uses: dict[int, set[bytes]] = {}
        """Sequence id -> embedding keys."""
        self._step = -1
        self._patches = 0
        self._pixels = 0
        """Patches and bytes of pixels to encode in the next plan so far."""
        self.short = False
        """True if a chunk of the next plan waits for memory or for a received image."""
        self.evict_slotless = False
        """True if a sequence with a slot may take image memory from sequences without a slot. Set by the
        scheduler when no row is in flight and an image lacks memory."""
        self.shards = limits is not None and limits.shards
        """True if each rank receives only a share of an embedding's rows."""

    def __len__(self) -> int:
        return len(self.cache)

    # ---- sequences

    def arrive(self, sequence: Sequence) -> None:
        """Register a new sequence: set ``spans``, and ``relies`` if an image cannot be encoded here. Does
        nothing for a model without images."""
        if self._limits is None:
            return
        if sequence.media and self._limits.sections:
            sequence.spans = column(spans_of(sequence.media, self._limits.merge).ravel())
        encodes = self._limits.tower
        sequence.relies = not sequence.fetches and not all(encodes and item.pixels for item in sequence.media)

    def want(self, sequence: Sequence, key: bytes) -> None:
        """Register the need of a sequence without a slot for an embedding, stored or being received."""
        self._use_of(sequence, key).counted = True

    def wait(self, sequence: Sequence) -> None:
        """Protect the stored images of a preempted sequence, if other groups encoded the images."""
        for item in sequence.media if sequence.relies else ():
            if self.cache.find(item.key) is not None:
                self.want(sequence, item.key)

    def enter(self, sequence: Sequence, computed: int) -> None:
        """Register the needs of a sequence with a new slot: all stored images after ``computed`` cached
        positions."""
        # Counted uses must not count again.
        counted = {key for key in self._uses.get(sequence.id, ()) if self._users[key][sequence.id].counted}
        self.leave(sequence)
        for item in sequence.media:
            if item.start + item.count > computed and self.cache.find(item.key) is not None:
                use = self._use_of(sequence, item.key)
                use.runs, use.counted = True, item.key in counted

    def leave(self, sequence: Sequence) -> None:
        """Drop all uses of a sequence after the loss of the slot or the end."""
        for key in self._uses.pop(sequence.id, ()):
            self._unuse(key, sequence.id)

    def wants(self, key: bytes) -> bool:
        """Return True if a sequence still needs the embedding ``key``."""
        return any(not use.over for use in self._users.get(key, {}).values())

    def unused(self, keys: Container[bytes]) -> list[Embedded]:
        """Return evictable embeddings without any user, oldest first, except ``keys``.

        For a sequence without a slot and with a need for ``keys``.
        """
        return [held for held in self.cache.victims() if held.key not in keys and not self.wants(held.key)]

    def lost(self, sequence: Sequence, start: int) -> bool:
        """Return True if an image at or after position ``start`` is missing and cannot be encoded here.

        An image still being received for another sequence counts as missing too.
        """
        encodes = self._limits is not None and self._limits.tower
        return any(
            item.start + item.count > start
            and not (encodes and item.pixels)
            and not ((held := self.cache.find(item.key)) is not None and held.ready)
            for item in sequence.media
        )

    def encodes(self, sequence: Sequence, start: int) -> bool:
        """Return True if an image at or after position ``start`` must be encoded for ``sequence``."""
        return any(
            item.start + item.count > start and self.cache.find(item.key) is None for item in sequence.media
        )

    def spoil(self, sequence: Sequence) -> None:
        """Drop the embeddings of a failed sequence, except those with other users: the content may be
        wrong."""
        for item in sequence.media:
            held = self.cache.find(item.key)
            if held is not None and all(other == sequence.id for other in self._users.get(item.key, ())):
                self.cache.drop(held)

    def clear(self) -> None:
        """Forget everything, after the ranks lost all embeddings."""
        self.cache.clear()
        self._users.clear()
        self._uses.clear()
        self._step = -1

    # ---- plans

    def reach(self, sequence: Sequence, start: int, end: int, step: int) -> int:
        """Return how far a chunk of plan ``step`` over ``start`` .. end - 1 can go.

        The chunk ends before the first image neither stored nor encodable in the plan. Return ``start`` if
        the chunk begins with such an image. Set ``short`` if memory is missing, or if an image of the chunk
        is still being received or encoded. Plans must come in order of ``step``.
        """
        if not sequence.media or self._limits is None:
            return end
        self._begin(step)
        wanted: set[bytes] = set()
        patches, pixels, blocks = self._patches, self._pixels, 0
        for item in items_within(sequence.media, start, end):
            if item.key in wanted:
                continue
            wanted.add(item.key)
            held = self.cache.find(item.key)
            if held is not None and not held.ready:
                self.short = True
                return max(start, item.start)
            if held is None:
                # Nobody encodes the image here: `lost` decides about the sequence in the next plan.
                if sequence.relies and not item.pixels:
                    return max(start, item.start)
                patches += patches_of(item)
                pixels += len(item.pixels)
                first = patches == patches_of(item)  # the first image of a plan is always allowed
                if not first and (patches > self._limits.encode_patches or pixels > MOST_PIXELS):
                    return max(start, item.start)
            if held is None or held.on_host:
                blocks += self.cache.blocks_of(item.count)
            # Check stored images as well: an eviction for an earlier image must not take a stored image of
            # the chunk.
            if not self._fits(blocks, wanted, sequence):
                self.short = True
                return max(start, item.start)
        return end

    def take(self, sequence: Sequence, slot: int, start: int, end: int, step: int) -> list[SlotUpdate]:
        """Return the slot updates of a row of plan ``step`` over ``start`` .. end - 1, within ``reach``.
        Evicts other embeddings as needed, and records the uses.

        Encoding and moves go into ``take_ops`` of the same plan, before the rows. Raises EngineDead if
        ``reach`` did not ensure the memory.
        """
        self._begin(step)
        if self._limits is None:
            return []
        items = list(items_within(sequence.media, start, end))
        wanted = {item.key for item in items}
        found = [held for key in wanted if (held := self.cache.find(key)) is not None]
        for held in found:  # until all are on the device: host evictions must not take one of the images
            self.cache.pin(held)
        ops: list[SlotUpdate] = [self._bind(item, sequence, slot, end, wanted) for item in items]
        for held in found:
            self.cache.unpin(held)
        return ops

    def take_ops(self, step: int) -> list[SlotUpdate]:
        """Return and clear the updates of plan ``step`` without a slot."""
        return self.cache.take_ops(step)

    # ----

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._patches = self._pixels = 0

    def _use_of(self, sequence: Sequence, key: bytes) -> _Use:
        """Return the use of ``key`` by ``sequence``; create the use if missing."""
        users = self._users.setdefault(key, {})
        use = users.get(sequence.id)
        if use is None:
            use = users[sequence.id] = _Use(sequence.key)
            self._uses.setdefault(sequence.id, set()).add(key)
        return use

    def _unuse(self, key: bytes, sequence: int) -> None:
        users = self._users[key]
        del users[sequence]
        if not users:
            del self._users[key]

    def _forget(self, held: Embedded) -> None:
        for sequence in self._users.pop(held.key, ()):
            self._uses[sequence].discard(held.key)

    def _may_go(self, key: bytes, order: tuple[int, int, int]) -> bool:
        """Return True if the next plan may evict the embedding ``key`` for a sequence that does not read
        ``key``. ``order``: ``Sequence.key`` of that sequence."""
        users = self._users.get(key)
        if users is None:
            return True
        # Not evictable: read by the plan, or needed by an earlier sequence. The need of an earlier sequence
        # without a slot does not count with `evict_slotless`.
        return not any(
            use.step == self._step
            or (not use.over and use.order < order and (use.runs or not self.evict_slotless))
            for use in users.values()
        )

    def _victims(self, wanted: set[bytes], sequence: Sequence) -> Iterator[Embedded]:
        """Yield the victims for the embeddings ``wanted`` by ``sequence``, in eviction order.

        First unused embeddings, least recently used first. Then embeddings wanted only by sequences without a
        slot, last sequence in order first. Then all others. The generator does no work before the first
        ``next``, so a caller with enough free blocks pays nothing.
        """
        may_go = [
            held
            for held in self.cache.victims()
            if held.key not in wanted and self._may_go(held.key, sequence.key)
        ]
        yield from sorted(may_go, key=lambda held: self._place(held.key))

    def _place(self, key: bytes) -> tuple[int, ...]:
        """Return the rank of ``key`` among victims, smallest first: (0,) unused, (1, ...) used only without a
        slot, (2,) else."""
        uses = [use for use in self._users.get(key, {}).values() if not use.over]
        if not uses:
            return (0,)
        if any(use.runs for use in uses):
            return (2,)
        return (1, *(-number for number in min(use.order for use in uses)))

    def _fits(self, blocks: int, wanted: set[bytes], sequence: Sequence) -> bool:
        """Return True if ``blocks`` blocks can be freed, evicting everything evictable except ``wanted``."""
        missing = blocks - self.cache.available
        return missing <= 0 or missing <= sum(len(v.blocks) for v in self._victims(wanted, sequence))

    def _bind(
        self, item: MediaItem, sequence: Sequence, slot: int, end: int, wanted: set[bytes]
    ) -> BindMedia:
        """Make the image readable in the plan and return the update for the row. Records the use, which ends
        with the last position of the image."""
        # Encoding, lifting and gathering come in this order, all before the rows of the plan.
        held = self._on_device(item, sequence, wanted)
        if not held.whole:
            self.cache.op(GatherMedia(blocks=held.ids, count=held.count))
            held.whole = True
        self.cache.touch(held, self._step)
        use = self._use_of(sequence, item.key)
        use.step, use.runs = self._step, True
        use.over = sequence.media_ends[item.key] <= end
        return binding(item, slot, held.ids, self._limits)

    def _on_device(self, item: MediaItem, sequence: Sequence, wanted: set[bytes]) -> Embedded:
        """Return the embedding of ``item`` on the device with the next plan: found, lifted from the host or
        encoded.

        Raises EngineDead if ``reach`` did not ensure the memory.
        """
        held = self.cache.find(item.key)
        if held is not None:
            use = self._use_of(sequence, item.key)
            self.cache.hits += use.step < 0 and not use.counted
            if not held.on_host or self.cache.lift(held, self._victims(wanted, sequence)):
                return held
            raise EngineDead("no memory for the embedding of an image that a row reads")
        held = self.cache.add(item.key, item.count, self._victims(wanted, sequence))
        if held is None:
            raise EngineDead("no memory for the embedding of an image to encode")
        self._patches += patches_of(item)
        self._pixels += len(item.pixels)
        self.cache.encoded += 1
        self.cache.op(encoding(item, held))
        return held
