"""Engines that share an object store: tokens, faults of the store, and blocks of a disk that is lost."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_tier import PROMPTS, bits, config_of, expected, make_checkpoint, served, submits
from tests.support.s3_server import S3Server, s3_server
from tests.support.slowness import deadline
from weft.engine.core import EngineCore
from weft.scheduler.policy.load_speed import LoadSpeed
from weft.types.tiers import TierStats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("obstore") is None, reason='needs obstore: pip install "weft[s3]"'
    ),
    pytest.mark.usefixtures("extension"),
]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr(LoadSpeed, "observe", lambda *_: None)
    with s3_server(monkeypatch) as made:
        yield made


def start(folder: Path, shape: str, **more: Any) -> EngineCore:
    given = {"kv_remote": "s3://bucket/kv", "kv_store": "all", **more}
    return EngineCore(config_of(folder, shape, None, **given), progress=False)


def run_known(core: EngineCore, reference: Any) -> TierStats:
    """Run the prompts once blocks of the object store are known, compare with ``reference``, and close the
    engine. Return the statistics."""
    try:
        until_known(core)
        assert bits(core, submits()) == reference
        stats = core.stats().tier
    finally:
        core.close()
    assert stats is not None
    return stats


def until_known(core: EngineCore, level: str = "remote") -> None:
    """Wait until the engine knows blocks of a level."""
    end = time.monotonic() + deadline(30)
    while not core.stats().tier.levels.get(level) or not core.stats().tier.levels[level].blocks:  # type: ignore[union-attr]
        assert time.monotonic() < end
        core.poll()
        time.sleep(0.02)


@pytest.mark.parametrize("shape", ["gpt_oss", "qwen3_next", "deepseek_v4"])
def test_another_host_loads_the_blocks(tmp_path: Path, server: S3Server, shape: str) -> None:
    folder = make_checkpoint(tmp_path, shape)
    reference = expected(folder, shape)
    first, _ = served(lambda: start(folder, shape), submits())
    assert first == reference
    assert server.objects
    stats = run_known(start(folder, shape), reference)
    assert stats.loads == {"done": len(PROMPTS)}
    assert stats.levels["remote"].loaded > 0
    assert stats.levels.keys() == {"remote"}


@pytest.mark.parametrize("fault", ["stalls", "broken", "dead"])
def test_a_store_that_dies_costs_a_miss(tmp_path: Path, server: S3Server, fault: str) -> None:
    """The store dies before the load, which is under its deadline: the prompts are computed."""
    folder = make_checkpoint(tmp_path, "llama")
    first, _ = served(lambda: start(folder, "llama"), submits())
    core = start(folder, "llama")
    try:
        until_known(core)
        if fault == "stalls":
            server.stalls.set()
        else:
            setattr(server, fault, True)
        assert bits(core, submits()) == first
        stats = core.stats().tier
        server.stalls.clear()
        assert stats is not None
        assert stats.saved_tokens == 0
        assert not set(stats.loads) - {"gone", "late", "lost"}
    finally:
        core.close()


def test_damaged_objects_are_computed_again(tmp_path: Path, server: S3Server) -> None:
    folder = make_checkpoint(tmp_path, "llama")
    first, _ = served(lambda: start(folder, "llama"), submits())
    for name, data in server.objects.items():
        damaged = bytearray(data)
        for at in range(8192, len(data) - 16384, 4096):
            damaged[at + 100] ^= 0x80
        server.objects[name] = bytes(damaged)
    stats = run_known(start(folder, "llama"), first)
    assert set(stats.loads) <= {"corrupt", "gone"}
    assert stats.levels["remote"].corrupt > 0


def test_a_disk_and_a_store(tmp_path: Path, server: S3Server) -> None:
    """Blocks are on both. The disk is used first; without the disk, the store has the blocks."""
    folder = make_checkpoint(tmp_path, "gpt_oss")
    disks = [{"kv_disk": "64M", "kv_disk_dir": str(tmp_path / name)} for name in ("one", "two")]
    first, stats = served(lambda: start(folder, "gpt_oss", **disks[0]), submits())
    assert stats.levels["disk"].stores == stats.levels["remote"].stores
    for disk, level in zip(disks, ("disk", "remote"), strict=True):
        stats = run_known(start(folder, "gpt_oss", **disk), first)
        assert {name for name, one in stats.levels.items() if one.loaded} == {level}
