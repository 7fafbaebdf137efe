"""The KV tier under a GPU: blocks go to host memory and to a disk, and come back with the same tokens.

The same checks run on a simulated GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e0.rig import submit
from tests.rehearsal.device import COMPUTE
from tests.rehearsal.rig import Answers, rehearsed
from tests.support.checkpoints import VOCAB, make_checkpoint
from weft.cli.verify.verify_run import generate
from weft.config.flags import from_keywords
from weft.config.resolve import resolve
from weft.engine.core import EngineCore
from weft.engine.tiers import open_tier
from weft.engine.tiers.engine_tier import EngineTier
from weft.engine.tiers.rank_tier import RankTier
from weft.scheduler.policy.load_speed import LoadSpeed
from weft.types.messages import Submit
from weft.types.sampling import TokenParams
from weft.types.tiers import TierStats

PROMPTS = [[1 + (7 * i + 3 * j + i * j * j) % (VOCAB - 1) for j in range(70)] for i in range(4)]


def submits(first: int) -> list[Submit]:
    params = TokenParams(temperature=0.0, max_tokens=4)
    return [submit(first + i, prompt, params, request=first + i) for i, prompt in enumerate(PROMPTS)]


def run(
    folder: Path, rounds: int, begin: Callable[[EngineCore], None] = lambda core: None, **more: Any
) -> tuple[list[list[int]], TierStats | None]:
    """Return the tokens of all prompts, asked ``rounds`` times one after the other, and the counters of the
    tier. The prefix cache is emptied between two rounds. ``begin``: called before the first request."""
    settings = {
        "model": str(folder),
        "device": "cuda",
        "dtype": "float64",
        "block_size": 16,
        "max_model_len": 96,
        "max_num_seqs": 1,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": "16M",
        "decode_graphs": False,
        **more,
    }
    core = EngineCore(resolve(from_keywords(settings)), progress=False)
    try:
        begin(core)
        tokens = list[list[int]]()
        for number in range(rounds):
            for one in submits(number * len(PROMPTS)):
                tokens += generate(core, [one]).values()
            until = time.monotonic() + 60
            while core.tier is not None and core.tier.loads.moving:  # until all blocks are stored
                assert time.monotonic() < until
                core.poll()
            core.scheduler.forget_prefixes()
        stats = core.stats().tier
    finally:
        core.close()
    return tokens, stats


def check(run: Callable[..., tuple[list[list[int]], TierStats | None]], alone: Any, disk: Path) -> None:
    """Check the tokens and the counters of a host level, and of a disk behind a host level."""
    host = {"kv_host": "16M", "kv_store": "all"}
    tokens, stats = run(2, **host)
    assert tokens == 2 * alone
    assert stats is not None
    assert stats.saved_tokens >= 48 * len(PROMPTS)
    assert stats.blocks
    both = {**host, "kv_disk": "64M", "kv_disk_dir": str(disk)}
    assert run(1, **both)[0] == alone
    tokens, stats = run(1, **both)
    assert tokens == alone
    assert stats is not None
    assert stats.saved_tokens >= 48 * len(PROMPTS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadSpeed, "observe", lambda *_: None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["llama", "qwen2_windowed", "qwen3_next", "deepseek_v3"])
def test_blocks_come_back_to_a_gpu(tmp_path: Path, model: str) -> None:
    folder = make_checkpoint(tmp_path / "model", model)
    check(partial(run, folder), run(folder, 1)[0], tmp_path / "kv")


def without_threads(patch: pytest.MonkeyPatch) -> list[RankTier]:
    """Replace the threads of tiers by one turn before each look at the reports. Return the list of tiers."""
    tiers = list[RankTier]()
    take = EngineTier.take

    def make(*given: Any, **more: Any) -> RankTier:
        tier = RankTier(*given, start=False, **more)
        tier.stores = tier._open()
        tier._opened.set()
        tiers.append(tier)
        return tier

    def turned(self: EngineTier, scheduler: object) -> Any:
        tiers[-1].turn(0.0)
        return take(self, scheduler)

    patch.setattr(open_tier, "RankTier", make)
    patch.setattr(open_tier, "numerics", lambda device, attention: {"gpu": "simulated"})
    patch.setattr(EngineTier, "take", turned)
    return tiers


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
def test_blocks_come_back_to_a_simulated_gpu(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(tmp_path / "model", model)
    alone, _ = run(folder, 1, device="cpu")
    with rehearsed(monkeypatch, values=True) as made:
        tiers = without_threads(monkeypatch)

        def rehearsal(rounds: int, **more: Any) -> tuple[list[list[int]], TierStats | None]:
            with monkeypatch.context() as patch:

                def begin(core: EngineCore) -> None:
                    Answers(made, patch, core.config.spec.vocab_size)

                found = run(folder, rounds, begin, **more)
            tier = tiers[-1]
            for store in tier.stores:
                store.close()
            tier._copies.close()
            return found

        check(rehearsal, alone, tmp_path / "kv")
        # The trace sees a pool as one piece of memory, although computed blocks and copied blocks differ.
        pools = {made.memory.piece(one, COMPUTE).name for tier in tiers for one in tier._copies._regions}
        made.checker.races[:] = [race for race in made.checker.races if not any(n in race for n in pools)]
    assert not made.memory.registered, "memory is still pinned"
