"""Measure the bandwidth of transfers between two processes of one host, beside a plain copy and a plain
socket.

    python -m bench.transfer [--megabytes 128] [--rounds 7]

One transfer moves a cache of one KV cache group (16 layers, 8 KV heads of 64, blocks of 64, bfloat16) from
a sending to a receiving process. Everything except the engines takes part: spans, digests, frames, copies,
answers. A second variant stages caches at both ends, as a GPU does. The plain copy moves the same bytes in
one thread. The plain socket connects two processes with calls of 1 MiB. The output has medians over rounds
without the first round.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import socket
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from weft.config.cache_layout import pool_tensors
from weft.config.spec import CacheSpec
from weft.disagg.protocol.events import RankReport, RankStopped
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.pushes import WRITE_BYTES
from weft.disagg.transport.copies import HostCopies
from weft.disagg.transport.copying import copy_spans, digest_spans
from weft.disagg.transport.memory import Sizes, Staged
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.tcp import TcpTransport
from weft.disagg.transport.worker import RankTransfer
from weft.ops import cpu
from weft.types import rooms as r
from weft.types.rooms import Outcome, RoomKey

LAYERS, HEADS, WIDTH, BLOCK = 16, 8, 64, 64
CACHE = CacheSpec(kind="full", layers=tuple(range(LAYERS)), kv_heads=HEADS, head_dim=WIDTH)
BLOCK_BYTES = LAYERS * 2 * HEADS * BLOCK * WIDTH * 2
SECRET = b"of the benchmark alone"
STAGED = ", staged"
"""Behind the name of a transport: caches at both ends pass through host memory, as a GPU's do."""


def dims(blocks: int) -> r.GroupDims:
    (tensor,) = pool_tensors(CACHE, BLOCK, blocks, "bfloat16")
    kind = r.KindDims(
        kind="full",
        layers=CACHE.layers,
        block_size=BLOCK,
        window=0,
        ratio=1,
        kv_heads=HEADS,
        tensors=(r.TensorDims(tensor.name, tensor.dims, tensor.dtype),),
    )
    return r.GroupDims(ranks=1, kinds=(kind,))


class Rank:
    """Hold one side of a transfer: memory, transport and thread."""

    def __init__(self, kind: str, folder: str, number: int, blocks: int, value: int) -> None:
        torch.set_num_threads(1)
        self.dims, self.blocks = dims(blocks), blocks
        self.memory = SharedMemory((1 + blocks) * BLOCK_BYTES)
        self.memory.tensor.fill_(value)  # every page is there
        shm = kind.startswith("shm")
        self.transport: Any = (
            ShmTransport(folder, 0, number) if shm else TcpTransport("127.0.0.1", 0, number, SECRET)
        )
        if kind.endswith(STAGED):
            sizes = Sizes(slot=self.transport.slot_bytes)
            memory = Staged([self.memory.tensor], HostCopies(), sizes, sends=True, takes=True)
            self.transport.stage(memory)
        elif shm:
            self.transport.share([self.memory])
        else:
            self.transport.register([self.memory.tensor])
        self.told: queue.SimpleQueue[RankReport | RankStopped] = queue.SimpleQueue()
        self.transfer = RankTransfer(0, self.dims, self.transport, self.told.put)

    def offer(self, key: RoomKey) -> r.Admitted:
        return r.Admitted(key=key, num_prompt=self.blocks * BLOCK, dims=self.dims)

    def wait(self) -> Outcome:
        while True:
            said = self.told.get(timeout=60)
            if isinstance(said, RankReport) and said.outcome is not Outcome.pending:
                return said.outcome

    def table(self) -> tuple[r.Blocks, ...]:
        return (blocks_of(1 + np.random.default_rng(0).permutation(self.blocks)),)


def send(kind: str, folder: str, blocks: int, pipe: Connection) -> None:
    """Run the sending process: push a transfer for each received Bound."""
    rank = Rank(kind, folder, 1, blocks, 7)
    pipe.send("ready")
    while (data := pipe.recv()) is not None:
        bound = r.decode(data)
        assert isinstance(bound, r.Bound)
        for layer in CACHE.layers:
            rank.transfer.computed(bound.key, (layer,), 0, blocks * BLOCK)
        rank.transfer.begin(rank.offer(bound.key), bound, rank.table())
        pipe.send(rank.wait().name)
        rank.transfer.stop(bound.key)
    rank.transfer.close()


def transfers(kind: str, blocks: int, rounds: int) -> list[float]:
    """Return the GB/s of each round, measured by the receiver."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        process = context.Process(target=send, args=(kind, folder, blocks, there), daemon=True)
        process.start()
        rank = Rank(kind, folder, 2, blocks, 0)
        assert here.recv() == "ready"
        rates = []
        for number in range(rounds):
            key = RoomKey(number, 0, 1)
            bound = r.Bound(
                key=key,
                start=0,
                dims=rank.dims,
                blocks=(blocks_of(np.arange(1, blocks + 1)),),
                endpoints=(rank.transport.endpoint,),
            )
            rank.transfer.expect(rank.offer(key), bound)
            began = time.perf_counter()
            here.send(r.encode(bound))
            assert rank.wait() is Outcome.done
            rates.append(blocks * BLOCK_BYTES / (time.perf_counter() - began) / 1e9)
            assert here.recv() == "done"
            rank.transfer.stop(key)
        assert bool((rank.memory.tensor[BLOCK_BYTES:][:: 1 << 16] != 0).any())
        here.send(None)
        process.join(10)
        rank.transfer.close()
    return rates


def read_all(port: int, total: int, rounds: int) -> None:
    """The receiving end of the plain socket."""
    buffer = memoryview(bytearray(WRITE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for _ in range(rounds):
            left = total
            while left:
                left -= sock.recv_into(buffer[: min(left, WRITE_BYTES)])
            sock.sendall(b"!")


def plain_socket(total: int, rounds: int) -> list[float]:
    context = multiprocessing.get_context("spawn")
    data = memoryview(bytearray(total))
    rates = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = context.Process(
            target=read_all, args=(listener.getsockname()[1], total, rounds), daemon=True
        )
        process.start()
        sock, _ = listener.accept()
        with sock:
            for _ in range(rounds):
                began = time.perf_counter()
                for at in range(0, total, WRITE_BYTES):
                    sock.sendall(data[at : at + WRITE_BYTES])
                assert sock.recv(1) == b"!"
                rates.append(total / (time.perf_counter() - began) / 1e9)
        process.join(10)
    return rates


def in_one_thread(total: int, rounds: int) -> dict[str, list[float]]:
    """Copies and digests of the same bytes in spans of a write's size."""
    torch.set_num_threads(1)
    source, target = torch.ones(total, dtype=torch.uint8), torch.ones(total, dtype=torch.uint8)
    begins = np.arange(0, total, WRITE_BYTES // 4)
    spans = np.stack([begins, begins, np.minimum(WRITE_BYTES // 4, total - begins)], axis=1)
    seeds = np.arange(len(spans)).astype(np.uint64)
    work = {
        "plain copy": lambda: target.copy_(source),
        "digests alone": lambda: digest_spans(source, spans[:, 1:].copy(), seeds),
        "copy with digests": lambda: copy_spans(source, target, spans, seeds),
    }
    rates = dict[str, list[float]]()
    for _ in range(rounds):
        for name, do in work.items():
            began = time.perf_counter()
            do()
            rates.setdefault(name, []).append(total / (time.perf_counter() - began) / 1e9)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    if not cpu.load():
        print("without the C++ operations digests run in numpy: these are not the numbers to publish")
    blocks = max(1, (args.megabytes << 20) // BLOCK_BYTES)
    total = blocks * BLOCK_BYTES
    rates = in_one_thread(total, args.rounds)
    for kind in ("shm", "shm" + STAGED):
        rates[kind] = transfers(kind, blocks, args.rounds)
    rates["plain socket"] = plain_socket(total, args.rounds)
    for kind in ("tcp", "tcp" + STAGED):
        rates[kind] = transfers(kind, blocks, args.rounds)
    again = in_one_thread(total, args.rounds)["plain copy"]
    median = {name: statistics.median(each[1:]) for name, each in rates.items()}
    print(f"{total / 1e6:.0f} MB a round, {args.rounds - 1} rounds\n")
    print("| | GB/s (median) | least | most |\n|---|---|---|---|")
    for name, each in rates.items():
        print(f"| {name} | {median[name]:.2f} | {min(each[1:]):.2f} | {max(each[1:]):.2f} |")
    print(f"| plain copy, again | {statistics.median(again[1:]):.2f} | | |")
    print(f"\nshm: {median['shm'] / median['plain copy']:.0%} of a plain copy")
    print(f"tcp: {median['tcp'] / median['plain socket']:.0%} of a plain socket")
    for kind in ("shm", "tcp"):
        print(f"{kind}{STAGED}: {median[kind + STAGED] / median[kind]:.0%} of {kind}")


if __name__ == "__main__":
    main()
