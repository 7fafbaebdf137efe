"""Invalid data on the sockets of transfers is ignored and harms no other client."""

from __future__ import annotations

import random
import socket
from pathlib import Path
from typing import Any

import pytest
import zmq

from tests.cli.test_serve import Server, start
from tests.cli.test_up import Clients, until
from tests.cli.test_up_roles import ends_in_order, metric

__all__ = ["start"]


def speak(server: Server, rng: random.Random) -> int:
    """Send invalid data to every transfer socket of ranks and engines. Return the number of sockets."""
    ranks = [path for path in Path(server.temporary).rglob("t?-*") if path.is_socket()]
    engines = [path for path in Path(server.temporary).rglob("r?-*") if path.is_socket()]
    for path in ranks:
        for size in (0, 3, 64, 70_000):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
                peer.settimeout(1.0)
                peer.connect(str(path))
                try:
                    peer.sendall(rng.randbytes(size))
                except OSError:  # the server closed the connection meanwhile
                    continue
    for path in engines:
        peer = zmq.Context.instance().socket(zmq.DEALER)
        peer.linger = 500
        peer.connect(f"ipc://{path}")
        for size in (0, 5, 5000):
            peer.send(rng.randbytes(size))
            peer.send_multipart([rng.randbytes(8), b"", rng.randbytes(size)])
        peer.close()
    return len(ranks) + len(engines)


@pytest.mark.slow
def test_nonsense_fails_no_transfer_and_no_worker(start: Any) -> None:
    server = start("spool-text", "--prefill", "1", "--decode", "1", "--max-num-seqs", "8", "--port", "0")
    base = server.url()
    rng = random.Random(5)
    with Clients(base) as clients:
        until(server, lambda: len(clients.texts) > 3)
        for _ in range(3):
            assert speak(server, rng) == 4
        asked = len(clients.texts)
        until(server, lambda: len(clients.texts) > asked + 6)
    assert not clients.errors
    assert len(set(clients.texts)) == 1
    assert metric(base, "transfers_failed_total") == 0
    assert metric(base, "front_pairs_total") >= len(clients.texts)
    ends_in_order(server)
