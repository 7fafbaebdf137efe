"""Images of prompts at the head: which embeddings the ranks hold, who still needs them, what a step encodes.

Ranks only obey: the plan says what they encode (``Encode``), forget (``DropMedia``) and which of its rows
read which embedding (``BindMedia``). An embedding is known by the key of its image, so it is also there for
other prompts with the same image, until room is needed.

    a chunk computes the first of its positions    encoded, or found; the sequence uses it from now on
    a chunk computes the last of its positions     unused by the sequence once that plan is made
    room is needed                                 the least recently used goes that nobody uses;
                                                   then those of later sequences, which encode again

INVARIANT: the first in order of the sequences that are prefilled can always go on: one image fits in the
room, and everything else in it may go, but for what rows of the same plan read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.common.errors import InvalidRequest
from weft.config.resolved import MediaLimits
from weft.scheduler.sequence import Sequence
from weft.types.media import MediaItem, spans_of
from weft.types.plan import BindMedia, DropMedia, Encode, Op, column

MOST_PIXELS = 64 << 20
"""Bytes of pixels in a plan, beside those of its first image, and of one image: a plan is one frame."""


def patches_of(item: MediaItem) -> int:
    frames, rows, columns = item.grid
    return frames * rows * columns


def check_media(media: tuple[MediaItem, ...], length: int, limits: MediaLimits | None, pixels: bool) -> None:
    """Raises InvalidRequest unless ``media`` can be the images of a prompt of ``length`` tokens. ``pixels``:
    whether they have to be there."""
    if limits is None:
        raise InvalidRequest("this model takes no images: leave them out", param="media")
    if len(media) > limits.most_items:
        raise InvalidRequest(
            f"the prompt has {len(media)} images; at most {limits.most_items} are allowed "
            "(--limit-mm-per-prompt)",
            param="media",
        )
    end = 0
    for item in media:
        if len(item.key) != 16:
            raise InvalidRequest("the key of an image is not 16 bytes", param="media")
        frames, rows, columns = item.grid
        sides_fit = min(item.grid) > 0 and rows % limits.merge == 0 and columns % limits.merge == 0
        if not sides_fit or item.count != patches_of(item) // limits.merge**2:
            raise InvalidRequest("the grid of an image is not that of its tokens", param="media")
        if item.start < end or item.start + item.count > length:
            raise InvalidRequest("the tokens of an image lie outside of the prompt", param="media")
        end = item.start + item.count
        size = rows * columns * limits.patch**2 * 3
        if len(item.pixels) > MOST_PIXELS or item.count * limits.row_bytes > limits.cache_bytes:
            raise InvalidRequest(
                f"an image of {columns * limits.patch} x {rows * limits.patch} pixels is too large: use a "
                "smaller one (or raise --mm-cache-bytes, which has to hold its embedding)",
                param="media",
            )
        if not (item.pixels or pixels):
            continue
        if len(item.pixels) not in range(frames * size, frames * limits.frames * size + 1, size):
            raise InvalidRequest("the pixels of an image are not those of its grid", param="media")


@dataclass(slots=True)
class _Use:
    """That a sequence needs an embedding."""

    order: tuple[int, int, int]
    """``Sequence.key``."""
    step: int = -1
    """The last plan that reads it for the sequence."""
    over: bool = False
    """Whether that was the last one."""


@dataclass(slots=True)
class _Held:
    """An embedding that ranks have, or will have with the next plan."""

    media: int
    key: bytes
    nbytes: int
    uses: dict[int, _Use] = field(default_factory=dict)
    """By sequence."""

    def may_go(self, order: tuple[int, int, int], step: int) -> bool:
        """Whether it may be forgotten in plan ``step`` for a sequence of this ``order`` that does not read
        it there."""
        return not any(use.step == step or (not use.over and use.order < order) for use in self.uses.values())

    @property
    def used(self) -> bool:
        return any(not use.over for use in self.uses.values())


class MediaBook:
    """The book of one group. Where the model takes no images no sequence has any, and nothing is done."""

    def __init__(self, limits: MediaLimits | None) -> None:
        self._limits = limits
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        """By key, the least recently used first."""
        self._uses: dict[int, dict[bytes, _Held]] = {}
        """By sequence."""
        self._next = 1
        self._step = -1
        self._patches = 0
        self._pixels = 0
        """What the plan in the making encodes so far."""
        self._ops: list[Op] = []
        self.nbytes = 0
        """Of all embeddings that are held."""
        self.encoded = 0
        """Images encoded since start."""
        self.hits = 0
        """Images of prompts that were found encoded."""

    def __len__(self) -> int:
        return len(self._held)

    # ---- sequences

    def arrive(self, sequence: Sequence) -> None:
        """A sequence has come: fills in its ``spans``."""
        if sequence.media and self._limits is not None and self._limits.sections:
            sequence.spans = column(spans_of(sequence.media, self._limits.merge).ravel())

    def enter(self, sequence: Sequence, computed: int) -> None:
        """A sequence gets a slot, ``computed`` positions cached: what is there of the others stays."""
        for item in sequence.media:
            held = self._held.get(item.key)
            if held is not None and item.start + item.count > computed:
                self._use(sequence, held)

    def leave(self, sequence: Sequence) -> None:
        """A sequence leaves its slot."""
        for held in self._uses.pop(sequence.id, {}).values():
            del held.uses[sequence.id]

    def spoil(self, sequence: Sequence) -> None:
        """A sequence has failed: nobody else is to find what was encoded for it, if nobody uses it."""
        for item in sequence.media:
            held = self._held.get(item.key)
            if held is not None and all(other == sequence.id for other in held.uses):
                self._drop(held)

    def clear(self) -> None:
        """Ranks have forgotten everything."""
        self._held.clear()
        self._uses.clear()
        self._ops.clear()
        self.nbytes = 0
        self._step = -1

    # ---- plans

    def reach(self, sequence: Sequence, start: int, end: int, step: int) -> int:
        """How far a chunk of plan ``step`` from ``start`` to ``end`` can go: before the first image that is
        not there and that this plan cannot encode; ``start`` where that is the first."""
        if not sequence.media or self._limits is None:
            return end
        self._begin(step)
        wanted: dict[bytes, int] = {}
        patches, pixels, nbytes = self._patches, self._pixels, 0
        for item in items_within(sequence.media, start, end):
            if item.key in wanted:
                continue
            held = self._held.get(item.key)
            if held is not None:
                wanted[item.key] = 0
            else:
                patches += patches_of(item)
                pixels += len(item.pixels)
                nbytes += item.count * self._limits.row_bytes
                wanted[item.key] = 1
                first = patches == patches_of(item)
                if not first and (patches > self._limits.encode_patches or pixels > MOST_PIXELS):
                    return max(start, item.start)
            # Also what is there: it may be in the way of what was to be encoded before it, or has to go.
            if not self._fits(nbytes, wanted, sequence):
                return max(start, item.start)
        return end

    def take(self, sequence: Sequence, slot: int, start: int, end: int, step: int) -> list[Op]:
        """The ops of a row of plan ``step`` over ``start`` .. end - 1, as far as ``reach`` allowed; what it
        encodes and forgets goes out with the same plan (``take_ops``)."""
        ops: list[Op] = []
        items = list(items_within(sequence.media, start, end)) if self._limits is not None else []
        wanted = {item.key for item in items}
        for item in items:
            held = self._held.get(item.key)
            if held is None:
                held = self._encode(item, sequence, wanted)
            elif (use := held.uses.get(sequence.id)) is None or use.step < 0:
                self.hits += 1
            self._held.move_to_end(item.key)
            use = self._use(sequence, held)
            use.step = step
            last = max(other.start + other.count for other in sequence.media if other.key == item.key)
            use.over = last <= end
            ops.append(BindMedia(slot=slot, media=held.media, start=item.start, count=item.count))
        return ops

    def take_ops(self) -> list[Op]:
        """What the next plan says of no slot, once."""
        ops, self._ops = self._ops, []
        return ops

    # ----

    def _begin(self, step: int) -> None:
        if step != self._step:
            self._step = step
            self._patches = self._pixels = 0

    def _use(self, sequence: Sequence, held: _Held) -> _Use:
        use = held.uses.get(sequence.id)
        if use is None:
            use = held.uses[sequence.id] = _Use(sequence.key)
            self._uses.setdefault(sequence.id, {})[held.key] = held
        return use

    def _fits(self, nbytes: int, wanted: dict[bytes, int] | set[bytes], sequence: Sequence) -> bool:
        """Whether ``nbytes`` more fit once all is forgotten that may go, but for ``wanted``."""
        assert self._limits is not None
        most = self._limits.cache_bytes
        if self.nbytes + nbytes <= most:
            return True
        stays = sum(
            held.nbytes
            for held in self._held.values()
            if held.key in wanted or not held.may_go(sequence.key, self._step)
        )
        return stays + nbytes <= most

    def _encode(self, item: MediaItem, sequence: Sequence, wanted: set[bytes]) -> _Held:
        assert self._limits is not None
        nbytes = item.count * self._limits.row_bytes
        self._make_room(nbytes, sequence, wanted)
        held = self._held[item.key] = _Held(self._next, item.key, nbytes)
        self._next += 1
        self.nbytes += nbytes
        self._patches += patches_of(item)
        self._pixels += len(item.pixels)
        self.encoded += 1
        self._ops.append(Encode(media=held.media, grid=item.grid, pixels=item.pixels))
        return held

    def _make_room(self, nbytes: int, sequence: Sequence, wanted: set[bytes]) -> None:
        assert self._limits is not None
        may_go = [
            held
            for held in self._held.values()
            if held.key not in wanted and held.may_go(sequence.key, self._step)
        ]
        for held in sorted(may_go, key=lambda held: held.used):  # stable: unused ones first, by their age
            if self.nbytes + nbytes <= self._limits.cache_bytes:
                return
            self._drop(held)

    def _drop(self, held: _Held) -> None:
        del self._held[held.key]
        for sequence in held.uses:
            del self._uses[sequence][held.key]
        self.nbytes -= held.nbytes
        self._ops.append(DropMedia(media=held.media))


def items_within(media: tuple[MediaItem, ...], start: int, end: int) -> Iterator[MediaItem]:
    """Those with positions among ``start`` .. end - 1, in order."""
    for item in media:
        if item.start < end and start < item.start + item.count:
            yield item
