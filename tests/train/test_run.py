"""Training by GRPO: rollouts and trainer have the same bits at every step, also after a restart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from training.grpo import start
from weft import LLM, SamplingParams
from weft.cli.main import cli
from weft.common.errors import ConfigError
from weft.train.policy import Policy, Scored
from weft.train.run import Run, Settings, train

SETTINGS = Settings(steps=3, prompts=3, group=4, lr=1e-3, max_tokens=40, save_every=2)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder of spool-text with noise: some answers are right."""
    folder = tmp_path_factory.mktemp("train") / "weak"
    start(folder, 0.5, seed=0)
    return str(folder)


def engine(folder: str, **settings: Any) -> LLM:
    return LLM(folder, threads=1, max_num_seqs=8, max_model_len=512, log_level="warning", **settings)


def changed(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.tensors()}


def test_rollouts_and_trainer_have_the_same_bits_at_every_step(weak: str, tmp_path: Path) -> None:
    # Small steps of the engine: prompts in chunks, and answers that share prefixes.
    with engine(weak, max_num_batched_tokens=48, block_size=16) as llm:
        run = Run(llm, SETTINGS, tmp_path)
        before = changed(run.policy)
        lines = list(run.steps())
        stats = llm.stats()
        after = changed(run.policy)
        assert stats.prefix_hits > 0
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["kl"] == 0.0
        assert line["unequal"] == 0
        assert line["largest_difference"] == 0.0
        assert line["clipped"] == 0
        assert line["compared"] == line["tokens"] > 100
    assert any(line["grad_norm"] > 0 for line in lines[:2])
    assert any(not torch.equal(before[name], after[name]) for name in before)
    logged = (tmp_path / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in logged] == lines


@pytest.mark.slow
def test_a_run_goes_on_after_its_last_checkpoint(weak: str, tmp_path: Path) -> None:
    given = {"steps": 3, "prompts": 3, "group": 4, "lr": 1e-3, "max-tokens": 40, "save-every": 2, "seed": 5}
    given |= {"threads": 1, "max-num-seqs": 8, "max-model-len": 512, "out": tmp_path / "run"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    assert cli.main(["train", "grpo", weak, *words], standalone_mode=False) == 0
    log = tmp_path / "run" / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]

    # Without the last checkpoint, the run computes step 3 again, with the same bits.
    (tmp_path / "run" / "checkpoint-000003").rename(tmp_path / "kept")
    settings = msgspec.structs.replace(SETTINGS, steps=4, seed=5)
    with engine(weak) as llm:
        again = list(train(llm, settings, tmp_path / "run", shown=False))
        other = msgspec.structs.replace(settings, lr=1e-4)
        with pytest.raises(ConfigError, match="started with other settings: lr"):
            Run(llm, other, tmp_path / "run")
    assert [line["step"] for line in again] == [3, 4]
    assert {**again[0], "seconds": 0} == {**lines[2], "seconds": 0}
    assert again[1]["unequal"] == 0
    logged = log.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in logged] == [1, 2, 3, 4]

    # The checkpoint is a model folder.
    with engine(str(tmp_path / "kept")) as llm:
        assert mismatches(llm, Policy(llm.config, progress=False)) == 0


def test_other_weights_show_as_mismatches(weak: str) -> None:
    with engine(weak) as llm:
        policy = Policy(llm.config, progress=False)
        assert mismatches(llm, policy) == 0
        with torch.no_grad():
            for one in policy.parameters.values():
                one.mul_(1.01)
        policy.settle()
        assert mismatches(llm, policy) > 0


def mismatches(llm: LLM, policy: Policy) -> int:
    """Return the number of unequal logprobs between a rollout and the policy."""
    (made,) = llm.generate(["Tom has 12 apples."], SamplingParams(max_tokens=24, logprobs=0, seed=1), False)
    (one,) = made.outputs
    assert one.logprobs is not None
    rollout = torch.tensor([next(iter(each.values())).logprob for each in one.logprobs])
    with torch.no_grad():
        (own,) = policy.logprobs([Scored(made.prompt_token_ids + one.token_ids, len(made.prompt_token_ids))])
    return int((own != rollout).sum())
