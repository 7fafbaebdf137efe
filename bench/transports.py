"""Measure the bandwidth of every transport between two processes of one host, with digests.

    python -m bench.transports [--device cuda] [--megabytes 64] [--rounds 9] [--spread 1] [--json FILE]

One transfer moves a cache of one KV cache group (16 layers, bfloat16) from a sending to a receiving process.
Everything except the engines takes part: spans, digests, frames, copies, answers. Blocks of 64 positions make
spans of 64 KiB; blocks of 8 positions make spans of 8 KiB. Blocks lie in random order. All transports take
turns within a round, and the first round is not counted. Without NIXL its rows are left out. With
``--spread N`` the sender's pool is N times as large as the cache, so that few blocks are neighbours. CPU is
the time of the receiving process per transfer, which depends less on other work of the machine.

    shm               mapped memory
    tcp               a stream over loopback
    nixl              NIXL over UCX, as UCX chooses on one host: cross-memory attach (cma)
    nixl over tcp     NIXL over UCX with UCX_TLS=tcp

With ``--device cuda`` both caches are on the first GPU. shm and tcp copy through pinned host memory. NIXL
reads the sender's caches directly. UCX chooses how, between processes of one host with the IPC of CUDA.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.machine import describe
from weft.config.cache_layout import pool_tensors
from weft.config.spec import CacheSpec
from weft.disagg.protocol.group_layout import blocks_of
from weft.disagg.protocol.transfer_events import RankReport, RankStopped
from weft.disagg.transport.device_memory import DeviceWork
from weft.disagg.transport.nixl_transport import NixlTransport
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.read_engine import module_name
from weft.disagg.transport.shared_memory import SharedMemory
from weft.disagg.transport.shm import ShmTransport
from weft.disagg.transport.staging_memory import Sizes, Staged
from weft.disagg.transport.tcp import TcpTransport
from weft.disagg.transport.transfer_thread import RankTransfer
from weft.disagg.transport.transport_registry import transport_kind
from weft.ops import cpu
from weft.types import transfer as r
from weft.types.transfer import Outcome, TransferKey

LAYERS, HEADS, WIDTH = 16, 4, 64
CACHE = CacheSpec(kind="full", layers=tuple(range(LAYERS)), kv_heads=HEADS, head_dim=WIDTH)
POSITION_BYTES = 2 * HEADS * WIDTH * 2
"""Bytes of one position of one layer: keys and values in bfloat16."""
SECRET = b"of the benchmark alone"
KINDS = ("shm", "tcp", "nixl", "nixl over tcp")
HOST = "127.0.0.1"


class Case(NamedTuple):
    """A transport, the number of positions per block, and the device of the caches."""

    kind: str
    block: int
    device: str = "cpu"

    @property
    def span_kib(self) -> int:
        return self.block * POSITION_BYTES >> 10


class Side:
    """One side of a case: memory, transport and thread."""

    def __init__(
        self, case: Case, folder: str, incarnation: int, blocks: int, value: int, spread: int = 1
    ) -> None:
        """``blocks``: number of blocks of the cache. ``value``: initial value of each byte. ``spread``: size
        of the pool, in caches."""
        self.case, self.blocks, self.spread = case, blocks, spread
        (tensor,) = pool_tensors(CACHE, case.block, spread * blocks, "bfloat16")
        kind = r.CacheGroupDims(
            kind="full",
            layers=CACHE.layers,
            block_size=case.block,
            window=0,
            ratio=1,
            kv_heads=HEADS,
            tensors=(r.TensorDims(tensor.name, tensor.dims, tensor.dtype),),
        )
        self.dims = r.GroupDims(ranks=1, kinds=(kind,))
        nbytes = (1 + spread * blocks) * case.block * POSITION_BYTES * LAYERS
        self.transport: Any = opened(case, folder, incarnation)
        self.memory = self._placed(nbytes)
        self.memory.fill_(value)  # touch every page
        self.told: queue.SimpleQueue[RankReport | RankStopped] = queue.SimpleQueue()
        self.transfer = RankTransfer(0, self.dims, self.transport, self.told.put)

    def _placed(self, nbytes: int) -> torch.Tensor:
        """Return memory for the caches, uint8 [nbytes], that the transport can use."""
        kind = transport_kind(self.case.kind.partition(" ")[0])
        if self.case.device == "cuda":
            device = torch.device("cuda", 0)
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
            if kind.device:
                self.transport.place([memory], DeviceWork(device, kind.slot_bytes))
            else:
                sizes = Sizes(slot=kind.slot_bytes)
                copies = DeviceWork(device, max(sizes.slot, sizes.inbox))
                self.transport.stage(Staged([memory], copies, sizes, sends=True, takes=True))
            return memory
        shared = SharedMemory(nbytes) if kind.shared else None
        memory = huge_memory(nbytes) if shared is None else shared.tensor
        if self.case.kind == "shm":
            self.transport.share([shared])
        else:
            self.transport.register([memory])
        return memory

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer."""
        return self.blocks * self.case.block * POSITION_BYTES * LAYERS

    def offer(self, key: TransferKey) -> r.Admitted:
        return r.Admitted(key=key, num_prompt=self.blocks * self.case.block, dims=self.dims)

    def wait(self) -> Outcome:
        """Return the outcome of the running transfer."""
        while True:
            said = self.told.get(timeout=120)
            if isinstance(said, RankReport) and said.outcome is not Outcome.pending:
                return said.outcome

    def stop(self, key: TransferKey) -> None:
        self.transfer.stop(key)
        while not isinstance(self.told.get(timeout=120), RankStopped):
            pass


def opened(case: Case, folder: str, incarnation: int) -> Any:
    """Return the transport of ``case``. UCX reads its variable at the start of an engine."""
    kind = case.kind
    if kind == "shm":
        return ShmTransport(folder, 0, incarnation)
    if kind == "tcp":
        return TcpTransport(HOST, 0, incarnation, SECRET)
    before = os.environ.pop("UCX_TLS", None)
    if kind.endswith("tcp"):
        os.environ["UCX_TLS"] = "tcp"
    place = partial(torch.empty, dtype=torch.uint8, device="cuda:0") if case.device == "cuda" else huge_memory
    try:
        return NixlTransport(HOST, 0, incarnation, SECRET, landing=place)
    finally:
        os.environ.pop("UCX_TLS", None)
        if before is not None:
            os.environ["UCX_TLS"] = before


def sides(cases: list[Case], folder: str, base: int, total: int, value: int, spread: int = 1) -> list[Side]:
    torch.set_num_threads(1)
    made = []
    for number, case in enumerate(cases):
        blocks = max(1, total // (case.block * POSITION_BYTES * LAYERS))
        made.append(Side(case, folder, base + number, blocks, value, spread))
    return made


def send(cases: list[Case], folder: str, total: int, spread: int, pipe: Connection) -> None:
    """Run the sending process: push a transfer for each received (number of the case, Bound)."""
    made = sides(cases, folder, 100, total, 7, spread)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        number, data = asked
        side, bound = made[number], r.decode(data)
        assert isinstance(bound, r.Bound)
        table = 1 + np.random.default_rng(0).permutation(spread * side.blocks)[: side.blocks]
        for layer in CACHE.layers:
            side.transfer.computed(bound.key, (layer,), 0, side.blocks * side.case.block)
        side.transfer.begin(side.offer(bound.key), bound, (blocks_of(table),))
        pipe.send(side.wait().name)
        side.stop(bound.key)
    for side in made:
        side.transfer.close()


class Rate(NamedTuple):
    """Measurement of one transfer, by the receiver."""

    gb_s: float
    cpu_ms: float


def one_transfer(side: Side, number: int, key: TransferKey, pipe: Connection) -> Rate:
    """Run one transfer and return its rate."""
    table = blocks_of(np.arange(1, side.blocks + 1))
    ends = (side.transport.endpoint,)
    bound = r.Bound(key=key, start=0, dims=side.dims, blocks=(table,), endpoints=ends)
    side.transfer.expect(side.offer(key), bound)
    began, cpu_began = time.perf_counter(), time.process_time()
    pipe.send((number, r.encode(bound)))
    assert side.wait() is Outcome.done
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    assert pipe.recv() == "done"
    side.stop(key)
    return Rate(side.nbytes / seconds / 1e9, cpu_s * 1e3)


def measure(cases: list[Case], total: int, rounds: int, spread: int) -> dict[Case, list[Rate]]:
    """Return the rates of each round and case. Each round begins with another case."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    rates: dict[Case, list[Rate]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        process = context.Process(target=send, args=(cases, folder, total, spread, there), daemon=True)
        process.start()
        made = sides(cases, folder, 200, total, 0)
        assert here.recv() == "ready"
        for number in range(rounds + 1):
            for at in range(len(cases)):
                which = (at + number) % len(cases)
                key = TransferKey(number * len(cases) + which, 0, 1)
                rate = one_transfer(made[which], which, key, here)
                if number:
                    rates[cases[which]].append(rate)
        here.send(None)
        process.join(20)
        for side in made:
            assert int((side.memory == 7).sum()) == side.nbytes
            side.transfer.close()
    return rates


def table_of(rates: dict[Case, list[Rate]]) -> str:
    """Return medians, ranges, and the median of the ratio to shm of the same round, as Markdown."""
    lines = [
        "| spans | transport | GB/s | least | most | of `shm`, round by round | CPU, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, each in rates.items():
        base = rates[case._replace(kind="shm")]
        ratio = statistics.median(one.gb_s / other.gb_s for one, other in zip(each, base, strict=True))
        gb_s = [one.gb_s for one in each]
        cpu_ms = statistics.median(one.cpu_ms for one in each)
        lines.append(
            f"| {case.span_kib} KiB | `{case.kind}` | {statistics.median(gb_s):.2f} | {min(gb_s):.2f} | "
            f"{max(gb_s):.2f} | {ratio:.2f} | {cpu_ms:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="place of both caches")
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--spread", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for all samples")
    args = parser.parse_args()
    if not cpu.load():
        print("without the C++ operations digests run in numpy: these are not the numbers to publish")
    kinds = [kind for kind in KINDS if module_name() is not None or not kind.startswith("nixl")]
    if args.device == "cuda":
        kinds = [kind for kind in kinds if kind != "nixl over tcp"]
    cases = [Case(kind, block, args.device) for block in (64, 8) for kind in kinds]
    machine = describe()
    rates = measure(cases, args.megabytes << 20, args.rounds, args.spread)
    where = torch.cuda.get_device_name(0) if args.device == "cuda" else machine["cpu"]["model"]
    print(f"{args.megabytes << 20} bytes per transfer, {args.rounds} rounds, {where}\n")
    print(table_of(rates))
    if args.json is not None:
        samples = [
            {"transport": case.kind, "span_kib": case.span_kib, "gb_s": [one.gb_s for one in each]}
            for case, each in rates.items()
        ]
        args.json.write_text(
            json.dumps({"machine": machine, "device": where, "samples": samples}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
