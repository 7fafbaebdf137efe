"""The next step of an encode group: which embeddings are sent, and which images are encoded.

    1  bound transfers with a stored embedding, in order                 SendMedia (host tier: lift first)
    2  images of bound transfers, in order, while the images fit         Encode, then SendMedia per transfer
    3  images of transfers not bound yet, in order, while they fit       Encode

Embeddings of 1 are sent in a separate step, because a transfer ends only after its step. But two such steps
never follow each other while images wait for the tower.

A batch has at most ``encode_patches`` patches and ``encode_items`` images. An image with more patches is
encoded alone. The order is by sequence, then by image within the sequence. No transfer overtakes another
transfer: the first image without space ends the batch. A full pool stops encoding until an embedding has
been received.

Only embeddings of bound transfers are pinned: the receiver has memory for such an embedding. So the first
bound transfer always gets memory once the embeddings in transit have been received, because all other
embeddings can be evicted. Two groups therefore never wait for each other's memory. Encoding for an unbound
transfer takes no memory from a bound transfer.
"""

from __future__ import annotations

from weft.config.resolved import MediaLimits
from weft.kv.embeddings import Embedded, EmbeddingCache
from weft.scheduler.encode.book import ItemBook, ItemTransfer
from weft.scheduler.images.media_book import MOST_PIXELS, encoding, patches_of
from weft.types.plan import SendMedia


class EncodeBatch:
    """One step of an encode group in the making. The updates are collected in ``cache``."""

    def __init__(self, book: ItemBook, cache: EmbeddingCache, limits: MediaLimits, step: int) -> None:
        self._book, self._cache, self._limits, self._step = book, cache, limits, step
        self.sent: list[ItemTransfer] = []
        """Transfers sent with the step."""
        self.encoded: list[ItemTransfer] = []
        """Transfers of the images to encode, one per image."""
        self.sends_alone = False
        """True if the step only sends embeddings although images wait for encoding."""
        self._patches = self._pixels = 0
        self._ended = False
        self._waiting = book.waiting()
        self._wanted = {transfer.item.key for transfer in self._waiting}

    def fill(self, starved: ItemTransfer | None, may_send_alone: bool = False) -> ItemTransfer | None:
        """Choose the work of the step. Return the first bound transfer for which the pool was full, or None.

        Evictions, pins and updates apply to the cache at once. Sets ``sent``, ``encoded`` and
        ``sends_alone``.
        ``starved``: the result of the previous step; no later transfer gets a pin earlier.
        ``may_send_alone``: True if the step may send stored embeddings without encoding images.
        """
        # A starved transfer blocks all later transfers, until sent or over.
        bound = [transfer for transfer in self._waiting if transfer.bound]
        if starved is not None and (starved.sent or starved.over):
            starved = None
        self._send_stored([r for r in bound if starved is None or r.order <= starved.order])
        # A transfer ends with its step: a step without encoding ends earlier.
        self.sends_alone = may_send_alone and 0 < len(self.sent) < len(self._waiting)
        if self.sends_alone:
            return None if starved is None or starved.sent else starved
        # Encoding ahead of a receiver comes last, and only while no bound transfer lacks memory.
        full = self._encode([transfer for transfer in bound if not transfer.sent], bound=True)
        if full is None and not self._ended:
            self._encode([transfer for transfer in self._waiting if not transfer.bound], bound=False)
        return full or (None if starved is None or starved.sent else starved)

    # ----

    def _send_stored(self, bound: list[ItemTransfer]) -> None:
        """Send the stored embeddings of ``bound`` in order. Stop at the first embedding that cannot be lifted
        from the host."""
        for transfer in bound:
            held = self._cache.find(transfer.item.key)
            if held is None:
                continue
            if held.on_host and not self._cache.lift(held, self._victims(True)):
                return
            self._send(transfer, held)

    def _encode(self, transfers: list[ItemTransfer], *, bound: bool) -> ItemTransfer | None:
        """Encode the images of ``transfers`` in order. Return the first transfer for which the pool is full,
        or None.

        Ends at a full pool or a full batch. With ``bound``, embeddings are also sent.
        """
        for transfer in transfers:
            item = transfer.item
            held = self._cache.find(item.key)
            if held is None:
                if not self._has_place(patches_of(item), len(item.pixels)):
                    self._ended = True
                    return None
                # A bound transfer may evict embeddings of unbound transfers; an unbound transfer may not.
                held = self._cache.add(item.key, item.count, self._victims(bound))
                if held is None:
                    return transfer
                self._cache.op(encoding(item, held))
                self._cache.touch(held, self._step)
                self._patches += patches_of(item)
                self._pixels += len(item.pixels)
                transfer.owner = True
                self.encoded.append(transfer)
            elif bound and held.on_host and not self._cache.lift(held, self._victims(True)):
                return transfer
            if bound:
                self._send(transfer, held)
        return None

    def _has_place(self, patches: int, pixels: int) -> bool:
        """Return True if one more image fits into the batch."""
        # The first image of a batch always fits, whatever its size.
        if not self.encoded:
            return True
        limits = self._limits
        return (
            len(self.encoded) < limits.encode_items
            and self._patches + patches <= limits.encode_patches
            and self._pixels + pixels <= MOST_PIXELS
        )

    def _victims(self, unbound: bool) -> list[Embedded]:
        """Return the evictable embeddings in order: first embeddings without a waiting transfer.

        With ``unbound``, then embeddings of unbound transfers, last in order first.
        """
        may_go = self._cache.victims()
        free = [held for held in may_go if held.key not in self._wanted]
        if not unbound:
            return free
        # If several transfers wait for an image, the first in order counts (reversed: the last write wins).
        place = {transfer.item.key: number for number, transfer in reversed(list(enumerate(self._waiting)))}
        needed = [held for held in may_go if held.key in self._wanted]
        return free + sorted(needed, key=lambda held: -place[held.key])

    def _send(self, transfer: ItemTransfer, held: Embedded) -> None:
        """Pin the embedding, add the update to send the embedding, and mark the transfer as sent."""
        self._cache.pin(held)
        self._cache.touch(held, self._step)
        self._cache.op(SendMedia(key=transfer.key, blocks=held.ids, count=held.count))
        transfer.held = held
        self._book.send(transfer)
        self.sent.append(transfer)
