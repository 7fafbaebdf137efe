"""The KV disk tier of an engine: a second engine with the same folder loads what the first has computed, and
makes the same bits."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e1.rig import MAX_LEN, VOCAB, make_checkpoint
from tests.e1.test_groups import bits as engine_bits
from tests.support.fleet_engine import FleetEngine
from tests.support.slow import mostly_slow
from tests.support.slowness import deadline
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.config.resolved import EngineConfig
from weft.engine import build
from weft.engine.core import EngineCore
from weft.engine.ranks.ranks import RankProcesses
from weft.engine.tiers import engine_tier
from weft.engine.tiers.rank_tier import RankTier
from weft.scheduler import loads
from weft.scheduler.policy.load_speed import LoadSpeed
from weft.types.messages import Submit
from weft.types.sampling import TokenParams
from weft.types.tiers import CopyBlocks, TierStats

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "deepseek_v3": {"deterministic": True},
    "mistral": {},
    "lfm2": {},
    "nemotron_h": {"deterministic": True},
    "deepseek_v32": {},
    "deepseek_v4": {},
    "glm_dsa": {},
}
"""Shape of ``tests.e1.rig`` -> settings with which the shape is deterministic."""
PROMPTS = [[(5 * i + 3 * j + j * j * i) % VOCAB for j in range(150 + 21 * i)] for i in range(3)]
Bits = dict[int, list[tuple[int, bytes]]]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads count as instant: these models compute as quickly as a busy disk reads. A busy machine misses
    the shortest deadline."""
    monkeypatch.setattr(LoadSpeed, "observe", lambda *_: None)
    monkeypatch.setattr(loads, "SOONEST_S", loads.LATEST_S)


def submits(session: str = "") -> list[Submit]:
    return [
        submit(
            i,
            prompt,
            TokenParams(temperature=0.8 * (i % 2), max_tokens=6 + 3 * i, logprobs=5),
            request=i,
            session=session,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def config_of(folder: Path, shape: str, disk: Path | None, **more: Any) -> EngineConfig:
    """Return the configuration of an engine; with ``disk``, of an engine that stores every block."""
    tier = {} if disk is None else {"kv_disk": "64M", "kv_disk_dir": str(disk), "kv_store": "all"}
    common = {
        "model": str(folder),
        "tokenizer": "spool-text",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_model_len": MAX_LEN,
        "kv_cache_memory": "32M",
        "max_num_seqs": 4,
        "block_size": 16,
        "long_prefill_token_threshold": 48,
    }
    return resolve(from_keywords({**common, **SHAPES[shape], **tier, **more}))


def start(folder: Path, shape: str, disk: Path | None, **more: Any) -> EngineCore:
    """Start an engine, see ``config_of``."""
    return EngineCore(config_of(folder, shape, disk, **more), progress=False)


def bits(core: EngineCore, asked: list[Submit]) -> Bits:
    """Run all of ``asked`` together and return the tokens and logprobs."""
    made: Bits = {one.sequence: [] for one in asked}
    left = set(made)
    for one in asked:
        assert not core.submit(one)
    until = time.monotonic() + deadline(60)
    while left:
        assert time.monotonic() < until
        for event in (*core.poll(), *(core.step() if core.has_work() else ())):
            assert event.error is None
            if event.token_ids:
                assert event.logprobs is not None
                ids, values, _ = event.logprobs.arrays()
                rows = [one.tobytes() + other.tobytes() for one, other in zip(ids, values, strict=True)]
                made[event.sequence] += zip(event.token_ids, rows, strict=True)
            if event.finish is not None:
                left.discard(event.sequence)
        if left and not core.has_work():
            core.sleep(0.05)
    return made


def served(make: Callable[[], EngineCore], asked: list[Submit]) -> tuple[Bits, TierStats]:
    """Start an engine, run ``asked``, and end the engine in order."""
    core = make()
    try:
        found = bits(core, asked)
        stats = core.stats().tier
    finally:
        core.close()
    assert stats is not None
    return found, stats


def expected(folder: Path, shape: str, **more: Any) -> Bits:
    core = start(folder, shape, None, enable_prefix_caching=False, **more)
    try:
        return bits(core, submits())
    finally:
        core.close()


EIGHT_BITS = {"kv_cache_dtype": "fp8"}
RESTARTS = [(shape, {}) for shape in SHAPES]
RESTARTS += [(shape, EIGHT_BITS) for shape in ("deepseek_v32", "deepseek_v4", "glm_dsa")]


@mostly_slow(("shape", "more"), RESTARTS, [("gpt_oss", {})])
@pytest.mark.usefixtures("extension")
def test_a_restart_loads_and_makes_the_same_bits(tmp_path: Path, shape: str, more: dict[str, Any]) -> None:
    folder = make_checkpoint(tmp_path, shape)
    reference = expected(folder, shape, **more)
    disk = tmp_path / "kv"
    first, stats = served(lambda: start(folder, shape, disk, **more), submits())
    assert first == reference
    assert stats.saved_tokens == 0
    again, stats = served(lambda: start(folder, shape, disk, **more), submits())
    assert again == reference
    assert stats.loads == {"done": len(PROMPTS)}
    assert stats.saved_tokens >= 0.8 * sum(map(len, PROMPTS)) - 64 * len(PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize(("writes", "reads"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("shape", ["gpt_oss", "qwen3_next", "deepseek_v3"])
def test_a_group_of_another_size_reads_the_blocks(
    tmp_path: Path, shape: str, writes: int, reads: int
) -> None:
    """Tokens are equal in float64; loads are complete. Latents and heads come from other ranks' records."""
    folder, disk = make_checkpoint(tmp_path, shape), tmp_path / "kv"
    more = {"dtype": "float64", "deterministic": False, "collectives": "gloo"}
    made = []
    for ranks in (writes, reads):
        found, stats = served(
            lambda ranks=ranks: start(folder, shape, disk, tensor_parallel_size=ranks, **more), submits()
        )
        made.append({one: [token for token, _ in pairs] for one, pairs in found.items()})
    assert made[0] == made[1]
    assert stats.loads == {"done": len(PROMPTS)}
    assert stats.saved_tokens > 0


@pytest.mark.slow
def test_speculation_goes_on_with_loaded_blocks(tmp_path: Path) -> None:
    folder, disk = make_checkpoint(tmp_path, "qwen3_next"), tmp_path / "kv"
    more = {"speculative_method": "ngram", "num_speculative_tokens": 3}
    first, _ = served(lambda: start(folder, "qwen3_next", disk, **more), submits())
    again, stats = served(lambda: start(folder, "qwen3_next", disk, **more), submits())
    assert again == first
    assert stats.saved_tokens > 0


@pytest.mark.slow
def test_a_sleep_waits_for_the_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the second sleep. A record of freed memory would have zeros under the name of a prefix."""
    folder, disk = make_checkpoint(tmp_path, "gpt_oss"), tmp_path / "kv"
    reference = expected(folder, "gpt_oss")
    monkeypatch.setattr(engine_tier, "FLUSH_S", 0.0)  # the time for the end of a process
    plain = RankTier._store

    def late(self: RankTier, command: CopyBlocks) -> None:
        time.sleep(0.3)
        plain(self, command)

    monkeypatch.setattr(RankTier, "_store", late)
    core = start(folder, "gpt_oss", disk)
    try:
        for _ in range(2):
            assert bits(core, submits()) == reference
            core.poll()
            assert core.tier is not None
            assert core.tier.copying
            core.weights.free(False, core.poll)
            assert not core.tier.copying
    finally:
        core.close()
    again, stats = served(lambda: start(folder, "gpt_oss", disk), submits())
    assert again == reference
    assert stats.saved_tokens > 0


KILLED = """
import os, sys
from pathlib import Path
from tests.engine.test_tier import bits, start, submits
core = start(Path(sys.argv[1]), "gpt_oss", Path(sys.argv[2]))
print("ready", flush=True)
bits(core, submits())
print("done", flush=True)
core.tier.finish()
print("stored", flush=True)
while True:
    core.poll()
"""


@pytest.mark.slow
def test_a_killed_process_leaves_usable_files(tmp_path: Path) -> None:
    """kill -9 at any time, in stores and in loads: the next engine makes the same bits and finds what was
    complete."""
    folder, disk = make_checkpoint(tmp_path, "gpt_oss"), tmp_path / "kv"
    reference = expected(folder, "gpt_oss")
    for line, seconds in (("ready", 0.1), ("ready", 0.25), ("done", 0.0), ("ready", 0.02), ("stored", 0.0)):
        command = [sys.executable, "-c", KILLED, str(folder), str(disk)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert any(one.strip() == line for one in process.stdout)
            time.sleep(seconds)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        again, stats = served(lambda: start(folder, "gpt_oss", disk, kv_store="sessions"), submits())
        assert again == reference
    assert stats.saved_tokens > 0


@pytest.mark.slow
def test_weights_that_change_while_they_are_loaded_turn_the_tier_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which weights computed the blocks, so no namespace is right."""
    folder, disk = make_checkpoint(tmp_path, "llama"), tmp_path / "kv"
    plain = build.load_weights

    def edited(*args: Any) -> Any:
        model = plain(*args)
        file = next(folder.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.with_suffix(".new").write_bytes(data)
        file.with_suffix(".new").rename(file)
        return model

    monkeypatch.setattr(build, "load_weights", edited)
    _, stats = served(lambda: start(folder, "llama", disk), submits())
    assert stats.off == 1
    assert not list(tmp_path.rglob("*.kv"))


def test_damaged_records_are_computed_again(tmp_path: Path) -> None:
    """A flipped bit in the payload of every record: no token differs, every block is counted and dropped."""
    folder, disk = make_checkpoint(tmp_path, "llama"), tmp_path / "kv"
    first, stats = served(lambda: start(folder, "llama", disk), submits())
    files = list(disk.rglob("*.kv"))
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        for at in range(4096 + 512, len(data), 8192):
            data[at] ^= 0x40
        file.write_bytes(bytes(data))
    again, stats = served(lambda: start(folder, "llama", disk), submits())
    assert again == first
    assert set(stats.loads) <= {"corrupt", "gone"}
    assert sum(stats.loads.values()) <= len(PROMPTS)


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    """Each writes files of its own. A sealed file of one is read by the other without a restart."""
    folder, disk = make_checkpoint(tmp_path, "llama"), tmp_path / "kv"
    one, two = start(folder, "llama", disk), start(folder, "llama", disk)
    try:
        made = bits(one, submits())
        one.close()
        until = time.monotonic() + deadline(20)
        while not two.stats().tier.blocks:  # type: ignore[union-attr]
            assert time.monotonic() < until
            two.poll()
            time.sleep(0.05)
        assert bits(two, submits()) == made
        stats = two.stats().tier
        assert stats is not None
        assert stats.saved_tokens > 0
    finally:
        two.close()


@pytest.mark.slow
def test_prefill_groups_have_tiers(tmp_path: Path) -> None:
    """A pair of groups with the tier on the prefill group: loaded blocks are sent like computed blocks."""
    folder, disk = make_checkpoint(tmp_path, "gpt_oss"), tmp_path / "kv"
    reference = expected(folder, "gpt_oss")
    for restart in (False, True):
        groups = [
            config_of(folder, "gpt_oss", disk if role == "prefill" else None, role=role)
            for role in ("prefill", "decode")
        ]
        engine = FleetEngine(groups)
        try:
            assert engine_bits(engine, submits()) == reference
            engine.settle()
            core = engine.cores("prefill")[0]
            stats = core.stats().tier
            core.tier.finish()
        finally:
            engine.close()
        assert stats is not None
        assert (stats.saved_tokens > 0) == restart


@pytest.mark.slow
def test_decode_groups_store_answers(tmp_path: Path) -> None:
    """The next turn's prompt has the answer: the prefill group loads the blocks that the decode group has
    stored, also of the answer, and the tokens are those without a tier."""
    folder, disk = make_checkpoint(tmp_path, "gpt_oss"), tmp_path / "kv"
    first = submit(0, PROMPTS[0], TokenParams(max_tokens=60, logprobs=1), request=0)
    turns, saved = [first], list[dict[str, int]]()
    for tiers in (("decode",), ("prefill",)):
        groups = [
            config_of(folder, "gpt_oss", disk if role in tiers else None, role=role)
            for role in ("prefill", "decode")
        ]
        engine = FleetEngine(groups)
        try:
            made = engine_bits(engine, [turns[-1]])
            engine.settle()
            (core,) = engine.cores(tiers[0])
            assert core.tier is not None
            core.tier.finish()
            stats = core.stats().tier
        finally:
            engine.close()
        assert stats is not None
        saved.append({"stored": sum(stats.stores.values()), "saved": stats.saved_tokens})
        answer = [token for token, _ in made[turns[-1].sequence]]
        turns.append(submit(1, PROMPTS[0] + answer, TokenParams(max_tokens=6, logprobs=1), request=1))
        if len(turns) == 3:
            core = start(folder, "gpt_oss", None, enable_prefix_caching=False)
            try:
                assert bits(core, [turns[1]]) == made
            finally:
                core.close()
    assert saved[0]["stored"] > 0
    assert saved[1]["saved"] > len(PROMPTS[0])


@pytest.mark.slow
def test_a_killed_rank_ends_no_pin_late(tmp_path: Path) -> None:
    """A rank dies while blocks are stored: its copies count as lost, the group recovers, all pins end."""
    folder, disk = make_checkpoint(tmp_path, "gpt_oss"), tmp_path / "kv"
    more = {"tensor_parallel_size": 2, "dtype": "float64", "collectives": "gloo", "rank_timeout": 4.0}
    core = start(folder, "gpt_oss", disk, **more)
    try:
        first = bits(core, submits())
        processes = core.runner.processes
        assert isinstance(processes, RankProcesses)
        processes.send_signal(1, signal.SIGKILL)
        until = time.monotonic() + deadline(60)
        while not core.stats().recoveries:
            assert time.monotonic() < until
            core.check()
            core.poll()
            if core.has_work():
                core.step()
        again = bits(core, submits())
        assert {one: [token for token, _ in pairs] for one, pairs in again.items()} == {
            one: [token for token, _ in pairs] for one, pairs in first.items()
        }
        core.tier.finish()  # type: ignore[union-attr]
        assert core.stats().tier.pinned == 0  # type: ignore[union-attr]
        assert core.stats().free_blocks == tuple(pool.num_blocks for pool in core.runner.kv.pools)
    finally:
        core.close()
