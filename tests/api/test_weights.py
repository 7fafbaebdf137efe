"""``LLM.update_weights``: the same tokens as a fresh start, nothing after a refusal."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.new_weights import Tensors, changed, read_tensors, write_checkpoint
from tests.support.slowness import deadline
from weft import LLM, SamplingParams
from weft.common.errors import ConfigError, InvalidRequest
from weft.config.hub import bundled_models
from weft.engine.core import EngineCore
from weft.models.weight_source import write_shared
from weft.store.new_weights import SHARED, check_source
from weft.types.weights import StageWeights, UseWeights, WeightsUpdate

BASE = Path(bundled_models()["spool-text"])
SETTINGS: dict[str, Any] = {
    "kv_cache_memory": "16M",
    "block_size": 8,
    "max_model_len": 128,
    "max_num_seqs": 4,
    "device": "cpu",
    "seed": 1,
}
PROMPTS = ["Question: Tom has 12 apples and buys 7 more.\nAnswer:", "Ann has 3 boxes with 8 pens each."]
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)

Output = list[tuple[list[int], list[float]]]


def outputs(llm: LLM) -> Output:
    """Return ids and logprobs of each prompt."""
    made = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    return [
        (list(one.token_ids), [each[t].logprob for t, each in zip(one.token_ids, one.logprobs, strict=True)])
        for one in made
    ]


def fresh(folder: Path, settings: dict[str, Any]) -> Output:
    with LLM(str(folder), **settings) as llm:
        return outputs(llm)


def shared_files() -> set[str]:
    return {one.name for one in SHARED.glob(f"weft-{os.getpid()}-*")}


FORMS: list[dict[str, Any]] = [
    {"dtype": "bfloat16"},
    {"dtype": "float64"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "w4a8"},
    {"dtype": "bfloat16", "tensor_parallel_size": 2},
    {"dtype": "bfloat16", "tensor_parallel_size": 2, "quantization": "int8"},
    {"dtype": "bfloat16", "model_impl": "transformers"},
    {"dtype": "bfloat16", "model_impl": "transformers", "tensor_parallel_size": 2, "quantization": "int8"},
]


def test_an_update_and_the_way_back() -> None:
    """A warm prefix of the old weights is not used. The first weights give the first tokens again."""
    short = SamplingParams(temperature=0, max_tokens=4, logprobs=0, ignore_eos=True)
    with LLM("spool-text", **SETTINGS, dtype="bfloat16") as llm:

        def one() -> Any:
            made = llm.generate(PROMPTS[:1], short, use_tqdm=False)[0].outputs[0]
            return list(made.token_ids), [str(each) for each in made.logprobs]

        before = one()
        llm.update_weights(changed(read_tensors(BASE), 1).items(), version="step-1")
        assert llm.stats().prefix_hits == 0
        assert one() != before
        assert llm.stats().prefix_hits == 0
        assert llm.update_weights(BASE) == llm.weight_version == "2"
        assert one() == before


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_update_equals_a_fresh_start(form: dict[str, Any], tmp_path: Path) -> None:
    """A warm prefix of the old weights is not used. A part of the tensors may change."""
    settings = SETTINGS | form
    old = read_tensors(BASE)
    new = changed(old, 1)
    layer = {name: tensor for name, tensor in changed(old, 2).items() if ".layers.1.self_attn." in name}
    files = shared_files()
    with LLM("spool-text", **settings) as llm:
        before = outputs(llm)
        assert outputs(llm) == before  # warm
        hits = llm.stats().prefix_hits
        assert hits > 0
        assert llm.weight_version == "default"
        assert llm.update_weights(new.items(), version="step-1") == "step-1"
        after = outputs(llm)
        assert llm.stats().prefix_hits == hits
        assert outputs(llm) == after
        assert after != before
        assert llm.update_weights(layer.items(), partial=True) == llm.weight_version == "2"
        mixed = outputs(llm)
        llm.update_weights(BASE)
        assert outputs(llm) == before
    assert shared_files() == files
    assert fresh(write_checkpoint(tmp_path / "new", BASE, new), settings) == after
    assert fresh(write_checkpoint(tmp_path / "mixed", BASE, new | layer), settings) == mixed


def test_unsuitable_weights_change_nothing() -> None:
    old = read_tensors(BASE)
    norm = "model.norm.weight"
    query = next(name for name in old if name.endswith("layers.0.self_attn.q_proj.weight"))
    nan = old[norm].clone()
    nan[3] = float("nan")
    refused: list[tuple[Tensors, bool, str]] = [
        ({name: tensor for name, tensor in old.items() if name != norm}, False, f"missing: {norm}"),
        (old | {"model.other": old[norm]}, False, "unexpected: model.other"),
        (old | {norm: old[norm][:5]}, False, f"{norm} has shape"),
        (old | {norm: nan}, False, "not finite at norm.weight"),
        ({query: old[query]}, True, "missing: .*k_proj"),
        (old | {norm: old[norm].to(torch.int64)}, False, f"{norm} has type"),
    ]
    files = shared_files()
    with LLM("spool-text", **SETTINGS, dtype="bfloat16") as llm:
        before = outputs(llm)
        for tensors, partial, why in refused:
            with pytest.raises((InvalidRequest, ConfigError), match=why):
                llm.update_weights(tensors.items(), partial=partial)
        assert llm.weight_version == "default"
        assert outputs(llm) == before
    assert shared_files() == files


def test_other_bytes_than_written_are_found(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(100.0), "b": torch.ones(3, 5, dtype=torch.bfloat16)}
    path = tmp_path / write_shared("weft-x.safetensors", tensors.items(), tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    digest = check_source([str(path)])
    read = read_tensors(tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    data = bytearray(path.read_bytes())
    data[-70] ^= 1
    path.write_bytes(data)
    with pytest.raises(InvalidRequest, match="tensor a has other bytes"):
        check_source([str(path)])
    path.write_bytes(data[:100])
    with pytest.raises(InvalidRequest, match="can't be read"):
        check_source([str(path)])
    assert digest == check_source([str(tmp_path / write_shared(path.name, tensors.items(), tmp_path))])


@pytest.mark.slow
def test_scoring_equals_rollouts_over_20_updates() -> None:
    """The logprobs of sampled tokens equal those of a later prefill bit for bit, after each update."""
    old = read_tensors(BASE)
    sampled = SamplingParams(temperature=1, max_tokens=16, logprobs=0, ignore_eos=True)
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    compared = 0
    with LLM("spool-text", **SETTINGS, dtype="bfloat16") as llm:
        for step in range(20):
            llm.update_weights(changed(old, step, 0.1).items())
            made = llm.generate(PROMPTS, sampled, use_tqdm=False)
            full = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in made]
            scores = llm.generate([{"prompt_token_ids": ids} for ids in full], scored, use_tqdm=False)
            for one, score in zip(made, scores, strict=True):
                tokens = one.outputs[0].token_ids
                theirs = score.prompt_logprobs[-len(tokens) :]
                for token, ours, other in zip(tokens, one.outputs[0].logprobs, theirs, strict=True):
                    assert ours[token].logprob == other[token].logprob
                    compared += 1
    assert compared == 20 * 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_sleep_keeps_the_tokens(form: dict[str, Any]) -> None:
    """Sleeps of level 2: before any update, and after updates of some tensors, of all, and of some again."""
    old = read_tensors(BASE)
    layer = {name: tensor for name, tensor in changed(old, 2).items() if ".layers.1.self_attn." in name}
    with LLM("spool-text", **SETTINGS | form) as llm:
        for tensors in (None, layer, changed(old, 1), layer):
            if tensors is not None:
                llm.update_weights(tensors.items(), partial=tensors is layer)
            before, label = outputs(llm), llm.weight_version
            llm.sleep(level=2)
            llm.wake_up()
            assert outputs(llm) == before
            assert llm.weight_version == label


def test_a_sleep() -> None:
    """Level 1 keeps the weights. After level 2 the first complete update gives the weights."""
    old = read_tensors(BASE)
    short = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with LLM("spool-text", **SETTINGS, dtype="bfloat16") as llm:

        def one() -> list[int]:
            return list(llm.generate(PROMPTS[:1], short, use_tqdm=False)[0].outputs[0].token_ids)

        before = one()
        llm.sleep()
        with pytest.raises(InvalidRequest, match="call wake_up first"):
            one()
        llm.wake_up()
        assert one() == before
        llm.sleep(level=2)
        with pytest.raises(InvalidRequest, match="the weights are empty"):
            llm.update_weights(old.items(), partial=True)
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        llm.update_weights(old.items(), version="again")
        llm.wake_up(["kv_cache"])
        assert one() == before
        assert (llm.weight_version, llm.stats().prefix_hits) == ("again", 0)


@pytest.mark.slow
def test_a_rank_lost_during_the_copies_comes_back_with_the_new_weights(tmp_path: Path) -> None:
    """The engine's rank has copied; the other rank dies without a word. The decision stands."""
    settings = SETTINGS | {"dtype": "bfloat16", "tensor_parallel_size": 2}
    new = changed(read_tensors(BASE), 1)
    folder = write_checkpoint(tmp_path / "new", BASE, new)
    due = fresh(folder, settings)
    with LLM("spool-text", **settings) as llm:
        assert outputs(llm) != due
        core = llm._core
        assert isinstance(core, EngineCore)
        files = (str(folder / "model.safetensors"),)
        core.weights.begin(StageWeights(update=WeightsUpdate(version=1, files=files)))
        until = time.monotonic() + deadline(60)
        while not (answers := core.weights.finished()):
            assert time.monotonic() < until
            core.check()  # the report of the other rank
            core.poll()
        assert answers[0].staged == 1
        _kill(core)
        core.weights.begin(UseWeights(version=1))
        core.weights.take(core.scheduler)
        answers = core.weights.finished()
        assert (answers[0].version, answers[0].error) == (1, None)
        assert outputs(llm) == due
        assert llm.stats().recoveries == 1


@pytest.mark.slow
def test_a_lost_rank_comes_back_with_the_weights_in_use(tmp_path: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "tensor_parallel_size": 2}
    new = changed(read_tensors(BASE), 1)
    due = fresh(write_checkpoint(tmp_path / "new", BASE, new), settings)
    with LLM("spool-text", **settings) as llm:
        before = outputs(llm)
        core = llm._core
        assert isinstance(core, EngineCore)
        files = (str(SHARED / write_shared("weft-lost.safetensors", new.items())),)
        core.weights.begin(StageWeights(update=WeightsUpdate(version=1, files=files)))
        _kill(core)
        until = time.monotonic() + deadline(60)
        while not (answers := core.weights.finished()):
            assert time.monotonic() < until
            core.check()
            core.poll()
            core.step()
        (SHARED / "weft-lost.safetensors").unlink()
        assert answers[0].error is not None
        assert answers[0].version == 0
        assert outputs(llm) == before
        llm.update_weights(new.items())
        assert outputs(llm) == due
        _kill(core)
        assert outputs(llm) == due
        assert llm.stats().recoveries == 2


def _kill(core: EngineCore) -> None:
    """Kill the worker process of a group of two ranks."""
    processes = core.runner.processes
    assert processes is not None
    os.kill(processes.pid(1), signal.SIGKILL)
