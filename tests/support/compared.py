"""Comparison of a model with a reference: random prompts, mixed steps, distances."""

from __future__ import annotations

import random
from typing import Any

import torch


def random_ids(count: int, vocab: int, seed: int) -> list[int]:
    """Return ``count`` random token ids."""
    made = random.Random(seed)
    return [made.randrange(vocab) for _ in range(count)]


def distance(ours: list[torch.Tensor], theirs: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude of ``theirs``."""
    mine = torch.stack(ours)
    assert mine.shape == theirs.shape
    return float((mine - theirs).abs().max() / theirs.abs().max())


def same_parameters(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Return True if both modules have the same names with equal values."""
    first, second = dict(a.named_parameters()), dict(b.named_parameters())
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def run_in_chunks(harness: Any, sequences: list[Any], prompts: list[int], seed: int, most: int) -> int:
    """Compute all sequences: prompts in random chunks of at most ``most`` beside other rows' decode steps.

    Return the number of steps that had both.
    """
    rng = random.Random(seed)
    mixed = 0
    while any(s.computed < len(s.ids) for s in sequences):
        prefill, decode = [], []
        for sequence, prompt in zip(sequences, prompts, strict=True):
            left = prompt - sequence.computed
            if left > 0:
                prefill.append((sequence, rng.randint(1, min(left, most))))
            elif sequence.computed < len(sequence.ids) and rng.random() < 0.8:
                decode.append((sequence, 1))
        if prefill or decode:
            harness.step(prefill, decode)
        mixed += bool(prefill and decode)
    return mixed


def run_mixed(harness: Any, sequences: list[Any], prompts: list[int], seed: int) -> None:
    """Compute all sequences: prompts in random chunks beside other rows' decode steps."""
    assert run_in_chunks(harness, sequences, prompts, seed, most=11) > 1, "no mixed step was run"
