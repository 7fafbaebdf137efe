"""One connection, byte by byte: what is cancelled at any point, and what may come before a handshake."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from weft.disagg.transport import wire as f
from weft.disagg.transport.peer_connection import Got, PeerConnection
from weft.types.transfer import TransferKey

TRANSFERS = [TransferKey(number, 0, 1) for number in range(3)]
PAYLOAD = 40


class Trickle:
    """A socket that takes so many bytes in all, then none."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.left = 0

    def sendmsg(self, pieces: list[memoryview], extra: list[Any]) -> int:
        if not self.left:
            raise BlockingIOError
        data = b"".join(pieces)[: self.left]
        self.left -= len(data)
        self.out += data
        return len(data)


def connection(sock: Any) -> PeerConnection:
    made = PeerConnection(sock, lambda size: torch.empty(size, dtype=torch.uint8), False)
    made.proven = True
    return made


def heard(data: bytes, proven: bool = True) -> list[Got]:
    """Return the frames that the other end reads from ``data``."""
    near, far = socket.socketpair()
    with near, far:
        far.setblocking(False)
        near.sendall(data)
        into = connection(far)
        into.proven = proven
        return list(into.receive(1 << 20))


def frames(transfer: TransferKey) -> f.WriteFrame:
    return f.WriteFrame(transfer, 0, (), b"")


@pytest.mark.requirement("E18")
@pytest.mark.parametrize("cancelled", TRANSFERS)
def test_a_transfer_that_is_cancelled_at_any_byte_takes_no_other_with_it(cancelled: TransferKey) -> None:
    whole = len(f.pack(frames(TRANSFERS[0]), 0, f.NO_KEY, PAYLOAD)) + PAYLOAD
    for taken in range(3 * whole + 1):
        sock = Trickle()
        out = connection(sock)
        for transfer in TRANSFERS:
            content = bytes([transfer.transfer + 1]) * PAYLOAD
            out.send(frames(transfer), [memoryview(content[:15]), memoryview(content[15:])], transfer)
        sock.left = taken
        out.flush()
        before = len(sock.out)
        out.cancel(cancelled)
        sock.left = 1 << 20
        out.flush()
        got = heard(bytes(sock.out))
        found = {each.frame.key: each.payload for each in got if isinstance(each.frame, f.WriteFrame)}
        begin, end = whole * cancelled.transfer, whole * (cancelled.transfer + 1)
        assert (cancelled in found) == (before > begin)
        for transfer in TRANSFERS:
            if transfer != cancelled:
                assert found[transfer].tolist() == [transfer.transfer + 1] * PAYLOAD  # type: ignore[union-attr]
        if begin < before < end:
            out_then = min(PAYLOAD, max(0, before - (end - PAYLOAD)))
            want = [cancelled.transfer + 1] * out_then + [0] * (PAYLOAD - out_then)
            assert found[cancelled].tolist() == want  # type: ignore[union-attr]
        assert not out.wants_to_write


@pytest.mark.parametrize(("body", "payload"), [(5000, 0), (10, 1)])
def test_before_the_hand_shake_is_over_frames_are_short_and_bare(body: int, payload: int) -> None:
    header = f.HEADER.pack(body, payload, bytes(16))
    assert heard(header) == []
    with pytest.raises(f.BadFrame, match="handshake"):
        heard(header, proven=False)
