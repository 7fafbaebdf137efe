"""New weights of an ``LLM`` with a KV tier: no block of one version serves another, here and later."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.new_weights import Tensors, changed, read_tensors, write_checkpoint
from tests.support.slowness import deadline
from weft import LLM, SamplingParams
from weft.config.hub import bundled_models
from weft.engine.core import EngineCore
from weft.engine.tiers import engine_tier
from weft.scheduler import loads
from weft.scheduler.policy.load_speed import LoadSpeed

BASE = Path(bundled_models()["spool-text"])
PROMPT = {"prompt_token_ids": [(7 * i + i * i) % 200 + 4 for i in range(90)]}
GREEDY = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "kv_cache_memory": "8M",
    "block_size": 16,
    "max_model_len": 256,
    "max_num_seqs": 2,
    "device": "cpu",
    "seed": 1,
    "kv_store": "all",
}
Made = tuple[list[int], list[str]]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let loads count as instant."""
    monkeypatch.setattr(LoadSpeed, "observe", lambda *_: None)
    monkeypatch.setattr(loads, "SOONEST_S", loads.LATEST_S)


def levels(name: str, folder: Path) -> dict[str, Any]:
    if name == "disk":
        return {"kv_disk": "64M", "kv_disk_dir": str(folder)}
    return {"kv_remote": f"file://{folder}"}


def start(settings: dict[str, Any], model: str = "spool-text") -> LLM:
    return LLM(model, **SETTINGS | settings)


def asked(llm: LLM, again: bool = False) -> tuple[Made, int]:
    """Return (tokens and logprobs, blocks loaded from the tier), with an empty pool; ``again``: with a warm
    pool."""
    if not again:
        stored(llm)
        llm.reset_prefix_cache()
    before = loaded(llm)
    one = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
    return (list(one.token_ids), [str(each) for each in one.logprobs]), loaded(llm) - before


def loaded(llm: LLM) -> int:
    tier = llm.stats().tier
    assert tier is not None
    return sum(one.loaded for one in tier.levels.values())


def known(llm: LLM) -> None:
    """Wait until the engine knows the blocks of another process. An object store is read every second."""
    core = llm._core
    assert isinstance(core, EngineCore)
    until = time.monotonic() + deadline(30)
    while not core.stats().tier.blocks:  # type: ignore[union-attr]
        assert time.monotonic() < until
        core.poll()
        assert core.tier is not None
        core.tier.take(core.scheduler)
        time.sleep(0.02)


def stored(llm: LLM) -> None:
    """Wait until the blocks of ended sequences are in the store."""
    core = llm._core
    assert isinstance(core, EngineCore)
    assert isinstance(core.tier, engine_tier.EngineTier)
    core.tier.finish()
    core.tier._until = None


def plain(model: str) -> Made:
    """Return the result of an engine without a tier."""
    with LLM(model, **SETTINGS | {"kv_store": "reused"}) as llm:
        one = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
        return list(one.token_ids), [str(each) for each in one.logprobs]


@pytest.mark.slow
@pytest.mark.parametrize("level", ["disk", "remote"])
def test_each_version_finds_its_own_blocks(level: str, tmp_path: Path) -> None:
    """Cold, warm, after an update, on the way back, after a restart, and after a restart with an update."""
    settings = levels(level, tmp_path / "kv")
    new = changed(read_tensors(BASE), 1)
    folder = write_checkpoint(tmp_path / "new", BASE, new)
    with start(settings) as llm:
        old, blocks = asked(llm)
        assert blocks == 0
        found, blocks = asked(llm)
        assert found == old
        assert blocks > 0
        llm.update_weights(folder)
        after, blocks = asked(llm)
        assert after != old
        assert blocks == 0
        found, blocks = asked(llm)
        assert found == after
        assert blocks > 0
        llm.update_weights(BASE)
        found, blocks = asked(llm)
        assert found == old
        assert blocks > 0
    with start(settings) as llm:
        known(llm)
        found, blocks = asked(llm)
        assert found == old
        assert blocks > 0
        llm.update_weights(folder)  # version 1 of this process has the content of version 1 before
        found, blocks = asked(llm)
        assert found == after
        assert blocks > 0
        llm.update_weights(changed(new, 2).items())
        other, blocks = asked(llm)
        assert other not in (old, after)
        assert blocks == 0
    assert plain("spool-text") == old
    assert plain(str(folder)) == after


@pytest.mark.slow
def test_numbers_of_versions_repeat_and_contents_do_not(tmp_path: Path) -> None:
    """Version 1 of one process, version 1 of the next, and parts of tensors on two bases."""
    settings = levels("disk", tmp_path / "kv")
    old = read_tensors(BASE)
    layer: Tensors = {k: v for k, v in changed(old, 2).items() if ".layers.1.self_attn." in k}
    made = list[Made]()
    for tensors, partial in ((changed(old, 1), False), (changed(old, 3), False), (layer, True), (old, False)):
        with start(settings) as llm:
            llm.update_weights(tensors.items(), partial=partial)
            found, blocks = asked(llm)
            assert blocks == 0
            if not partial:
                llm.update_weights(layer.items(), partial=True)
                mixed, blocks = asked(llm)
                assert mixed != found
                assert blocks == 0
            made.append(found)
    assert len({str(one) for one in made}) == len(made)
    with start(settings) as llm:  # the same history again: every block is there
        llm.update_weights(layer.items(), partial=True)
        found, blocks = asked(llm)
        assert found == made[2]
        assert blocks > 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"tensor_parallel_size": 2}, {"quantization": "int8"}], ids=str)
def test_ranks_and_layouts(more: dict[str, Any], tmp_path: Path) -> None:
    settings = levels("disk", tmp_path / "kv") | more
    folder = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    with start(settings) as llm:
        old, _ = asked(llm)
        llm.update_weights(folder)
        after, blocks = asked(llm)
        assert (after != old, blocks) == (True, 0)
        found, blocks = asked(llm)
        assert (found, blocks > 0) == (after, True)
    with start(settings) as llm:
        found, blocks = asked(llm)
        assert (found, blocks > 0) == (old, True)


@pytest.mark.slow
def test_a_sleep_of_level_2_keeps_the_blocks_of_the_disk(tmp_path: Path) -> None:
    with start(levels("disk", tmp_path / "kv")) as llm:
        old, _ = asked(llm)
        stored(llm)
        llm.sleep(level=2)
        llm.wake_up()
        found, blocks = asked(llm)
        assert found == old
        assert blocks > 0
