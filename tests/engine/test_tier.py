"""The KV disk tier of an engine: a second engine with the same folder loads what the first has computed, and
makes the same bits."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e0.rig import submit
from tests.e1.rig import MAX_LEN, VOCAB, make_checkpoint
from tests.support.slow import mostly_slow
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.types.messages import Submit
from weft.types.sampling import TokenParams
from weft.types.tiers import TierStats

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
}
"""Shape of ``tests.e1.rig`` -> settings with which the shape is deterministic."""
PROMPTS = [[(5 * i + 3 * j + j * j * i) % VOCAB for j in range(150 + 21 * i)] for i in range(3)]
Bits = dict[int, list[tuple[int, bytes]]]


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


def start(folder: Path, shape: str, disk: Path | None, **more: Any) -> EngineCore:
    """Start an engine; with ``disk``, an engine that stores every block."""
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
    return EngineCore(resolve(from_keywords({**common, **SHAPES[shape], **tier, **more})), progress=False)


def bits(core: EngineCore, asked: list[Submit]) -> Bits:
    """Run all of ``asked`` together and return the tokens and logprobs."""
    made: Bits = {one.sequence: [] for one in asked}
    left = set(made)
    for one in asked:
        assert not core.submit(one)
    until = time.monotonic() + 60
    while left:
        assert time.monotonic() < until
        for event in (*core.hear(), *(core.step() if core.has_work() else ())):
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


def expected(folder: Path, shape: str) -> Bits:
    core = start(folder, shape, None, enable_prefix_caching=False)
    try:
        return bits(core, submits())
    finally:
        core.close()


@mostly_slow("shape", list(SHAPES), ["gpt_oss", "qwen3_next", "deepseek_v3"])
@pytest.mark.usefixtures("extension")
def test_a_restart_loads_and_makes_the_same_bits(tmp_path: Path, shape: str) -> None:
    folder = make_checkpoint(tmp_path, shape)
    reference = expected(folder, shape)
    disk = tmp_path / "kv"
    first, stats = served(lambda: start(folder, shape, disk), submits())
    assert first == reference
    assert stats.saved_tokens == 0
    again, stats = served(lambda: start(folder, shape, disk), submits())
    assert again == reference
    assert stats.loads == {"done": len(PROMPTS)}
    assert stats.saved_tokens >= 0.8 * sum(map(len, PROMPTS)) - 64 * len(PROMPTS)
