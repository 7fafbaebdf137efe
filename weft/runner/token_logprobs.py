"""Logprobs of sampled and of prompt tokens, as the sampler makes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

from weft.ops import sampling as ops
from weft.ops.upload import upload

Tensor = torch.Tensor

Part: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""ids, values and rank of some entries, as ``ops.logprobs_of`` returns them, and whether each is broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Logprobs of n entries, on the device. Unused places (a row that asked for fewer) have id -1."""

    entries: np.ndarray
    """int64 [n], on the host: which of the S (or P) entries these are, ascending."""
    ids: Tensor
    """int64 [n, 1 + top]: the entry's own token, then the likeliest in order."""
    values: Tensor
    """float32 [n, 1 + top], float64 in E0. -inf where there is no id."""
    rank: Tensor
    """int64 [n]: 1 + how many tokens are ahead of the entry's own."""
    error: Tensor
    """bool [n]: the logits hold NaN or +inf, or nothing finite, and the values mean nothing."""


def assembled(
    parts: Sequence[Part], entries: np.ndarray, asked: np.ndarray, order: np.ndarray | None = None
) -> LogprobTensors:
    """``parts``, one behind the other, of ``entries``, each of which asked for ``asked`` alternatives.

    ``order``: the entries as the parts have them, where these are of what tokens are drawn from. One that
    cannot be drawn is no alternative then.
    """
    ids, values, rank, error = (torch.cat(column) for column in zip(*parts, strict=True))
    device = ids.device
    beyond = None
    if (asked < asked.max()).any():
        beyond = torch.arange(ids.shape[1], device=device) > upload(asked, device).unsqueeze(1)
    if order is not None:
        place = upload(np.argsort(order), device)
        ids, values, rank, error = ids[place], values[place], rank[place], error[place]
        never = (values == ops.NEG_INF) & (torch.arange(ids.shape[1], device=device) > 0)
        beyond = never if beyond is None else never | beyond
    if beyond is not None:
        ids, values = ids.masked_fill(beyond, -1), values.masked_fill(beyond, ops.NEG_INF)
    return LogprobTensors(entries=entries, ids=ids, values=values, rank=rank, error=error)
