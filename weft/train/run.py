"""The loop of ``weft train grpo``: rollouts, rewards, update, weights to the engine, log, checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from weft.api.llm import LLM
from weft.common.errors import ConfigError, ContextLength, EngineDead
from weft.common.log import get_logger
from weft.common.progress import progress_bar
from weft.train import checkpoints
from weft.train.grpo import Rollout, Update, advantages, update
from weft.train.log_file import LogFile
from weft.train.policy import Policy
from weft.train.tasks import TASKS, Question
from weft.types.sampling import SamplingParams

log = get_logger(__name__)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run. Raises ConfigError, naming the flag, for a number out of range."""

    reward: str = "gsm-mini"
    steps: int = 100
    prompts: int = 16
    """Questions per step."""
    group: int = 8
    """Answers per question."""
    minibatches: int = 1
    """Optimizer steps per step."""
    lr: float = 1e-5
    clip: float = 0.2
    grad_norm: float = 1.0
    max_tokens: int = 256
    """Maximum tokens of an answer."""
    pack: int = 8192
    """Maximum tokens of a packed forward pass of the trainer."""
    seed: int = 0
    eval_every: int = 0
    """Steps between two measurements on the test set; 0 for none."""
    eval_problems: int = 100
    save_every: int = 50

    def __post_init__(self) -> None:
        TASKS.get(self.reward)
        for name in ("steps", "prompts", "minibatches", "max_tokens", "pack", "eval_problems", "save_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1", param=name)
        for name in ("lr", "clip", "grad_norm"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} must be a number above 0", param=name)
        if self.eval_every < 0:
            raise ConfigError("--eval-every must be at least 0", param="eval_every")
        if self.group < 2:
            raise ConfigError(
                "--group must be at least 2: advantages compare the answers of a group", param="group"
            )
        if self.minibatches > self.prompts * self.group:
            raise ConfigError(
                "--minibatches exceeds the answers of a step, --prompts times --group", param="minibatches"
            )

    @property
    def fixed(self) -> dict[str, Any]:
        """Settings that a resumed run must not change."""
        free = ("steps", "eval_every", "eval_problems", "save_every")
        return {name: value for name, value in msgspec.to_builtins(self).items() if name not in free}


class Run:
    """A training run in the folder ``out``. One engine and one policy in this process."""

    def __init__(self, llm: LLM, settings: Settings, out: Path) -> None:
        """Load the policy, and resume from the last checkpoint in ``out`` if there is one. Raises
        ConfigError."""
        self._llm, self._settings, self._out = llm, settings, out
        self._task = TASKS.get(settings.reward)()
        self._source = Path(llm.config.model_path)
        self._about = {"model": llm.config.served_names[0], "dtype": llm.config.dtype, **settings.fixed}
        self.policy = Policy(llm.config)
        if not llm.deterministic:
            log.warning("rollouts depend on the batch, so the KL is not exactly 0: add --deterministic")
        self._optimizer = torch.optim.AdamW(
            self.policy.parameters.values(), lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0
        """Number of finished steps."""
        self._log = LogFile(out)
        try:
            checkpoints.remove_partial(out)
            last = checkpoints.latest(out)
            if last is not None:
                self.step = checkpoints.restore(last, self.policy, self._optimizer, self._about)
                self._update_engine()
            self._log.cut(self.step)
            if self.step:
                log.info("%s: %d of %d steps are done", last, self.step, settings.steps)
        except BaseException:
            self._log.close()
            raise

    def steps(self) -> Iterator[dict[str, Any]]:
        """Run the remaining steps and yield the log line of each step. Afterwards the folder is unlocked."""
        settings = self._settings
        questions = self._task.training(settings.seed)
        questions = itertools.islice(questions, self.step * settings.prompts, None)
        with contextlib.closing(self._log):
            while self.step < settings.steps:
                line = self._step(list(itertools.islice(questions, settings.prompts)))
                self._log.add(line)
                if self.step % settings.save_every == 0 or self.step == settings.steps:
                    self._save()
                yield line

    def _step(self, questions: list[Question]) -> dict[str, Any]:
        """Run one step and return its log line."""
        settings = self._settings
        began = time.monotonic()
        rollouts = self._rollouts(questions)
        rolled = time.monotonic()
        made = update(
            self.policy,
            self._optimizer,
            rollouts,
            minibatches=settings.minibatches,
            clip=settings.clip,
            grad_norm=settings.grad_norm,
            tokens=settings.pack,
        )
        trained = time.monotonic()
        self.step += 1
        self._update_engine()
        line = {"step": self.step, **_numbers(rollouts, made)}
        line["seconds"] = {
            "rollout": round(rolled - began, 3),
            "update": round(trained - rolled, 3),
            "weights": round(time.monotonic() - trained, 3),
        }
        if settings.eval_every and self.step % settings.eval_every == 0:
            line["accuracy"] = self.accuracy()
        return line

    def _rollouts(self, questions: list[Question]) -> list[Rollout]:
        """Sample a group of answers for each question. Raises the errors of ``_generate`` and ``_reward``."""
        settings = self._settings
        first = (settings.seed << 32) + self.step * settings.prompts
        params = [
            SamplingParams(
                n=settings.group,
                max_tokens=settings.max_tokens,
                logprobs=0,
                seed=(first + number) % (1 << 64),
            )
            for number in range(len(questions))
        ]
        made = []
        for question, request in zip(questions, self._generate(questions, params), strict=True):
            group = []
            for one in request.outputs:
                assert one.logprobs is not None
                group.append(
                    Rollout(
                        prompt=request.prompt_token_ids,
                        answer=one.token_ids,
                        # The first entry of a position is the sampled token.
                        logprobs=[next(iter(position.values())).logprob for position in one.logprobs],
                        reward=self._reward(question, one.text),
                    )
                )
            gains = advantages([one.reward for one in group])
            made += [replace(one, advantage=gain) for one, gain in zip(group, gains, strict=True)]
        return made

    def accuracy(self) -> float:
        """Return the mean reward of greedy answers to the test set."""
        questions = self._task.test(self._settings.eval_problems)
        greedy = SamplingParams(temperature=0.0, max_tokens=self._settings.max_tokens)
        answers = self._generate(questions, [greedy] * len(questions))
        return statistics.fmean(
            self._reward(question, one.outputs[0].text)
            for question, one in zip(questions, answers, strict=True)
        )

    def _generate(self, questions: list[Question], params: list[SamplingParams]) -> list[Any]:
        """Return the answers of the engine. Raises EngineDead if an answer fails, and ConfigError for a
        question that leaves no tokens for an answer."""
        chats = [[{"role": "user", "content": question.text}] for question in questions]
        try:
            answers = self._llm.chat(chats, params, use_tqdm=False)
        except ContextLength as error:
            raise ConfigError(
                f"{error.message}: raise --max-model-len, or lower --max-tokens", param="--max-model-len"
            ) from error
        for answer in answers:
            for one in answer.outputs:
                if one.error is not None:
                    raise EngineDead(f"a rollout failed: {one.error.message}")
        return answers

    def _reward(self, question: Question, answer: str) -> float:
        """Return the reward of an answer. Raises EngineDead if the task raises or returns no finite
        number."""
        name = self._settings.reward
        try:
            reward = float(self._task.reward(question, answer))
        except Exception as error:
            raise EngineDead(f"the reward {name} raised {type(error).__name__}: {error}") from error
        if not math.isfinite(reward):
            raise EngineDead(f"the reward {name} returned {reward}, not a finite number")
        return reward

    def _update_engine(self) -> None:
        """Load the weights of the policy into the engine."""
        self._llm.update_weights(self.policy.tensors(), version=f"step-{self.step}")

    def _save(self) -> None:
        checkpoints.save(self._out, self.step, self._source, self.policy, self._optimizer, self._about)


def _numbers(rollouts: list[Rollout], made: Update) -> dict[str, Any]:
    """Return the statistics of a step for the log."""
    lengths = [len(one.answer) for one in rollouts]
    mismatch = made.mismatch
    assert mismatch is not None
    return {
        "reward": statistics.fmean(one.reward for one in rollouts),
        "loss": made.loss,
        "kl": mismatch.kl,
        "unequal": mismatch.unequal,
        "compared": mismatch.tokens,
        "largest_difference": mismatch.largest,
        "grad_norm": made.grad_norm,
        "clipped": made.clipped,
        "tokens": sum(lengths),
        "length": statistics.fmean(lengths),
        "longest": max(lengths),
        "groups_with_signal": sum(1 for one in rollouts if one.advantage) / len(rollouts),
    }


def train(llm: LLM, settings: Settings, out: Path, *, shown: bool = True) -> Iterator[dict[str, Any]]:
    """Train the model of ``llm``, with a bar on a terminal. Yield the log line of each step."""
    run = Run(llm, settings, out)
    with progress_bar(total=settings.steps, title="GRPO", unit="step", shown=shown) as bar:
        bar.update(run.step)
        for line in run.steps():
            bar.set_postfix(reward=f"{line['reward']:.3f}", kl=line["kl"])
            bar.update()
            yield line
