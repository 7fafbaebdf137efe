"""Measure the speed of reads from another process with digests, as the limit of transports.

    python -m bench.read_bound [--megabytes 64] [--rounds 9]

The reader takes spans in random order from the memory of another process, in one thread. All rows take
turns within a round, and the first round is not counted. The rows with ``readv`` make the system call of
cross-memory attach (cma), which NIXL uses between two processes of one host.

    mapped                 copies with digests from mapped memory: the limit of ``shm``
    readv, landing, copy   one call per span into 4 MiB of landing memory, then copies with digests: the
                           limit of ``nixl`` over cma
    readv, digests         one call per span into the cache, then digests in place: without landing memory
    readv                  the calls alone
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np
import torch

from bench.machine import describe
from weft.disagg.transport.copying import copy_spans, digest_spans
from weft.disagg.transport.private_memory import huge_memory
from weft.disagg.transport.shared_memory import SharedMemory, map_read_only
from weft.ops import cpu

LANDING = 4 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_readv = _libc.process_vm_readv
_readv.restype = ctypes.c_ssize_t


class _Vector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def other(pipe: Connection, nbytes: int) -> None:
    """Keep private memory in huge pages, and mapped memory, until a message arrives."""
    private, shared = huge_memory(nbytes), SharedMemory(nbytes)
    for memory in (private, shared.tensor):
        memory.fill_(7)
    pipe.send((os.getpid(), private.data_ptr()))
    send_handle(pipe, shared.fd, os.getppid())
    pipe.recv()


class Reader:
    """Reads spans of one size from the other process."""

    def __init__(self, pid: int, address: int, mapped: torch.Tensor, span: int) -> None:
        self.pid, self.address, self.mapped, self.span = pid, address, mapped, span
        count = mapped.numel() // span
        order = np.random.default_rng(0).permutation(count)
        # [n, 3]: offset at the other process, offset here, bytes
        self.spans = np.stack([order, np.arange(count), np.ones(count, np.int64)], 1) * span
        self.seeds = np.zeros(count, np.uint64)
        self.landing, self.cache = huge_memory(LANDING), huge_memory(mapped.numel())
        self.landing.fill_(0)
        self.cache.fill_(0)

    def read(self, source: int, to: int) -> None:
        """Read one span, as UCX does for a descriptor."""
        here, there = _Vector(to, self.span), _Vector(self.address + source, self.span)
        done = _readv(self.pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        assert done == self.span, os.strerror(ctypes.get_errno())

    def shm(self) -> None:
        copy_spans(self.mapped, self.cache, self.spans, self.seeds)

    def landed(self) -> None:
        each = LANDING // self.span
        for at in range(0, len(self.spans), each):
            spans = self.spans[at : at + each].copy()
            for number, source in enumerate(spans[:, 0].tolist()):
                self.read(source, self.landing.data_ptr() + number * self.span)
            spans[:, 0] = np.arange(len(spans)) * self.span
            copy_spans(self.landing, self.cache, spans, self.seeds[at : at + each])

    def in_place(self) -> None:
        self.alone()
        digest_spans(self.cache, self.spans[:, 1:], self.seeds)

    def alone(self) -> None:
        base = self.cache.data_ptr()
        for source, to, _ in self.spans.tolist():
            self.read(source, base + to)


def measure(reader: Reader, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (GB/s, milliseconds of CPU) of each row and round."""
    rows: dict[str, Callable[[], None]] = {
        "mapped": reader.shm,
        "readv, landing, copy": reader.landed,
        "readv, digests": reader.in_place,
        "readv": reader.alone,
    }
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
    for number in range(rounds + 1):
        for name, run in rows.items():
            reader.cache.fill_(0)
            began, cpu_began = time.perf_counter(), time.thread_time()
            run()
            seconds, cpu_s = time.perf_counter() - began, time.thread_time() - cpu_began
            assert bool((reader.cache == 7).all()), name
            if number:
                rates[name].append((reader.cache.numel() / seconds / 1e9, cpu_s * 1e3))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not cpu.load():
        print("without the C++ operations digests run in numpy: these are not the numbers to publish")
    nbytes = args.megabytes << 20
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=other, args=(there, nbytes), daemon=True)
    process.start()
    pid, address = here.recv()
    mapped = map_read_only(recv_handle(here), nbytes)
    print(f"{nbytes} bytes, {args.rounds} rounds, {describe()['cpu']['model']}\n")
    print("| spans | | GB/s | least | most | of `mapped` | CPU, ms | of `mapped` |")
    print("|---|---|---|---|---|---|---|---|")
    for span in (64 << 10, 8 << 10):
        rates = measure(Reader(pid, address, mapped, span), args.rounds)
        for name, each in rates.items():
            pairs = list(zip(each, rates["mapped"], strict=True))
            ratio, cpu_ratio = (statistics.median(one[at] / base[at] for one, base in pairs) for at in (0, 1))
            gb_s, cpu_ms = zip(*each, strict=True)
            print(
                f"| {span >> 10} KiB | {name} | {statistics.median(gb_s):.2f} | {min(gb_s):.2f} | "
                f"{max(gb_s):.2f} | {ratio:.2f} | {statistics.median(cpu_ms):.1f} | {cpu_ratio:.2f} |"
            )
    here.send(None)
    process.join(20)


if __name__ == "__main__":
    main()
