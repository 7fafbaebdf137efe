"""Copies and digests release Python's lock, and are equal without the extension."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from tests.support.slowness import deadline
from weft.common.errors import EngineDead
from weft.disagg.transport.copying import copy_spans, digest_spans, gather_spans
from weft.disagg.transport.shm import ShmTransport
from weft.ops import cpu


@pytest.mark.requirement("E9")
def test_other_threads_run_during_a_long_copy() -> None:
    if not cpu.load():
        pytest.skip("needs the C++ operations (weft build-ops)")
    size = 256 << 20
    source, target = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    source.fill_(3)
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        copy_spans(source, target, np.array([[0, 0, size]]), np.zeros(1, np.uint64))
        digest_spans(source, np.array([[0, size]]), np.zeros(1, np.uint64))
        ended.set()

    thread = threading.Thread(target=work)
    thread.start()
    assert began.wait(deadline(10))
    turns = 0
    while not ended.is_set():
        time.sleep(0.0005)
        turns += 1
    thread.join(deadline(10))
    assert turns > 10  # two when the copy and the digest each keep the lock
    assert target[-1] == 3


def test_numpy_copies_and_digests_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    source = torch.from_numpy(rng.integers(0, 256, 9000, dtype=np.uint8))
    spans = np.array([[0, 100, 5000], [6000, 5200, 1], [7000, 6000, 1999]], np.int64)
    seeds = rng.integers(0, 1 << 62, 3).astype(np.uint64)
    made = []
    for extension in (True, False):
        monkeypatch.setattr(cpu, "load", lambda extension=extension: extension and torch_has_it())
        target = torch.zeros(9000, dtype=torch.uint8)
        digests = copy_spans(source, target, spans, seeds)
        assert (digests == digest_spans(target, spans[:, 1:].copy(), seeds)).all()
        made.append((digests.tolist(), target.tolist()))
        with pytest.raises(IndexError):
            copy_spans(source, target, np.array([[0, 8999, 2]]), seeds[:1])
    assert made[0] == made[1]


@pytest.mark.parametrize("seed", range(20))
def test_gathered_bytes_are_the_copied_bytes(seed: int) -> None:
    """Random spans, some of them neighbours in one memory or in both, in any order; overlapping sources."""
    rng = np.random.default_rng(seed)
    source = torch.from_numpy(rng.integers(0, 256, 4000, dtype=np.uint8))
    lengths = rng.integers(1, 40, rng.integers(0, 60))
    begins = np.cumsum(lengths) - lengths
    sources = np.where(rng.random(len(lengths)) < 0.7, begins + 50, rng.integers(0, 3960, len(lengths)))
    targets = begins + np.cumsum(rng.random(len(lengths)) < 0.3)
    spans = np.stack([sources, targets, lengths], axis=1).astype(np.int64)
    if seed % 2:
        rng.shuffle(spans)
    made, expected = torch.zeros(3000, dtype=torch.uint8), torch.zeros(3000, dtype=torch.uint8)
    gather_spans(source, made, spans)
    copy_spans(source, expected, spans, np.zeros(len(spans), np.uint64))
    assert torch.equal(made, expected)
    for wrong in ([3990, 0, 20], [0, 2990, 20], [-1, 0, 2], [0, 0, -1], [0, 0, 1 << 62]):
        before = made.clone()
        with pytest.raises(IndexError):
            gather_spans(source, made, np.concatenate([spans, [wrong]]))
        assert torch.equal(made, before)


def torch_has_it() -> bool:
    return hasattr(torch.ops.weft_cpu, "copy_spans")


def test_more_regions_than_a_message_carries_are_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    transport = ShmTransport(str(tmp_path_factory.mktemp("t")), 0, 1)
    with pytest.raises(EngineDead, match="at most"):
        transport.share([None] * 254)  # type: ignore[list-item]
    transport.close()
