"""What one slot's parameters say of single tokens, in the form that the sampler applies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True)
class Words:
    """Bad words of two and more ids, on the device (they can be many)."""

    prefixes: Tensor
    lengths: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Lists:
    """Per-slot lists of ids (int64), all inside the vocabulary."""

    banned: np.ndarray
    stop: np.ndarray
    """Banned as well while there are fewer output tokens than min_tokens."""
    bias_ids: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None
    words: Words | None
