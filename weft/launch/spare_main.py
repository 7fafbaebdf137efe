"""Entry point of a spare process: ``python -m weft.launch.spare_main PARENT``. See ``weft.engine.processes``.

Its standard input is a socket, by which it is told what it is to be once it has imported what heads and
workers need. What that one reads from its standard input follows there. It starts no thread before, and
touches no device. Ends with status 0 when it is not needed.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

import msgspec

from weft.common import env
from weft.common.title import set_title
from weft.engine.processes import MOST_DESCRIPTORS, SIZE, Order
from weft.launch import child, head_main, rank_main

PROGRAMS = {"head_main": head_main.work, "rank_main": rank_main.work}
IMPORTED = (
    "multiprocessing.synchronize",
    "torch",
    "weft.engine.core",
    "weft.engine.engine_server",
    "weft.engine.rank",
    "weft.engine.start",
    "weft.engine.supervised_ranks",
    "weft.layers.mlp",
    "weft.tracing.writer",
)
"""Of a model's own modules it imports none: which those are is not known yet, and they are small."""


def run(arguments: list[str]) -> int:
    """Waits, and runs what it is told to be; returns the exit status."""
    (parent,) = arguments
    child.begin(int(parent))
    set_title("spare")
    for name in IMPORTED:
        importlib.import_module(name)
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as link:
        told = receive(link)
    if told is None:
        return 0
    order, descriptors = told
    env.replace(order.environment)
    return PROGRAMS[order.program]([*order.arguments, *map(str, descriptors)])


def receive(link: socket.socket) -> tuple[Order, list[int]] | None:
    """The order and the descriptors that come with it; None: there will be none."""
    head, descriptors, _, _ = socket.recv_fds(link, SIZE.size, MOST_DESCRIPTORS)
    head += _exactly(link, SIZE.size - len(head))
    if len(head) < SIZE.size:
        return None
    (size,) = SIZE.unpack(head)
    data = _exactly(link, size)
    return (msgspec.msgpack.decode(data, type=Order), descriptors) if len(data) == size else None


def _exactly(link: socket.socket, size: int) -> bytes:
    """So many bytes; fewer when the other end is closed before."""
    data = b""
    while len(data) < size and (piece := link.recv(size - len(data))):
        data += piece
    return data


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
