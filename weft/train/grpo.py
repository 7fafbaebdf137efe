"""GRPO: advantages within groups, the clipped loss, and the mismatch between rollouts and trainer.

Source: Shao et al. 2024, arXiv 2402.03300. The loss is a mean over tokens (Yu et al. 2025, arXiv 2503.14476),
without a term for a reference model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from weft.common.errors import EngineDead
from weft.train.policy import Policy, Scored

Tensor = torch.Tensor

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled answer."""

    prompt: list[int]
    answer: list[int]
    """Token ids, with the end token if there is one. At least one token."""
    logprobs: list[float]
    """Logprob of each token of the answer, as the engine reported it."""
    reward: float
    advantage: float = 0.0

    @property
    def scored(self) -> Scored:
        """Return the sequence for ``Policy.logprobs``."""
        return Scored(self.prompt + self.answer, len(self.prompt))


def advantages(rewards: Sequence[float]) -> list[float]:
    """Return the advantages of one group: (reward - mean) / (standard deviation + 1e-6).

    Equal rewards give zeros.
    """
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards)
    return [(reward - mean) / (spread + _EPSILON) if spread else 0.0 for reward in rewards]


@dataclass(slots=True)
class Mismatch:
    """Differences between the logprobs of the rollouts and of the trainer, over tokens."""

    tokens: int = 0
    unequal: int = 0
    """Number of tokens whose logprobs differ in any bit."""
    total: float = 0.0
    """Sum of the k3 estimates of the KL divergence (Schulman 2020): exp(d) - 1 - d, d = trainer - rollout."""
    largest: float = 0.0
    """Largest |d|."""

    @property
    def kl(self) -> float:
        """Mean k3 estimate; 0.0 without tokens."""
        return self.total / self.tokens if self.tokens else 0.0

    def add(self, trainer: Tensor, rollout: Tensor) -> None:
        """Count the tokens of one answer: two tensors [tokens] in an equal dtype."""
        d = (trainer.detach() - rollout).double()
        self.tokens += len(d)
        self.unequal += int((d != 0).sum())
        self.total += (d.expm1() - d).sum().item()
        self.largest = max(self.largest, d.abs().max().item())


@dataclass(slots=True)
class Update:
    """Report of the updates of one step."""

    loss: float = 0.0
    """Loss of the first minibatch."""
    grad_norm: float = 0.0
    """Norm of the gradient of the last minibatch, before clipping."""
    clipped: int = 0
    """Number of tokens at which the clip was active."""
    mismatch: Mismatch | None = None
    """Mismatch of the first minibatch, before the first update: rollouts and trainer have equal weights."""


def batches(rollouts: Sequence[Rollout], most: int) -> Iterator[list[Rollout]]:
    """Yield the rollouts in order, in parts of at most ``most`` tokens. A longer rollout is a part alone."""
    part: list[Rollout] = []
    tokens = 0
    for one in rollouts:
        length = len(one.prompt) + len(one.answer)
        if part and tokens + length > most:
            yield part
            part, tokens = [], 0
        part.append(one)
        tokens += length
    if part:
        yield part


def split(rollouts: Sequence[Rollout], minibatches: int) -> Iterator[Sequence[Rollout]]:
    """Yield ``minibatches`` parts in order. Sizes differ by at most 1."""
    for number in range(minibatches):
        begin, end = (len(rollouts) * at // minibatches for at in (number, number + 1))
        yield rollouts[begin:end]


def update(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[Rollout],
    *,
    minibatches: int = 1,
    clip: float = 0.2,
    grad_norm: float = 1.0,
    tokens: int = 8192,
) -> Update:
    """Run one optimizer step per minibatch and return the report.

    ``tokens``: maximum tokens of a packed forward pass. A minibatch with zero advantages is skipped. Raises
    EngineDead for a gradient that is not finite, before the optimizer step.
    """
    made = Update()
    parameters = list(policy.parameters.values())
    for number, own in enumerate(split(rollouts, minibatches)):
        mismatch = Mismatch() if number == 0 else None
        optimizer.zero_grad(set_to_none=True)
        answered = sum(len(one.answer) for one in own)
        loss = 0.0
        learning = [one for one in own if one.advantage]
        for part in batches(learning, tokens):
            value = _loss(policy, part, clip, mismatch, made) / answered
            value.backward()
            loss += value.item()
        if mismatch is not None:
            # Rollouts with zero advantage have no gradient. Only the mismatch needs their forward pass.
            with torch.no_grad():
                for part in batches([one for one in own if not one.advantage], tokens):
                    _loss(policy, part, clip, mismatch, made)
            made.loss, made.mismatch = loss, mismatch
        if learning:
            policy.gather()
            made.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, grad_norm).item()
            if not math.isfinite(made.grad_norm):
                raise EngineDead(
                    "the gradient is not finite: continue from the last checkpoint with a smaller --lr and "
                    "another --out"
                )
            optimizer.step()
            policy.settle()
    return made


def _loss(
    policy: Policy, part: Sequence[Rollout], clip: float, mismatch: Mismatch | None, report: Update
) -> Tensor:
    """Return the summed loss of the tokens of ``part``. Counts mismatches and clipped tokens."""
    losses = []
    for one, trainer in zip(part, policy.logprobs([one.scored for one in part]), strict=True):
        rollout = torch.tensor(one.logprobs, dtype=trainer.dtype, device=trainer.device)
        if mismatch is not None:
            mismatch.add(trainer, rollout)
        ratio = (trainer - rollout).exp()
        bounded = ratio.clamp(1 - clip, 1 + clip)
        gain = torch.minimum(ratio * one.advantage, bounded * one.advantage)
        report.clipped += int((gain != ratio * one.advantage).sum())
        losses.append(-gain.sum())
    return torch.stack(losses).sum()
