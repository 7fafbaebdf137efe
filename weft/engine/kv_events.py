"""KV cache events for routers of other projects, in the wire format of vLLM.

    scheduler ─BlockEvents─► KVEventSource ──batches──► KVEventPublisher (thread) ─PUB──► routers
              (engine's thread)                           └─ recent batches ◄─ROUTER─ (a router after a gap)

A message is [topic, number of the batch (8 bytes, big-endian), msgpack of [time, events, replica]]. A router
that misses a number asks for all batches from this number on: a request [b"", number] gets one message
[b"", number, msgpack] per batch and at the end [b"", -1, b""].

An engine process that replaces another continues at the same address. Routers drop numbers below the last
number as duplicates, so numbers begin at the time of the start, in microseconds. The first batch clears the
router's view of the cache. Routers see a gap, ask for the first batch, and forget the lost cache.

No router can hold the engine up: the thread encodes and sends, and a batch that a slow router does not take
is missing there. The router then sees a gap in the numbers.
"""

from __future__ import annotations

import errno
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from weft.common.errors import ConfigError
from weft.common.log import get_logger
from weft.config.resolved import EngineConfig
from weft.config.sections.events_section import EventsSection, address_of, is_bound
from weft.kv.block_events import BlockEvent, BlockEvents, Cleared, Stored
from weft.runner.wakeup_descriptor import WakeupDescriptor
from weft.types.messages import TokenEvent

if TYPE_CHECKING:
    from weft.engine.step_scheduler import StepScheduler

log = get_logger(__name__)

MEDIUM = "GPU"
"""Name of the first tier of a cache in vLLM's events, on any device."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Number of the message after the last batch of a replay."""
REPLAY_BYTES = 64 << 20
"""Maximum bytes of the batches kept for replay."""
REQUEST_BYTES = 4096
"""Maximum bytes of a frame from a router. zmq ends the connection of a router that sends more."""
LOST_S = 60
"""Seconds after which a router that reads nothing is disconnected, and the queue of the router is freed."""
WARN_S = 60.0
"""Seconds between two warnings about an address in use."""
RETRY_MS = 1000
"""Milliseconds between two attempts to bind an address that the previous engine process still uses."""
CLOSE_S = 2.0
"""Maximum seconds to send the last batches at the end."""
IN_USE = "the address %s of KV cache events is in use; trying again"
_HASH_MASK = (1 << 64) - 1


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One message: the changes of one step."""

    ts: float
    """Unix time in seconds."""
    events: list[Any]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Consecutive blocks entered the cache. Fields without a default are always sent."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks left the cache."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """The cache is empty."""


class StoredArray(BlockStored, array_like=True, tag="BlockStored", gc=False):
    """``BlockStored`` as an array."""


class RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved", gc=False):
    """``BlockRemoved`` as an array."""


class ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared", gc=False):
    """``AllBlocksCleared`` as an array."""


def short_hash(key: bytes) -> int:
    """Return the low 64 bits of a block's key, the form of hashes in vLLM's events."""
    return int.from_bytes(key, "big") & _HASH_MASK


class EventForm:
    """Conversion of ``BlockEvent`` to the wire format."""

    def __init__(self, form: str, positions: int, kind: str) -> None:
        """``form``: "map" or "array". ``positions``: tokens of a block. ``kind``: kind of the KV cache group
        in vLLM's words."""
        arrays = form == "array"
        self._stored = StoredArray if arrays else BlockStored
        self._removed = RemovedArray if arrays else BlockRemoved
        self._cleared = ClearedArray if arrays else AllBlocksCleared
        self._positions = positions
        self._kind = kind

    def of(self, events: Sequence[BlockEvent]) -> list[Any]:
        """Return the wire events of ``events``. Consecutive removals become one event."""
        wire: list[Any] = []
        for event in events:
            if isinstance(event, Stored):
                wire.append(self._of_stored(event))
            elif isinstance(event, Cleared):
                wire.append(self._cleared())
            elif wire and isinstance(wire[-1], BlockRemoved):
                wire[-1].block_hashes.append(short_hash(event.key))
            else:
                wire.append(self._removed([short_hash(event.key)], MEDIUM, 0))
        return wire

    def _of_stored(self, event: Stored) -> BlockStored:
        return self._stored(
            block_hashes=[short_hash(key) for key in event.keys],
            parent_block_hash=None if event.parent is None else short_hash(event.parent),
            token_ids=event.tokens,
            block_size=self._positions,
            lora_id=None,
            medium=MEDIUM,
            lora_name=None,
            extra_keys=list(event.extra),
            group_idx=0,
            kv_cache_spec_kind=self._kind,
        )


class KVEventPublisher:
    """Sends batches to routers and answers replays, in a thread. ``publish`` never blocks."""

    def __init__(self, section: EventsSection, form: EventForm, number: int, replica: int) -> None:
        """Open the sockets and start the thread.

        ``number``: number of the engine process on the host, see ``address_of``. ``replica``: sent with each
        batch. Raises ConfigError for an address that can't be used.
        """
        assert section.kv_events_endpoint is not None
        self._form = form
        self._replica = replica
        self._topic = (section.kv_events_topic or "").encode()
        self._most = section.kv_events_buffer
        self._next = time.time_ns() // 1000
        self._queue: deque[tuple[int, float, Sequence[BlockEvent]]] = deque(maxlen=self._most)
        self._kept: deque[tuple[bytes, bytes]] = deque()
        """(number, payload) of the latest batches, oldest first."""
        self._kept_bytes = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._closing = False
        self._wakeup = WakeupDescriptor()
        self._context = zmq.Context()
        self._dead = False
        """True after the end of the thread: further batches would stay in the queue."""
        self._unbound: list[tuple[zmq.Socket[bytes], str]] = []
        """Sockets whose address another process still uses."""
        self._warned = time.monotonic()
        """Time of the last warning about an address in use."""
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._pub = self._socket(zmq.PUB, self._most)
            self._open(self._pub, address_of(section.kv_events_endpoint, number))
            if section.kv_events_replay_endpoint is not None:
                # Room for two whole replays: ROUTER drops messages beyond the limit.
                self._replay = self._socket(zmq.ROUTER, 2 * self._most + 2)
                self._replay.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
                self._bind(self._replay, address_of(section.kv_events_replay_endpoint, number))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self.publish([Cleared()])

    def publish(self, events: Sequence[BlockEvent]) -> None:
        """Send ``events`` as the next batch. Does nothing after the end of the thread."""
        if self._dead:
            return
        # Number the batch before queueing: if the full queue drops a batch, routers see a gap in the numbers.
        self._queue.append((self._next, time.time(), events))
        self._next += 1
        self._wakeup.ring()

    def close(self) -> None:
        """Send the remaining batches and close the sockets. Idempotent."""
        self._closing = True
        self._wakeup.ring()
        self._thread.join(CLOSE_S)

    # ---- sockets, opened by the engine's thread, used by the publisher's thread

    def _socket(self, kind: int, most: int) -> zmq.Socket[bytes]:
        """Return a socket that queues at most ``most`` messages for one peer, and disconnects lost peers."""
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.IPV6, 1)  # ``*`` then means IPv4 and IPv6
        socket.setsockopt(zmq.SNDHWM, most)
        # TCP finds lost peers. Heartbeats of zmq would disconnect routers whose library has no heartbeats.
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, LOST_S // 2)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, LOST_S // 6)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.setsockopt(zmq.TCP_MAXRT, LOST_S * 1000)
        socket.setsockopt(zmq.LINGER, round(CLOSE_S * 500))
        return socket

    def _open(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind or connect the socket of events. Raises ConfigError."""
        if is_bound(endpoint):
            self._bind(socket, endpoint)
            return
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise self._unusable(socket, endpoint, error) from None
        log.info("KV cache events go to %s", endpoint)

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        """Bind a socket, or note the address for another attempt if the address is in use. Raises
        ConfigError."""
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise self._unusable(socket, endpoint, error) from None
            # After a restart the previous engine process may still be ending.
            log.warning(IN_USE, endpoint)
            self._unbound.append((socket, endpoint))
            return
        log.info("KV cache events: listening at %s", endpoint)

    def _bind_again(self) -> None:
        """Try all addresses in use once more. Warn each minute."""
        waiting, self._unbound = self._unbound, []
        warn = time.monotonic() - self._warned >= WARN_S
        if warn:
            self._warned = time.monotonic()
        for socket, endpoint in waiting:
            try:
                socket.bind(endpoint)
                log.info("KV cache events: listening at %s", endpoint)
            except zmq.ZMQError:
                self._unbound.append((socket, endpoint))
                if warn:
                    log.warning(IN_USE, endpoint)

    def _unusable(self, socket: zmq.Socket[bytes], endpoint: str, error: zmq.ZMQError) -> ConfigError:
        """Return the error for an address that a socket cannot bind or connect to."""
        flag = "--kv-events-replay-endpoint" if socket is self._replay else "--kv-events-endpoint"
        return ConfigError(f"{flag}: {endpoint} can't be used: {error.strerror}", param=flag)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup.descriptor, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        try:
            while not self._closing:
                poller.poll(RETRY_MS if self._unbound else None)
                self._wakeup.clear()
                self._bind_again()
                self._send_all()
                self._answer_replay()
            self._send_all()
        except Exception:
            log.exception("KV cache events end")
        finally:
            self._dead = True
            self._queue.clear()
            self._context.destroy()
            self._wakeup.close()

    def _send_all(self) -> None:
        """Send all queued batches, and keep the batches for replay."""
        while self._queue:
            number, when, events = self._queue.popleft()
            batch = EventBatch(when, self._form.of(events), self._replica)
            payload = self._encoder.encode(batch)
            place = number.to_bytes(NUMBER_BYTES, "big")
            self._pub.send_multipart([self._topic, place, payload])
            if self._replay is not None:
                self._keep(place, payload)

    def _keep(self, place: bytes, payload: bytes) -> None:
        """Keep a batch for replay, and forget the oldest batches beyond the limits."""
        self._kept.append((place, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > self._most or self._kept_bytes > REPLAY_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer_replay(self) -> None:
        """Answer one request for past batches; new batches go out before the next request. Requests in a
        wrong form are dropped."""
        if self._replay is None:
            return
        try:
            router, *request = self._replay.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        if len(request) != 2 or len(request[1]) != NUMBER_BYTES:
            return
        for place, payload in self._kept:
            if self._closing:
                return
            if place >= request[1]:  # big-endian, so the order of bytes is the order of numbers
                self._replay.send_multipart([router, b"", place, payload], zmq.NOBLOCK)
        self._replay.send_multipart([router, b"", END, b""], zmq.NOBLOCK)


class KVEventSource:
    """Passes the changes of a prefix cache to the publisher after each step. An ``AwaitedSource`` without
    input."""

    def __init__(self, events: BlockEvents, publisher: KVEventPublisher) -> None:
        self._events = events
        self._publisher = publisher

    @property
    def sockets(self) -> Sequence[Any]:
        """Return no sockets: routers never wake the engine."""
        return ()

    def take(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Return no events: routers send nothing to the scheduler."""
        return []

    def serve(self, scheduler: StepScheduler) -> list[TokenEvent]:
        """Publish the changes since the last call. Return no events."""
        if changes := self._events.take():
            self._publisher.publish(changes)
        return []

    def close(self) -> None:
        """End the publisher."""
        self._publisher.close()


def start_kv_events(config: EngineConfig, scheduler: StepScheduler) -> KVEventSource | None:
    """Return the source of KV cache events of an engine; None if no events are requested, or if no KV cache
    group has all blocks of a prefix (logged).

    Raises ConfigError for an address that can't be used.
    """
    section = config.events
    if section.kv_events_endpoint is None:
        return None
    followed = scheduler.follow_prefixes()
    if followed is None:
        log.warning("no KV cache events: no KV cache group of this engine has all blocks of a prefix")
        return None
    prefixes, positions = followed
    latent = any(pool.cache.kind == "latent" for pool in config.kv.pools)
    form = EventForm(section.kv_events_format, positions, "mla_attention" if latent else "full_attention")
    number = config.host.first + config.replica
    publisher = KVEventPublisher(section, form, number, config.replica)
    return KVEventSource(prefixes.record(positions, config.kv.block_size), publisher)
