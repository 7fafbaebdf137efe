"""Common part of shared memory, TCP and NIXL: connections between ranks, the handshake, writes and answers.

    writer                            receiver
      PeerHello(wanted incarnation) ───►  refused for another incarnation of the rank, or another version
      ◄─── PeerHello(own incarnation)
      (with a secret) KeyProof ───►       no other frame is accepted before the proof
      ◄─── (with a secret) KeyProof       and no write is sent before the proof
      WriteFrame ... ───►
      ◄─── AnswerFrame ...

A broken connection ends all writes without an answer on the connection. Bytes from a stranger can end only
the stranger's own connection. A stranger costs a bounded amount of memory; a silent stranger also a bounded
time.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from weft.common.counted_log import CountedLog
from weft.common.errors import ErrorInfo, TransportFailed, Unavailable, WeftError
from weft.common.log import get_logger
from weft.disagg.protocol.arrivals import Copied, Incoming
from weft.disagg.protocol.digests import ranks_seed
from weft.disagg.protocol.pushes import WINDOW_BYTES, WRITE_BYTES, Write, Written
from weft.disagg.protocol.spans import SpanPart
from weft.disagg.protocol.transfer_table import FenceBy
from weft.disagg.transport import wire as f
from weft.disagg.transport.base import TakePending
from weft.disagg.transport.buffers import Buffers
from weft.disagg.transport.copying import digest_parts
from weft.disagg.transport.device_memory import seeded
from weft.disagg.transport.newcomers import MOST_UNPROVEN, Newcomers
from weft.disagg.transport.peer_connection import Got, PeerConnection
from weft.disagg.transport.peer_links import (
    ByteSource,
    PeerLink,
    PeerRank,
    check_hello,
    check_inside,
    info_of,
)
from weft.disagg.transport.staging_memory import DirectMemory, Memory, Staged
from weft.disagg.transport.taking import take_in
from weft.types.transfer import Endpoint, TransferKey

log = get_logger(__name__)

HELLO_S = 10.0
"""Maximum seconds of a handshake."""
MOST_PEERS = 1024
_PAUSE_S = 0.05
"""Seconds until a retry after the system refused a connection for lack of resources."""
_AT_ONCE = 2 << 20
"""Bytes read from one connection before other connections have a turn."""


class SocketTransport:
    """Common base of ``shm``, ``tcp`` and ``nixl``. ``base.Transport`` documents the methods."""

    name = ""
    fence: FenceBy = "copy"
    write_bytes = WRITE_BYTES
    window_bytes = WINDOW_BYTES
    slot_bytes = WRITE_BYTES
    """Maximum bytes of one write of staged caches."""
    takes_fds = False
    """True if file descriptors come with a Hello."""

    def __init__(self, rank: int, incarnation: int) -> None:
        """Listen at once. Raises ConfigError if the system refuses the listening socket.

        ``rank``, ``incarnation``: of this process; peers must address both.
        """
        self.rank, self.incarnation = rank, incarnation
        self._listener, address = self._listen()
        self._listener.setblocking(False)
        self.endpoint = Endpoint(self.name, address, incarnation)
        self.selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self.selector.register(self._listener, selectors.EVENT_READ, None)
        self.selector.register(self._woken, selectors.EVENT_READ, None)
        self._memory: Memory = DirectMemory(())
        self._peers: dict[str, PeerRank] = {}
        self._links: dict[str, PeerLink] = {}
        self._accepted = 0
        self._newcomers = Newcomers(MOST_UNPROVEN)
        self._strangers = CountedLog(log)
        self._again: float | None = None
        """Time of the next attempt to accept or connect, after a failed attempt; None without a failure."""
        self._events: list[Incoming | Written | Copied] = []
        self._buffers = Buffers()
        self._answered: dict[str, PeerLink] = {}
        """Links with unsent answers, by name."""
        self.refused = 0
        """Number of refused connections, and of connections closed because of invalid bytes or a time-out."""
        self.corrupt = 0
        """Number of writes with an error in ``take``, mostly wrong digests."""

    # ---- extension points of shm and tcp

    def _listen(self) -> tuple[socket.socket, str]:
        raise NotImplementedError

    def _socket(self, address: str) -> tuple[socket.socket, object]:
        """Return a new socket, and the address for ``connect``. Raises BadFrame for a bad address."""
        raise NotImplementedError

    def _admit(self, sock: socket.socket) -> None:
        """Check a new connection. Raises BadFrame for a forbidden peer."""

    def _hello(self, link: PeerLink, wanted: int) -> None:
        """Send the writer's Hello."""
        link.connection.send(f.PeerHello(f.VERSION, self.name, self.incarnation, wanted, self.rank))

    def _met(self, link: PeerLink, hello: f.PeerHello) -> None:
        """Continue the handshake after a valid Hello of the peer."""
        if not link.writer:
            link.connection.send(f.PeerHello(f.VERSION, self.name, self.incarnation, 0, self.rank))
        self._open(link)

    def _proven(self, link: PeerLink) -> None:
        """Handle a ``KeyProof`` of the peer. Raises BadFrame if the transport has no proofs."""
        raise f.BadFrame("a peer sent a proof without a request")

    def _payload(self, write: Write) -> list[memoryview]:
        return []

    def _sources(
        self, link: PeerLink, parts: Sequence[tuple[f.SpansFrame, np.ndarray]], got: Got
    ) -> ByteSource:
        """Return the source memory of a write. Raises BadFrame for spans outside the writer's memory or
        payload."""
        raise NotImplementedError

    def _payload_of(self, source: ByteSource) -> torch.Tensor | None:
        """Return the payload buffer of a write, if any."""
        return None

    def _held_bytes(self, frame: f.WriteFrame, got: Got) -> int:
        raise NotImplementedError

    # ---- Transport

    def register(self, regions: Sequence[torch.Tensor]) -> None:
        self._use(DirectMemory(list(regions)))

    def stage(self, memory: Staged) -> None:
        """Register staged caches, in place of ``register``. ``close`` also closes ``memory``."""
        self.write_bytes = memory.sizes.slot
        self.window_bytes = min(self.window_bytes, memory.sizes.slot * memory.sizes.slots)
        self._use(memory)

    def _use(self, memory: Memory) -> None:
        self._memory = memory

    def connect(self, peer: Endpoint, rank: int, deadline: float) -> str:
        name = f"{peer.transport}:{peer.address}#{peer.incarnation}, rank {rank}"
        self._peers[name] = PeerRank(peer, rank, deadline)
        return name

    def digest(self, key: TransferKey, peer: str, parts: Sequence[SpanPart]) -> np.ndarray:
        if self._memory.staged:
            return np.empty(0, np.uint64)
        return digest_parts(self._memory.shown, parts, ranks_seed(key, self.rank, self._peers[peer].rank))

    def mark(self) -> Any:
        return self._memory.mark()

    def write(self, write: Write) -> None:
        # None: the write is staged first, and `_send_staged` sends the write.
        ready = self._memory.put(write)
        if ready is not None:
            self._send(ready)

    def _send(self, write: Write) -> None:
        """Send a write, or queue the write until the handshake ends. A failure closes the link and ends the
        write with an error; nothing is raised."""
        link = self._links.get(write.peer)
        try:
            link = link or self._dial(write.peer)
            # Not connected or in the handshake: the write waits in the link, and `_open` sends all waiting
            # writes.
            if link.until is not None:
                link.waiting.append(write)
                return
            self._send_write(link, write)
        except Exception as error:
            self._lost(link, error)
            # Without a link, `_lost` cannot report the write.
            if link is None:
                self._ended(write.peer, write.key, write.number, info_of(error))

    def poll(self, seconds: float) -> list[Incoming | Written | Copied]:
        for link in self._answered.values():
            self._flush(link)
        self._answered.clear()
        self._try_again()
        self._send_staged()
        # Pending events must not wait for the sockets.
        timeout = 0.0 if self._events else max(0.0, min(seconds, self.patience()))
        for key, mask in self.selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._woken:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
            else:
                self._serve(key.data, mask)
        self._expire()
        events, self._events = self._events, []
        return events

    def take(self, incoming: Incoming) -> ErrorInfo | TakePending | None:
        error = take_in(self._memory, incoming, self.rank, self.endpoint.address)
        self.corrupt += error is not None
        return error

    def answer(self, incoming: Incoming, error: ErrorInfo | None) -> None:
        self._buffers.take_back(self._payload_of(incoming.content))
        link = self._links.get(incoming.source)
        if link is None:
            return
        link.connection.send(f.AnswerFrame(incoming.key, incoming.number, error))
        self._answered[link.name] = link  # `poll` sends all answers of one turn together

    def cancel(self, key: TransferKey) -> None:
        self._memory.cancel(key)
        for link in self._links.values():
            dropped = link.connection.cancel(key)
            unsent = [frame.number for frame in dropped if isinstance(frame, f.WriteFrame)]
            unsent += [write.number for write in link.waiting if write.key == key]
            for number in unsent:
                self._memory.ended(link.name, key, number)
            link.waiting = [write for write in link.waiting if write.key != key]
            # The rest of a partly sent frame is sent as zeros. No answer is expected: forget the write.
            for known in [known for known in link.unanswered if known[0] == key]:
                del link.unanswered[known]

    def quiet(self, key: TransferKey) -> bool:
        return self._memory.quiet(key)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        for link in self._links.values():
            link.connection.close()
        self._links.clear()
        self._answered.clear()
        self.selector.close()
        for sock in (self._listener, self._waker, self._woken):
            sock.close()
        self._memory.close()

    # ---- writes

    def _send_staged(self) -> None:
        """Send staged writes with finished copies, with digests of the bytes in host memory, or from sums."""
        for write in self._memory.ready():
            seed = ranks_seed(write.key, self.rank, self._peers[write.peer].rank)
            if len(write.digests):
                digests = seeded(write.digests, write.parts, seed)
            else:
                digests = digest_parts(self._memory.shown, write.parts, seed)
            self._send(msgspec.structs.replace(write, digests=digests))
        self._events += self._memory.failed()

    def _ended(self, peer: str, key: TransferKey, number: int, error: ErrorInfo | None) -> None:
        self._memory.ended(peer, key, number)
        self._events.append(Written(key, peer, number, error))

    # ---- connections

    def _dial(self, peer: str) -> PeerLink:
        """Start a connection to ``peer`` and send the Hello. Return the link; the handshake is not complete.
        Raises Unavailable for an unknown peer, OSError if connecting fails."""
        if peer not in self._peers:
            raise Unavailable("a write names an unknown peer")
        endpoint, _, deadline = self._peers[peer]
        sock, address = self._socket(endpoint.address)
        sock.setblocking(False)
        link = PeerLink(peer, self._connection(sock), True, time.monotonic() + deadline)
        try:
            self._connect(link, address)
        except OSError:
            sock.close()
            raise
        self._links[peer] = link
        self._hello(link, endpoint.incarnation)
        return link

    def _connect(self, link: PeerLink, address: object) -> None:
        """Start to connect without blocking. If the accept queue of a Unix socket is full, store the address
        for ``_try_again``. Raises OSError."""
        sock, link.address = link.connection.sock, None
        try:
            sock.connect(address)  # type: ignore[arg-type]
        except BlockingIOError as error:
            if error.errno == errno.EAGAIN:  # a Unix socket with a full accept queue: no connect is under way
                link.address, self._again = address, time.monotonic() + _PAUSE_S
                return
        self.selector.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _try_again(self) -> None:
        """Accept and connect again, after the pause that follows a failed attempt."""
        if self._again is None or self._again > time.monotonic():
            return
        self._again = None
        if self._listener not in self.selector.get_map():
            self.selector.register(self._listener, selectors.EVENT_READ, None)
        for link in [link for link in self._links.values() if link.address is not None]:
            try:
                self._connect(link, link.address)
            except OSError as error:
                self._lost(link, error)

    def _accept(self) -> None:
        """Accept one connection. Refuse a stranger or too many connections; close the oldest newcomer to make
        room. Without free descriptors, log an error and pause. Raises nothing."""
        try:
            sock, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                log.error("connections for transfers cannot be accepted: %s", error.strerror)
                self.selector.unregister(self._listener)  # otherwise every `select` would return at once
                self._again = time.monotonic() + _PAUSE_S
            return
        try:
            self._admit(sock)
            if len(self._links) >= MOST_PEERS:
                raise f.BadFrame("there are too many connections")
        except (OSError, WeftError) as error:
            self.refused += 1
            self._strangers.warn("a connection for transfers was refused: %s", error)
            sock.close()
            return
        sock.setblocking(False)
        self._accepted += 1
        name = f"{self.name} accepted#{self._accepted}"
        host = str(address[0]) if isinstance(address, tuple) else ""
        if (oldest := self._newcomers.add(host, name)) is not None:
            self._lost(
                self._links[oldest],
                Unavailable("closed without a handshake, to make room for another connection"),
            )
        link = PeerLink(name, self._connection(sock), False, time.monotonic() + HELLO_S, host)
        self._links[name] = link
        self.selector.register(sock, selectors.EVENT_READ, link)

    def _connection(self, sock: socket.socket) -> PeerConnection:
        return PeerConnection(sock, self._buffers.give, self.takes_fds)

    def _serve(self, link: PeerLink, mask: int) -> None:
        """Send and receive on one link. Any error closes the link and is not raised."""
        try:
            if mask & selectors.EVENT_WRITE:
                link.connection.flush()
            if mask & selectors.EVENT_READ:
                for got in link.connection.receive(_AT_ONCE):
                    self._got(link, got)
                    # A frame may have closed its own link.
                    if not self._lives(link):
                        return
            self._watch(link)
        except Exception as error:  # any fault of a peer ends only the peer's own connection
            self._lost(link, error)

    def _flush(self, link: PeerLink) -> None:
        """Send queued bytes of a link. An error closes the link and is not raised; no effect on a closed
        link."""
        if not self._lives(link):
            return
        try:
            link.connection.flush()
            self._watch(link)
        except Exception as error:
            self._lost(link, error)

    def _lives(self, link: PeerLink) -> bool:
        return self._links.get(link.name) is link

    def _watch(self, link: PeerLink) -> None:
        """Watch the socket for writing only while bytes are queued."""
        mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.connection.wants_to_write else 0)
        # A link that waits for another connect is not registered with the selector.
        if not self._lives(link) or link.address is not None:
            return
        if self.selector.get_key(link.connection.sock).events != mask:
            self.selector.modify(link.connection.sock, mask, link)

    def _lost(self, link: PeerLink | None, error: Exception) -> None:
        """Close a connection after an error or a bad frame. Ends all writes without an answer. No effect
        for a closed link or None."""
        if link is None or not self._lives(link):
            return
        if isinstance(error, WeftError):
            self.refused += 1
            self._strangers.warn("a connection for transfers was closed: %s (%s)", error, link.peer)
        elif not isinstance(error, OSError):
            self.refused += 1
            log.error("the connection for transfers with %s failed", link.peer, exc_info=error)
        del self._links[link.name]
        self._newcomers.left(link.host, link.name)
        if link.connection.sock in self.selector.get_map():
            self.selector.unregister(link.connection.sock)
        link.connection.close()
        self._memory.lost(link.name)
        # Writes without an answer fail here. Each write must end exactly once.
        for key, number in [*link.unanswered, *((write.key, write.number) for write in link.waiting)]:
            self._ended(link.name, key, number, info_of(error))

    def _expire(self) -> None:
        for link in list(self._links.values()):
            if link.until is not None and link.until <= time.monotonic():
                self._lost(link, TransportFailed("a peer did not identify itself in time"))

    def patience(self) -> float:
        """Return the seconds until the next handshake deadline, attempt or staged copy; at most 3,600."""
        due = [link.until for link in self._links.values() if link.until is not None]
        due += [] if self._again is None else [self._again]
        staged = self._memory.patience()
        until = 3600.0 if staged is None else staged
        return max(0.0, min(until, min(due) - time.monotonic())) if due else until

    # ---- frames

    def _got(self, link: PeerLink, got: Got) -> None:
        """Handle one frame by the state of the link. Raises BadFrame for a frame out of order."""
        match got.frame:
            case f.PeerHello() if not link.said_hello:
                self._check_hello(link, got.frame)
                link.said_hello, link.rank = True, got.frame.rank
                link.peer = f"{link.name} (rank {link.rank}, incarnation {got.frame.incarnation:x})"
                self._met(link, got.frame)
            case f.KeyProof() if link.said_hello and link.until is not None:
                self._proven(link)
            case f.WriteFrame() if not link.writer and link.until is None:
                self._got_write(link, got.frame, got)
            case f.AnswerFrame(key, number, error) if link.writer and link.until is None:
                if (key, number) in link.unanswered:
                    del link.unanswered[key, number]
                    self._ended(link.name, key, number, error)
                else:
                    # Late answer after `cancel`: free the slot, but report nothing.
                    self._memory.ended(link.name, key, number)
            case _:
                raise f.BadFrame(f"a {type(got.frame).__name__} arrived out of order")

    def _check_hello(self, link: PeerLink, hello: f.PeerHello) -> None:
        check_hello(hello, self.name, self.incarnation, self._peers[link.name] if link.writer else None)

    def _open(self, link: PeerLink) -> None:
        """Finish the handshake and send all waiting writes."""
        link.until = None
        link.connection.proven = True
        if not link.writer:
            self._newcomers.proved(link.host, link.name)
        while link.waiting and self._lives(link):
            self._send_write(link, link.waiting.pop(0))

    def _send_write(self, link: PeerLink, write: Write) -> None:
        """Send a write on an open link and record that an answer is due."""
        link.unanswered[write.key, write.number] = None
        parts = tuple(
            f.SpansFrame(part.source, part.target, part.spans.astype("<i8").tobytes()) for part in write.parts
        )
        frame = f.WriteFrame(write.key, write.number, parts, write.digests.astype("<u8").tobytes())
        link.connection.send(frame, self._payload(write), write.key)
        self._flush(link)

    def _got_write(self, link: PeerLink, frame: f.WriteFrame, got: Got) -> None:
        """Check a received write and queue the event for ``poll``. Raises BadFrame for an unknown region or
        spans outside the region."""
        parts = [(part, f.spans_of(part)) for part in frame.parts]
        spans = sum(len(each) for _, each in parts)
        for part, each in parts:
            # Numbers from a peer are not trusted: check each target before the event leaves this class.
            if part.target >= len(self._memory.regions):
                raise f.BadFrame("a write names an unknown region")
            check_inside(each[:, 1], each[:, 2], self._memory.regions[part.target].numel())
        digests = f.digests_of(frame, spans)
        source = self._sources(link, parts, got)._replace(digests=digests, rank=link.rank, peer=link.peer)
        targets = tuple((part.target, np.ascontiguousarray(each[:, 1:])) for part, each in parts)
        held = self._held_bytes(frame, got)
        self._events.append(Incoming(frame.key, link.name, frame.number, targets, held, source))
