"""Stores of small segments, and records with known bytes."""

from __future__ import annotations

import time
from hashlib import blake2b
from pathlib import Path

import numpy as np

from weft.store.disk import Disk
from weft.store.record_store import RecordStore
from weft.store.records import Owner, RecordBuffer, RecordId
from weft.store.segments import SegmentStore, StoreSettings

NAMESPACE = "0123456789abcdef" * 2
NOBODY = Owner()
MIB = 1 << 20


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.seconds = time.time()  # as the times of files

    def __call__(self) -> float:
        return self.seconds


class Unsynced(Disk):
    """A disk that does not wait: for tests of many small files."""

    def __init__(self) -> None:
        super().__init__(direct=False)

    def sync(self, fd: int) -> None:
        return


def record(number: int, kind: int = 0, part: int = 0, parts: int = 1) -> RecordId:
    return RecordId(kind, blake2b(number.to_bytes(8, "little"), digest_size=16).digest(), part, parts)


def payload(name: RecordId, nbytes: int) -> np.ndarray:
    """Return bytes that depend on the name alone, uint8 [nbytes]."""
    seed = int.from_bytes(name.key[:8], "little") + name.part
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def open_store(
    folder: Path, *, budget: int = 16 * MIB, clock: Clock | None = None, disk: Disk | None = None, **settings
) -> SegmentStore:
    settings = {"namespace": NAMESPACE, "segment_bytes": MIB} | settings
    made = StoreSettings(folder=folder, budget=budget, **settings)
    return SegmentStore(made, disk=disk, **({"now": clock} if clock else {}))


def put(store: RecordStore, name: RecordId, nbytes: int = 10_000, owner: Owner = NOBODY) -> str:
    buffer = RecordBuffer(nbytes)
    buffer.payload[:] = payload(name, nbytes)
    return store.write(name, buffer, nbytes, owner)


def get(store: RecordStore, name: RecordId, nbytes: int = 10_000) -> bool:
    """Read a record. Return True if the bytes are the written bytes. Raises RecordError."""
    buffer = RecordBuffer(nbytes)
    assert store.read(name, buffer) == nbytes
    return np.array_equal(buffer.payload, payload(name, nbytes))


def files(folder: Path, namespace: str = NAMESPACE) -> list[Path]:
    return sorted((folder / namespace).glob("*.kv"))
