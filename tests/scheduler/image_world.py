"""A scheduler that receives images from encode groups: fake runner, simulated API server, simulated
transfers.

The world follows the contract of ``TransferReceiver``. The memory of a transfer with reserved blocks may be
written at any time, until the transfer is received or is freed after a failure. A transfer may fail at any
time. Written blocks go to the fake runner, which compares the content with the images of the reading
sequences.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from tests.scheduler.fake_runner import alone
from tests.scheduler.harness import Follower, Output, Rig
from weft.common.errors import Overloaded, Unavailable
from weft.config.resolved import KVConfig, MediaLimits
from weft.types import transfer as r
from weft.types.media_item import MediaItem, without_pixels
from weft.types.messages import Submit, TokenEvent, ids_to_bytes
from weft.types.transfer import Admitted, CacheGroupDims, GroupDims, Peer, TransferKey, TransferParameters

SECONDS = 8.0
DIMS = GroupDims(
    ranks=1,
    kinds=(
        CacheGroupDims(
            kind="embedding", layers=(0,), block_size=1, window=0, ratio=1, kv_heads=0, tensors=()
        ),
    ),
)
MINE = Unavailable("planted").info()


def limits(**changes: object) -> MediaLimits:
    """Return the limits of a group without a vision tower. A block has 3 rows."""
    given = MediaLimits(
        patch=1,
        merge=1,
        row_bytes=1,
        cache_bytes=60,
        encode_patches=64,
        most_items=8,
        sections=True,
        block_rows=3,
        tower=False,
        takes=True,
    )
    return msgspec.structs.replace(given, **changes)


@dataclass
class Transfer:
    """One transfer of an image, from the view of the receiving engine."""

    key: TransferKey
    item: MediaItem
    """The image, with pixels."""
    seconds: float
    state: str = "new"
    asked: bool = False
    blocks: list[int] = field(default_factory=list)
    start: int = 0
    due: float | None = None


@dataclass
class Stream:
    """One client request for one sequence, and the received output."""

    request: Submit
    """The request, with the pixels of all images."""
    transfer_choices: bool
    """True if the sequence has a transfer for each image."""
    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    attempts: int = 0
    sequence: int = -1
    aborted: bool = False


class World(Rig):
    """One scheduler with transfers and clients, on virtual time."""

    def __init__(
        self, kv: KVConfig, depth: int = 1, seed: int = 0, harm: float = 0.0, **section: object
    ) -> None:
        """Build the world. ``harm`` scales how often transfers fail or are slow; 0 means never."""
        super().__init__(kv, depth, **section)
        self.rng = random.Random(seed)
        self.harm = harm
        self.transfers: dict[TransferKey, Transfer] = {}
        self.streams: list[Stream] = []
        self.of: dict[int, Stream] = {}
        self.by_hand = False
        """True if the test moves the transfers, instead of timers."""
        self.asked: list[r.TransferRequest] = []
        """All transfer requests of the scheduler, in order."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.written = 0
        self.seen: set[str] = set()

    # ---- the front

    def ask(self, request: Submit, *, transfers: bool = True, here: bool = False) -> Stream:
        """Submit a sequence and return its stream. Request number 0 gets a fresh number.

        With ``transfers`` each image has a transfer. Without ``transfers`` the sequence relies on the
        transfers of a parallel sample. With ``here`` this group encodes the images.
        """
        request = msgspec.structs.replace(request, request=request.request or 1000 + len(self.streams))
        stream = Stream(request, transfers)
        self.streams.append(stream)
        self._send(stream, transfers, here)
        return stream

    def _send(self, stream: Stream, transfers: bool, here: bool = False) -> None:
        number = len(self.of)
        request = msgspec.structs.replace(
            stream.request, sequence=number, emitted_ids=ids_to_bytes(stream.tokens), attempt=stream.attempts
        )
        stream.attempts += 1
        stream.sequence = number
        self.of[number] = stream
        self.outputs[number] = Output(request)
        local = self.kv.media is not None and self.kv.media.tower and self.rng.random() < 0.3 * self.harm
        local = local or here
        bare = request.media if local else without_pixels(request.media)
        if transfers and not local:
            bare = tuple(
                msgspec.structs.replace(item, transfer=self._parameters(number, place))
                for place, item in enumerate(bare)
            )
        try:
            events = self.scheduler.add(msgspec.structs.replace(request, media=bare), self.now)
        except Overloaded:
            self.later(0.5, lambda: self._send(stream, transfers))
            return
        for place, item in enumerate(bare):
            if item.transfer is not None:
                transfer = Transfer(item.transfer.key, request.media[place], item.transfer.seconds)
                self.transfers[transfer.key] = transfer
                forgotten = self.rng.random() < 0.02 * self.harm  # no encoder starts this image
                if not (self.by_hand or forgotten):
                    self.later(self.delay(), lambda transfer=transfer: self.offer(transfer))  # type: ignore[misc]
        self.collect(events)
        if request.grammar is not None and not events:
            self.later(self.delay(), lambda: self._constrain(number))
        self.talk()

    def _constrain(self, number: int) -> None:
        request = self.of[number].request
        self.followers[number] = Follower()
        self.collect(self.scheduler.constrain(number, self.followers[number], request.params.stop_ids))

    def _parameters(self, number: int, place: int) -> TransferParameters:
        return TransferParameters(TransferKey(number * 16 + place, 0, 1), False, Peer("e", 1), SECONDS)

    def abort(self, stream: Stream) -> None:
        if stream.finish is None:
            stream.aborted = True
            self.collect(self.scheduler.finish(stream.sequence))
            self.talk()

    def collect(self, events: list[TokenEvent]) -> None:
        for event in events:
            stream = self.of[event.sequence]
            assert stream.sequence == event.sequence, "an event of an attempt that has ended"
            assert stream.finish is None
            stream.tokens += event.token_ids
            if event.error is not None and event.error.code == "engine_dead":  # too many losses
                stream.aborted = True
            if event.finish == "evicted" and stream.aborted:
                stream.finish = "abort"
            elif event.finish == "evicted":
                self.seen.add("evicted")
                self.later(self.delay(), lambda stream=stream: self._again(stream))  # type: ignore[misc]
                stream.sequence = -1
            else:
                stream.finish = event.finish

    def _again(self, stream: Stream) -> None:
        if stream.aborted:
            stream.finish = "abort"
        else:
            self._send(stream, True)

    def media_of(self, slot: int) -> tuple[MediaItem, ...]:
        return self.of[self.scheduler._state.in_slot[slot].id].request.media

    # ---- time

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, what))

    def delay(self) -> float:
        slow = self.rng.random() < 0.1 * self.harm
        return self.rng.random() * (6.0 if slow else 0.05)

    def turn(self) -> None:
        """Advance time by 10 ms, run due events and one iteration of an engine's loop, and check the
        state."""
        self.now += 0.01
        while self._events and self._events[0][0] <= self.now:
            heapq.heappop(self._events)[2]()
        for transfer in list(self.transfers.values()):
            if transfer.due is not None and transfer.due <= self.now and transfer.state in ("new", "bound"):
                self.fail(transfer)
        self.collect(self.scheduler.expire(self.now))
        self.talk()
        while len(self.in_flight) < self.depth and self.scheduler.has_work() and self.plan() is not None:
            self.talk()
        if self.in_flight and self.rng.random() < 0.8:
            self.commit()
        self.talk()
        self.check()

    def run(self, seconds: float = 400.0) -> None:
        """Run until every stream has ended and no transfer or event is left. Fail after ``seconds``."""
        end = self.now + seconds
        while not self.idle():
            assert self.now < end, [(s.finish, s.attempts) for s in self.streams]
            self.turn()

    def idle(self) -> bool:
        return not (
            self._events or self.transfers or self.in_flight or any(s.finish is None for s in self.streams)
        )

    def lose(self) -> None:
        """Lose the ranks and form the group again. All open transfers fail."""
        for transfer in list(self.transfers.values()):
            if transfer.state in ("new", "bound"):
                self.fail(transfer)
        self.scheduler.lose()
        self.in_flight.clear()
        self.collect(self.scheduler.requeue_all())
        self.runner = self.runner.anew()
        self.talk()

    # ---- rooms

    def tell(self, event: r.TransferEvent) -> None:
        self.seen.add(type(event).__name__)
        assert self.scheduler.embeddings is not None
        self.collect(self.scheduler.embeddings.transfer(event, self.now))
        self.talk()

    def talk(self) -> None:
        assert self.scheduler.embeddings is not None
        while asked := self.scheduler.embeddings.transfer_requests():
            for request in asked:
                self.asked.append(request)
                self.seen.add(type(request).__name__)
                self._carry_out(request)

    def _carry_out(self, request: r.TransferRequest) -> None:
        transfer = self.transfers.get(request.key)
        match request:
            case r.ReserveTransfer(key, start, (blocks,)):
                if transfer is None or transfer.state != "new":
                    # The transfer has failed in the meantime: report the blocks as free.
                    self.tell(r.TransferFreed(key))
                    return
                assert transfer.asked
                transfer.state, transfer.start = "bound", start
                transfer.blocks = np.frombuffer(blocks.ids, "<i4").tolist()
                assert start in (0, transfer.item.count)
                assert bool(transfer.blocks) == (start == 0)
                if not self.by_hand:
                    self.later(self.delay(), lambda: self.move(transfer))
            case r.CancelTransfer() | r.RefuseTransfer() if transfer is not None and transfer.state in (
                "new",
                "bound",
            ):
                self.fail(transfer)
            case _:
                assert transfer is None or transfer.state == "failing", request

    def offer(self, transfer: Transfer) -> None:
        """Report that the encoder has queued the image of ``transfer``."""
        if transfer.state != "new" or transfer.asked:
            return
        transfer.asked = True
        if transfer.due is None:
            transfer.due = self.now + transfer.seconds
        self.tell(
            r.TransferWanted(
                transfer.key, Admitted(key=transfer.key, num_prompt=transfer.item.count, dims=DIMS)
            )
        )

    def move(self, transfer: Transfer) -> None:
        """Write the image, and then complete the transfer, fail the transfer, or try again later."""
        if transfer.state != "bound":
            return
        self.write(transfer)
        if self.rng.random() < 0.1 * self.harm:
            self.fail(transfer)
        elif self.rng.random() < 0.5:
            self.land(transfer)
        else:
            self.later(self.delay(), lambda: self.move(transfer))

    def write(self, transfer: Transfer, right: bool = True) -> None:
        """Write the image to the blocks of ``transfer``; with ``right=False`` write wrong bytes."""
        busy = set().union(*self.runner.touched.values())
        assert busy.isdisjoint(transfer.blocks), "a room writes where a plan in flight reads"
        for number, block in enumerate(transfer.blocks):
            assert not any(
                block in other.blocks for other in self.transfers.values() if other is not transfer
            )
            self.runner.images[block] = (transfer.item.pixels if right else b"half of it", number)
            if self.kv.media is not None and self.kv.media.shards:
                self.runner.shares.add(block)
            self.written += 1

    def land(self, transfer: Transfer) -> None:
        self.write(transfer)
        del self.transfers[transfer.key]
        self.tell(r.TransferReceived(transfer.key))

    def fail(self, transfer: Transfer) -> None:
        bound, transfer.state = transfer.state == "bound", "failing"
        self.tell(r.TransferFailed(transfer.key, MINE))
        if bound:
            self.write(transfer, right=False)
        if not self.by_hand:
            self.later(self.delay() if bound else 0.0, lambda: self.free(transfer))

    def free(self, transfer: Transfer) -> None:
        """Complete the failure: no process touches the memory of the transfer any more."""
        self.write(transfer, right=False)
        self.transfers.pop(transfer.key, None)
        self.tell(r.TransferFreed(transfer.key))

    # ---- what must be

    def check(self) -> None:
        """Check that each block is in one place and that writable blocks of transfers are pinned."""
        self.audit()
        state = self.scheduler._state
        cache, images = state.media.cache, state.images
        writing = {
            id(transfer.held): transfer.held
            for transfer in images._transfers.values()
            if transfer.held is not None
        }
        # Blocks on the device: cached embeddings, and embeddings that transfers still write.
        near = {id(held): held for held in cache if not held.on_host} | writing
        taken = [block for held in near.values() for block in held.blocks]
        assert len(set(taken)) == len(taken) == cache.blocks - cache.available
        for transfer in self.transfers.values():
            if transfer.state in ("bound", "failing") and transfer.blocks:
                mine = images._transfers[transfer.key].held
                assert mine is not None
                assert mine.blocks == transfer.blocks
                assert mine.pins > 0
        assert all(held.pins == (held.key in images._coming) for held in cache)
        assert all(held.ready == (held.key not in images._coming) for held in cache)
        assert len(state.running) <= self.section.max_num_seqs
        blocked = {s.id for s in state.live.values() if s.blocked_images}
        assert blocked == set(images._images) | {s.id for s in images.received}

    def check_end(self) -> None:
        """Check the tokens of each stream against a run alone, and check that no state is left."""
        for stream in self.streams:
            tokens, finish = alone(stream.request, self.kv.max_model_len)
            if stream.aborted:
                assert stream.tokens == tokens[: len(stream.tokens)]
                continue
            assert (stream.tokens, stream.finish) == (tokens, finish)
        self.check_idle()
        state = self.scheduler._state
        cache = state.media.cache
        assert len(state.images) == 0
        left = [state.images._offers, state.images._wanting, state.images._coming]
        left += [state.media._uses, state.media._users]
        assert not any(left)
        assert all(held.pins == 0 and held.ready for held in cache)
        assert cache.settled == cache.available
        assert sum(len(held.blocks) for held in cache if not held.on_host) + cache.settled == cache.blocks
