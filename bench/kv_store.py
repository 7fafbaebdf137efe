"""Measure the files of the KV disk tier: writes, reads, CPU time, and the time to read the index.

    python -m bench.kv_store [--folder FOLDER] [--records N] [--nbytes B] [--rounds R]

A plain program that writes and reads equal pieces past the page cache is measured beside the store, round by
round. Records of 768 KiB are blocks of 64 tokens of 12,288 bytes each.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from weft.disagg.transport import copying
from weft.engine.tiers.read_ahead import RUN_BYTES, ReadAhead
from weft.kv.tiers import LOAD_BYTES
from weft.store import layout
from weft.store.records import Owner, RecordBuffer, RecordId
from weft.store.segment import write_footer
from weft.store.segments import SegmentStore, StoreSettings

TOKEN = 12_288
"""Bytes of a token."""


def fast_digest(memory: np.ndarray, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return the digests, by the C++ operations if they are built."""
    return copying.digest_spans(torch.from_numpy(memory), spans, seeds)


def opened(folder: Path, budget: int, direct: bool = True) -> SegmentStore:
    settings = StoreSettings(folder=folder, namespace="0" * 32, budget=budget, direct=direct)
    return SegmentStore(settings, digest=fast_digest)


def names(count: int) -> list[RecordId]:
    return [RecordId(0, number.to_bytes(16, "little")) for number in range(count)]


class Clock:
    """Wall and CPU time of a piece of work."""

    def __init__(self, work: Callable[[], None]) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        self.wall, self.cpu = time.perf_counter() - wall, time.process_time() - cpu


def plain(folder: Path, count: int, nbytes: int) -> tuple[Clock, Clock]:
    """Write ``count`` pieces of ``nbytes`` of one file past the page cache, and read as many bytes as a load
    reads with one call."""
    path = folder / "plain"
    each = max(1, RUN_BYTES // nbytes)
    memory, run = mmap.mmap(-1, nbytes), RecordBuffer(each * nbytes).payload
    memory[:] = os.urandom(nbytes)
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT

    def write() -> None:
        fd = os.open(path, flags)
        os.posix_fallocate(fd, 0, count * nbytes)
        for number in range(count):
            os.pwritev(fd, [memory], number * nbytes)
        os.fdatasync(fd)
        os.close(fd)

    def read() -> None:
        fd = os.open(path, flags)
        for number in range(0, count, each):
            os.preadv(fd, [run.data], number * nbytes)
        os.close(fd)

    made = Clock(write), Clock(read)
    path.unlink()
    return made


def stored(folder: Path, count: int, nbytes: int, direct: bool) -> tuple[Clock, Clock]:
    """Write and read ``count`` records of a store."""
    store, buffer, records = (
        opened(folder, 4 * count * nbytes + (1 << 30), direct),
        RecordBuffer(nbytes),
        names(count),
    )
    buffer.payload[:] = np.frombuffer(os.urandom(nbytes), np.uint8)

    def write() -> None:
        for record in records:
            assert store.write(record, buffer, nbytes) == ""
        store.seal()

    reads, each = ReadAhead(nbytes), max(1, LOAD_BYTES // nbytes)

    def read() -> None:
        for at in range(0, count, each):
            for found in reads.runs(store, records[at : at + each]):
                assert all(isinstance(one, np.ndarray) for one in found)

    made = Clock(write)
    if not direct:
        for file in folder.rglob("*.kv"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    read_clock = Clock(read)
    reads.close()
    store.flush()
    store.close()
    return made, read_clock


def index(folder: Path, count: int, each: int = 160) -> tuple[float, float]:
    """Return the seconds to open a store of ``count`` records by footers, and the bytes of memory a record.

    The files are sparse: only first pages and footers exist.
    """
    place = folder / ("0" * 32)
    place.mkdir(mode=0o700, exist_ok=True)
    for begin in range(0, count, each):
        identity = layout.Identity(bytes(16), os.urandom(16))
        entries = [
            layout.entry_of(RecordId(0, os.urandom(16)), Owner(), 4096 + n * 790_528, 786_432, time.time())
            for n in range(min(each, count - begin))
        ]
        with (place / f"{begin:016x}-00000000.kv").open("wb") as file:
            file.write(layout.segment_page(identity))
            file.flush()
            end = 4096 + len(entries) * 790_528
            write_footer(file.fileno(), identity, np.concatenate(entries), end, fast_digest)
    before = _resident()
    begun = time.perf_counter()
    store = opened(folder, 1 << 40)
    seconds = time.perf_counter() - begun
    assert store.stats().records == count
    return seconds, (_resident() - before) / count


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, help="folder on the disk to measure; default: the cache folder"
    )
    parser.add_argument("--records", type=int, default=256)
    parser.add_argument("--nbytes", type=int, default=64 * TOKEN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--index", type=int, default=100_000, help="records of the index")
    given = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="weft-kv-", dir=given.folder or Path.home() / ".cache"))
    work: dict[str, Callable[[], tuple[Clock, Clock]]] = {
        "plain, O_DIRECT": lambda: plain(folder, given.records, given.nbytes),
        "store, O_DIRECT": lambda: stored(folder, given.records, given.nbytes, True),
        "store, buffered, cold": lambda: stored(folder, given.records, given.nbytes, False),
    }
    total, tokens = given.records * given.nbytes, given.records * given.nbytes / TOKEN / 1000
    found: dict[str, list[tuple[Clock, Clock]]] = {name: [] for name in work}
    try:
        for _ in range(given.rounds):
            for name, one in work.items():
                found[name].append(one())
        facts = f"medians of {given.rounds} rounds, load {os.getloadavg()[0]:.1f}"
        print(f"{given.records} records of {given.nbytes} bytes, {facts}; CPU time per 1,000 tokens")
        print(
            " " * 24 + "".join(f"{name:>14}" for name in ("write GB/s", "read GB/s", "write ms", "read ms"))
        )
        for name, rounds in found.items():
            rates = [statistics.median(total / pair[n].wall / 1e9 for pair in rounds) for n in (0, 1)]
            cpus = [statistics.median(1000 * pair[n].cpu / tokens for pair in rounds) for n in (0, 1)]
            print(f"{name:24}" + "".join(f"{number:14.2f}" for number in (*rates, *cpus)))
        seconds, each = index(folder, given.index)
        print(f"index of {given.index} records from footers: {seconds:.3f} s, {each:.0f} bytes a record")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
