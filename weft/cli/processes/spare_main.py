"""Entry point of a spare process: ``python -m weft.cli.processes.spare_main PARENT``. See
``weft.engine.ranks.processes``.

A spare imports all modules that engines and workers need, then waits. Standard input is a socket: the order
to become an engine or a worker arrives there, followed by the standard input of the new role. A spare starts
no thread and touches no device before the order. The status is 0 if the spare is not needed.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys

import msgspec

from weft.cli.processes import child, engine_main, rank_main
from weft.common import env
from weft.common.title import set_title
from weft.engine.ranks.processes import MOST_DESCRIPTORS, SIZE, Order

PROGRAMS = {"engine_main": engine_main.work, "rank_main": rank_main.work}
IMPORTED = (
    "multiprocessing.synchronize",
    "torch",
    "weft.engine.core",
    "weft.engine.server.engine_server",
    "weft.engine.rank",
    "weft.engine.start",
    "weft.engine.ranks.supervised_ranks",
    "weft.layers.dense",
    "weft.tracing.writer",
)
"""Modules to import.

Modules of a single model are left out: the model is unknown, and the modules are small.
"""


def run(arguments: list[str]) -> int:
    """Import modules, wait for an order and run the ordered program.

    Return the exit status, 0 without an order. The environment of this process is replaced.
    """
    (parent,) = arguments
    child.begin(int(parent))
    set_title("spare")
    with child.importing():
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
    """Return the order with its descriptors, or None if the link closes first. Blocks."""
    engine, descriptors, _, _ = socket.recv_fds(link, SIZE.size, MOST_DESCRIPTORS)
    engine += _exactly(link, SIZE.size - len(engine))
    if len(engine) < SIZE.size:
        return None
    (size,) = SIZE.unpack(engine)
    data = _exactly(link, size)
    return (msgspec.msgpack.decode(data, type=Order), descriptors) if len(data) == size else None


def _exactly(link: socket.socket, size: int) -> bytes:
    """Return ``size`` bytes, or fewer if the other end closes before."""
    data = b""
    while len(data) < size and (piece := link.recv(size - len(data))):
        data += piece
    return data


if __name__ == "__main__":
    child.end_after(run)
