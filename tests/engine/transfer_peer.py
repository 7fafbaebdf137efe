"""The other engine of a transfer, as a separate process: ``python -m tests.engine.transfer_peer ADDRESS``.

The process prints its address and incarnation, and answers each offer with ``Later``.
"""

from __future__ import annotations

import sys

import zmq

from weft.engine.disagg.transfer_channel import ZmqTransferChannel
from weft.types import transfer as r


def main(endpoint: str, incarnation: int) -> None:
    channel = ZmqTransferChannel(endpoint, incarnation)
    print(channel.address, flush=True)
    poller = zmq.Poller()
    poller.register(channel.sockets[0], zmq.POLLIN)
    while True:
        poller.poll(1000)
        while (arrived := channel.receive()) is not None:
            if arrived.asks:
                channel.send(arrived.peer, b"", asks=False)
            if arrived.body:
                key = r.decode(arrived.body).key
                channel.send(arrived.peer, r.encode(r.Later(key=key, seconds=1.0)), asks=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
