"""Sockets under system limits or many clients: no busy waiting, and work continues afterwards."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.disagg.transport.rig import SECRET
from tests.support.slowness import deadline
from weft.disagg.protocol.pushes import Write
from weft.disagg.transport import sockets
from weft.disagg.transport.newcomers import Newcomers
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.tcp import TcpTransport
from weft.types.transfer import Endpoint, TransferKey

WRITE = Write(TransferKey(1, 0, 1), "", 0, (), np.empty(0, np.uint64))


@pytest.fixture
def tcp() -> Iterator[TcpTransport]:
    transport = TcpTransport("127.0.0.1", 0, 5, SECRET)
    yield transport
    transport.close()


def polls(transport: Any, seconds: float) -> int:
    """Return the number of returns of ``poll`` in ``seconds``."""
    count, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        transport.poll(max(0.0, until - time.monotonic()))
        count += 1
    return count


def test_connections_that_prove_nothing_are_few(tcp: TcpTransport) -> None:
    host, _, port = tcp.endpoint.address.rpartition("|")
    crowd = list[socket.socket]()
    for _ in range(sockets.MOST_UNPROVEN + 5):
        crowd.append(socket.create_connection((host, int(port))))
        tcp.poll(0.5)
    assert len(tcp._links) == sockets.MOST_UNPROVEN
    assert tcp.refused == 5
    for sock in crowd:
        sock.close()
    polls(tcp, 0.1)
    assert len(tcp._links) == 0


def test_silent_connections_keep_no_peer_out(tcp: TcpTransport) -> None:
    """The connections fill all places of their address. A peer of the same address still gets a place."""
    host, _, port = tcp.endpoint.address.rpartition("|")
    crowd = [socket.create_connection((host, int(port))) for _ in range(sockets.MOST_UNPROVEN)]
    writer = TcpTransport("127.0.0.1", 1, 6, SECRET)
    try:
        polls(tcp, 0.1)
        name = writer.connect(tcp.endpoint, 0, 5.0)
        writer.write(msgspec.structs.replace(WRITE, peer=name))
        until = time.monotonic() + deadline(10)
        while not tcp.poll(0.01):
            writer.poll(0.01)
            assert time.monotonic() < until
    finally:
        writer.close()
        for sock in crowd:
            sock.close()


def test_places_of_newcomers_are_shared_by_address() -> None:
    places = Newcomers(each=3, most=6)
    assert [places.add("flood", str(n)) for n in range(5)] == [None, None, None, "0", "1"]
    places.add("peer", "p")
    places.proved("peer", "p")
    assert [places.add(address, address) for address in ("peer", "a", "b")] == [None, None, None]
    assert places.add("c", "c") == "2"  # of the address with most connections
    assert [places.add(address, address) for address in ("d", "e", "f", "g", "h")].count("peer") == 0
    assert len(places) == 6
    places.left("peer", "peer")
    places.left("peer", "peer")
    assert len(places) == 5


def test_accepting_without_descriptors_waits(tcp: TcpTransport) -> None:
    class Full:
        """A listener in a process that has reached its limit of descriptors."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock, self.full, self.asked = sock, True, 0

        def accept(self) -> Any:
            self.asked += 1
            if self.full:
                raise OSError(errno.EMFILE, "Too many open files")
            return self.sock.accept()

        def fileno(self) -> int:
            return self.sock.fileno()

        def close(self) -> None:
            self.sock.close()

    tcp.selector.unregister(tcp._listener)
    listener: Any = Full(tcp._listener)
    tcp._listener = listener
    tcp.selector.register(listener, 1, None)
    host, _, port = tcp.endpoint.address.rpartition("|")
    with socket.create_connection((host, int(port))):
        assert polls(tcp, 0.5) < 40
        assert 2 <= listener.asked < 20
        listener.full = False
        polls(tcp, 0.2)
        assert len(tcp._links) == 1


def test_a_unix_socket_whose_queue_is_full_is_tried_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    out = ShmTransport(str(folder), 0, 1)
    path = str(Path(folder) / "there")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as first:
        listener.bind(path)
        listener.listen(0)
        first.connect(path)
        name = out.connect(Endpoint("shm", path, 9), 0, 5.0)
        out.write(WRITE.__class__(WRITE.key, name, 0, (), WRITE.digests))
        assert polls(out, 0.5) < 40
        assert len(out._links) == 1
        listener.settimeout(5)
        listener.accept()[0].close()
        polls(out, 0.2)
        sock, _ = listener.accept()
        out.poll(0.1)
        with sock:
            sock.settimeout(5)
            assert sock.recv(10)  # the hello message
    out.close()
