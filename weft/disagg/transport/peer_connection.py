"""Non-blocking socket with frames: outgoing frames are queued, incoming frames arrive whole. For a select
loop."""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from weft.disagg.transport import wire as f
from weft.types.transfer import TransferKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MOST_VECTORS = 512
"""Maximum buffers in one call; the system's limit is 1,024."""
_READ = 64 << 10
UNPROVEN_BODY = 4 << 10
"""Maximum bytes of a frame body before the end of the handshake."""
MOST_FDS = 253
"""Maximum file descriptors of one message."""


class Got(NamedTuple):
    """A received frame."""

    frame: f.Frame
    payload: torch.Tensor | None
    """uint8, in a separate buffer; None without a payload."""


class _Outgoing:
    """A frame under way. The frame gets its number with the first sent byte, so an unsent frame may be
    dropped."""

    __slots__ = ("begun", "fds", "frame", "header", "key", "payload", "pieces", "transfer")

    def __init__(
        self,
        frame: f.Frame,
        payload: Sequence[memoryview],
        transfer: TransferKey | None,
        fds: Sequence[int],
        key: bytes,
    ) -> None:
        self.frame, self.transfer, self.fds, self.key = frame, transfer, list(fds), key
        self.payload = sum(len(piece) for piece in payload)
        self.header: memoryview | None = None
        """Unsent bytes of header and body; None before encoding."""
        self.pieces = deque(piece for piece in payload if len(piece))
        """Unsent pieces of the payload."""
        self.begun = False
        """True after the first sent byte."""


class PeerConnection:
    """Non-blocking socket for frames. Raises OSError if the peer is gone, BadFrame for bad bytes of the
    peer."""

    def __init__(self, sock: socket.socket, buffer: Callable[[int], torch.Tensor], takes_fds: bool) -> None:
        """``buffer(nbytes)`` returns memory for a payload. ``takes_fds``: accept file descriptors (Unix
        sockets)."""
        self.sock = sock
        self.out_key = self.in_key = f.NO_KEY
        self.proven = False
        """True after the handshake. Before, received frames must be short and without a payload."""
        self.fds: list[int] = []
        """Received file descriptors, not consumed yet."""
        self._buffer, self._takes_fds = buffer, takes_fds
        self._queue: deque[_Outgoing] = deque()
        self._sent = self._received = 0
        self._in = bytearray()
        self._header: tuple[int, int, bytes] | None = None
        self._payload: torch.Tensor | None = None
        self._filled = 0

    @property
    def wants_to_write(self) -> bool:
        return bool(self._queue)

    def send(
        self,
        frame: f.Frame,
        payload: Sequence[memoryview] = (),
        transfer: TransferKey | None = None,
        fds: Sequence[int] = (),
    ) -> None:
        """Queue a frame with the bytes of ``payload``. The bytes belong to transfer ``transfer``, and must
        not change before the send."""
        self._queue.append(_Outgoing(frame, payload, transfer, fds, self.out_key))

    def cancel(self, transfer: TransferKey) -> list[f.Frame]:
        """Stop reading memory of transfer ``transfer``. A partly sent frame continues with zeros. All other
        frames of the transfer are dropped; return the dropped frames."""
        unsent = [out.frame for out in self._queue if not out.begun and out.transfer == transfer]
        self._queue = deque(out for out in self._queue if out.begun or out.transfer != transfer)
        # Only the first frame of the queue can be partly sent.
        if self._queue and self._queue[0].transfer == transfer:
            first = self._queue[0]
            left = sum(len(piece) for piece in first.pieces)
            first.pieces = deque([memoryview(bytes(left))] if left else ())
        return unsent

    def flush(self) -> None:
        """Send as many bytes as possible without blocking. Raises OSError if the connection is broken."""
        while self._queue:
            first = self._queue[0]
            if first.header is None:
                first.header = memoryview(f.pack(first.frame, self._sent, first.key, first.payload))
            if not self._send_some(first, first.header):
                return
            if not first.header and not first.pieces:
                self._queue.popleft()

    def _send_some(self, out: _Outgoing, header: memoryview) -> bool:
        """Send bytes of one frame in one system call. Return False if the socket would block."""
        # One system call for header and payload: at most `_MOST_VECTORS` pieces.
        vector = [out.pieces[at] for at in range(min(len(out.pieces), _MOST_VECTORS))]
        extra = []
        if out.fds:
            extra = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", out.fds))]
        try:
            sent = self.sock.sendmsg([header, *vector] if len(header) else vector, extra)
        except (BlockingIOError, InterruptedError):
            return False
        # Frames are numbered (for the MAC) in order of sending, so dropped frames leave no gap.
        if not out.begun:
            out.begun = True
            self._sent += 1
        out.fds = []
        out.header, sent = header[sent:], max(0, sent - len(header))
        while sent:
            piece = out.pieces[0]
            if sent < len(piece):
                out.pieces[0] = piece[sent:]
                break
            sent -= len(piece)
            out.pieces.popleft()
        return True

    def receive(self, most: int) -> Iterator[Got]:
        """Yield received frames, as far as readable without blocking. Stops after about ``most`` bytes.

        Each frame is yielded before the next is parsed. So a key or a limit changed by the caller applies to
        the next frame. Raises ConnectionResetError at the end of the stream, other OSErrors, and BadFrame.
        """
        read = 0
        while read < most:
            try:
                count = self._fill() if self._payload is not None else self._read()
            except (BlockingIOError, InterruptedError):
                break
            if not count:
                raise ConnectionResetError("the other end has closed the connection")
            read += count
            while (got := self._next()) is not None:
                yield got

    def _read(self) -> int:
        """Append the next bytes to the input, and received descriptors to ``fds``. Return the number of
        bytes, 0 at the end of the stream. Raises BadFrame for too many descriptors."""
        if not self._takes_fds:
            data = self.sock.recv(self._next_read())
        else:
            data, ancillary, flags, _ = self.sock.recvmsg(
                self._next_read(), socket.CMSG_LEN(MOST_FDS * array.array("i").itemsize)
            )
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self.fds += fds
            if flags & socket.MSG_CTRUNC or len(self.fds) > MOST_FDS:
                raise f.BadFrame("a peer sent too many file descriptors")
        self._in += data
        return len(data)

    def _next_read(self) -> int:
        """Return the size of the next read. Stops before a payload, which is read into a separate buffer."""
        if not self.proven:
            return UNPROVEN_BODY
        if self._header is None:
            return max(f.HEADER.size - len(self._in), 1) if not self._takes_fds else _READ
        body, payload, _ = self._header
        return max(body - len(self._in), 1) if payload else _READ

    def _fill(self) -> int:
        """Read into the payload buffer. Return the number of bytes, 0 at the end of the stream."""
        assert self._payload is not None
        view = memory_of(self._payload)[self._filled :]
        count = self.sock.recv_into(view)
        self._filled += count
        return count

    def _next(self) -> Got | None:
        """Remove and return the next frame, or None if the frame is incomplete. Raises BadFrame for wrong
        sizes, a wrong MAC, or a long frame before the end of the handshake."""
        if self._header is None:
            if len(self._in) < f.HEADER.size:
                return None
            body, payload, mac = f.HEADER.unpack_from(self._in)
            # Check the sizes before any memory is allocated for the frame.
            f.check_sizes(body, payload)
            if not self.proven and (body > UNPROVEN_BODY or payload):
                raise f.BadFrame("a peer sent data before the end of the handshake")
            del self._in[: f.HEADER.size]
            self._header = body, payload, mac
        body, payload, mac = self._header
        if len(self._in) < body:
            return None
        # The payload buffer starts with the bytes already read after the body.
        if payload and self._payload is None:
            self._begin_payload(body, payload)
        if self._filled < payload:
            return None
        frame = f.unpack(bytes(self._in[:body]), mac, self._received, self.in_key, payload)
        got = Got(frame, self._payload)
        del self._in[:body]
        self._received += 1
        self._header, self._payload, self._filled = None, None, 0
        return got

    def _begin_payload(self, body: int, payload: int) -> None:
        """Allocate the payload buffer and move the bytes that were read behind the body into the buffer."""
        self._payload = self._buffer(payload)
        already = bytes(self._in[body : body + payload])
        self._filled = len(already)
        if already:
            self._payload[: len(already)] = torch.frombuffer(bytearray(already), dtype=torch.uint8)
            del self._in[body : body + len(already)]

    def close(self) -> None:
        """Close the socket and all unconsumed file descriptors."""
        for fd in self.fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self.fds = []
        self._queue.clear()
        self.sock.close()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a uint8 tensor on the CPU, without a copy."""
    return memoryview(cast("Buffer", tensor.numpy()))
