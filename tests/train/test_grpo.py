"""The update, its report, the log and the checkpoints, with a policy of one vector."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.common.errors import ConfigError, ContextLength, EngineDead
from weft.train import checkpoints
from weft.train.grpo import Mismatch, Rollout, advantages, batches, split, update
from weft.train.log_file import LogFile
from weft.train.policy import Scored
from weft.train.run import Run, Settings
from weft.train.tasks import Question


class Vector:
    """A policy whose token ``i`` has the logprob ``weights[i]``."""

    def __init__(self, values: Sequence[float]) -> None:
        self.weights = torch.nn.Parameter(torch.tensor(values))
        self.parameters = {"weights": self.weights}

    def logprobs(self, sequences: Sequence[Scored]) -> list[torch.Tensor]:
        return [self.weights[torch.tensor(one.ids[one.first :])] for one in sequences]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weights", self.weights.detach().clone()

    def gather(self) -> None:
        pass

    def settle(self) -> None:
        pass


def rollout(tokens: list[int], logprob: float, advantage: float) -> Rollout:
    logprobs = [logprob] * len(tokens)
    return Rollout(prompt=[0], answer=tokens, logprobs=logprobs, reward=0.0, advantage=advantage)


def changed_by(policy: Vector, rollouts: list[Rollout], **more: Any) -> tuple[Any, list[float]]:
    """Return the report of an update by plain gradient descent, and the change of each weight."""
    before = policy.weights.detach().clone()
    optimizer = torch.optim.SGD(policy.parameters.values(), lr=1.0)
    made = update(policy, optimizer, rollouts, grad_norm=1e9, **more)  # type: ignore[arg-type]
    return made, (policy.weights.detach() - before).tolist()


def test_the_loss_is_a_mean_over_tokens_with_a_clip_on_one_side() -> None:
    # Ratios: 1, 1.5 with a gain, 1.5 with a loss, 0.5 with a gain, 0.5 with a loss.
    policy = Vector([-1.0, *(-1.0 + math.log(ratio) for ratio in (1.5, 1.5, 0.5, 0.5)), -1.0])
    signs = ((0, 1.0), (1, 1.0), (2, -1.0), (3, 1.0), (4, -1.0), (5, 0.0))
    made, changed = changed_by(policy, [rollout([token], -1.0, sign) for token, sign in signs], clip=0.2)
    # 6 tokens. A clipped token has no gradient, and neither has a token without an advantage.
    assert changed == pytest.approx([1 / 6, 0.0, -1.5 / 6, 0.5 / 6, 0.0, 0.0], abs=1e-6)
    assert made.clipped == 2
    assert made.loss == pytest.approx(-(1 + 1.2 - 1.5 + 0.5 - 0.8) / 6)
    assert made.mismatch.tokens == 6
    assert made.mismatch.unequal == 4


def test_packing_does_not_change_the_gradient() -> None:
    rollouts = [rollout([1, 2, 2], -1.0, 0.7), rollout([0], -1.0, -1.1), rollout([2, 1], -1.0, 0.3)]
    found = [changed_by(Vector([-1.0, -1.1, -0.9]), rollouts, tokens=most) for most in (2, 6, 100)]
    for made, changed in found[1:]:
        assert changed == pytest.approx(found[0][1], rel=1e-6)
        assert made.loss == pytest.approx(found[0][0].loss)


def test_each_minibatch_is_an_update() -> None:
    assert [len(part) for part in split([rollout([0], 0.0, 1.0)] * 9, 4)] == [2, 2, 2, 3]
    both = [rollout([0], -1.0, 1.0), rollout([1], -1.0, 1.0)]
    made, changed = changed_by(Vector([-1.0, -1.0]), both, minibatches=2)
    assert changed == [1.0, 1.0]  # means over one token each
    assert made.mismatch.tokens == 1


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    policy = Vector([-1.0, float("nan")])
    with pytest.raises(EngineDead, match="smaller --lr"):
        changed_by(policy, [rollout([0], -1.0, 1.0), rollout([1], -1.0, 1.0)])
    assert policy.weights[0].item() == -1.0


def test_the_mismatch_estimates_the_divergence_of_the_trainer() -> None:
    rollouts, trainer = torch.tensor([0.7, 0.3]).log(), torch.tensor([0.4, 0.6]).log()
    found = Mismatch()
    # Seven samples of the first token, three of the second: the estimate is then the divergence itself.
    for token, count in ((0, 7), (1, 3)):
        found.add(trainer[token].expand(count), rollouts[token].expand(count))
    assert found.kl == pytest.approx(0.7 * math.log(0.7 / 0.4) + 0.3 * math.log(0.3 / 0.6))
    assert (found.tokens, found.unequal) == (10, 10)
    assert found.largest == pytest.approx(math.log(2))


def test_advantages_compare_within_a_group() -> None:
    assert advantages([1.0, 1.0, 1.0]) == [0.0, 0.0, 0.0]
    made = advantages([1.0, 0.0, 0.0, 0.0])
    assert made == pytest.approx([3**0.5, *[-(3**-0.5)] * 3], rel=1e-5)


def test_batches_keep_order_and_bound() -> None:
    rollouts = [
        Rollout(prompt=[1] * 3, answer=[2] * length, logprobs=[0.0] * length, reward=0.0)
        for length in (5, 1, 9, 30, 2)
    ]
    parts = list(batches(rollouts, 20))
    assert [[len(one.answer) for one in part] for part in parts] == [[5, 1], [9], [30], [2]]


# --- log and checkpoints ---


def test_the_log_drops_later_and_incomplete_lines(tmp_path: Path) -> None:
    log = LogFile(tmp_path)
    for step in (1, 2, 3):
        log.add({"step": step})
    with pytest.raises(ConfigError, match="another run writes to"):
        LogFile(tmp_path)
    log.close()
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "rew')  # the process was killed here
    log = LogFile(tmp_path)
    log.cut(2)
    log.add({"step": 3})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_log_of_something_else_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"loss": 1}\n')
    with pytest.raises(ConfigError, match="give another --out"):
        LogFile(tmp_path).cut(0)
    assert path.read_text() == '{"loss": 1}\n'
    with pytest.raises(ConfigError, match="cannot be written"):
        LogFile(path)


def steps(policy: Vector, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        update(policy, optimizer, [rollout([0, 1], -1.0, 1.0), rollout([1], -1.0, -0.5)])  # type: ignore[arg-type]


def adam(policy: Vector) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)


def saved(out: Path, policy: Any, optimizer: torch.optim.Optimizer, step: int) -> Path:
    source = out / "source"
    source.mkdir(exist_ok=True)
    return checkpoints.save(out, step, source, policy, optimizer, {"lr": 0.01})


def test_a_restored_optimizer_takes_the_same_steps(tmp_path: Path) -> None:
    policy = Vector([-1.0, -2.0])
    optimizer = adam(policy)
    steps(policy, optimizer, 3)
    assert checkpoints.latest(tmp_path) is None
    saved(tmp_path, policy, optimizer, 3)
    steps(policy, optimizer, 2)
    again = Vector([0.0, 0.0])
    restored = adam(again)
    last = checkpoints.latest(tmp_path)
    assert last is not None
    assert checkpoints.restore(last, again, restored, {"lr": 0.01}) == 3  # type: ignore[arg-type]
    steps(again, restored, 2)
    assert torch.equal(again.weights, policy.weights)


def test_a_broken_write_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Vector([-1.0])
    before = saved(tmp_path, policy, adam(policy), 1)

    def full(*given: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*free disk space"):
        saved(tmp_path, policy, adam(policy), 2)
    assert checkpoints.latest(tmp_path) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000001", "source"]


@pytest.mark.parametrize(
    ("name", "text"), [("state.json", "{"), ("state.json", "{}"), ("state.safetensors", "{")]
)
def test_a_damaged_checkpoint_is_named(tmp_path: Path, name: str, text: str) -> None:
    policy = Vector([-1.0])
    folder = saved(tmp_path, policy, adam(policy), 1)
    (folder / "trainer" / name).write_text(text)
    with pytest.raises(ConfigError, match="delete this checkpoint"):
        checkpoints.restore(folder, policy, adam(policy), {"lr": 0.01})  # type: ignore[arg-type]


# --- errors of a run ---


def run_with(**parts: Any) -> Run:
    """Return a run with these attributes alone."""
    run = Run.__new__(Run)
    for name, part in {"settings": Settings(), **parts}.items():
        setattr(run, f"_{name}", part)
    return run


def test_a_reward_that_fails_is_named() -> None:
    question = Question("1 + 1?", "2")
    run = run_with(task=SimpleNamespace(reward=lambda question, answer: {}[answer]))
    with pytest.raises(EngineDead, match="the reward gsm-mini raised KeyError: 'two'"):
        run._reward(question, "two")
    run = run_with(task=SimpleNamespace(reward=lambda question, answer: float("nan")))
    with pytest.raises(EngineDead, match="returned nan"):
        run._reward(question, "two")


def test_an_answer_without_room_names_both_flags() -> None:
    def chat(*given: Any, **more: Any) -> None:
        raise ContextLength("the model's context is 64 tokens")

    with pytest.raises(ConfigError, match=r"context is 64 tokens: raise --max-model-len, or lower --max-tok"):
        run_with(llm=SimpleNamespace(chat=chat))._generate([Question("1 + 1?", "2")], [])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"group": 1}, "--group must be at least 2"),
        ({"reward": "gsm"}, "gsm-mini"),
        ({"minibatches": 1000}, "--minibatches exceeds"),
        ({"lr": 0.0}, "--lr must be a number above 0"),
        ({"lr": math.inf}, "--lr must be a number above 0"),
        ({"grad_norm": math.nan}, "--grad-norm must be a number above 0"),
        ({"eval_every": -1}, "--eval-every"),
    ],
)
def test_settings_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**values)
