"""Logprobs of sampled tokens and of prompt tokens."""

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
"""ids, values and ranks of some entries from ``ops.logprobs_of``, and bool [n]: broken entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobTensors:
    """Logprobs of n entries, on the device. Padding of rows with fewer alternatives has id -1."""

    entries: np.ndarray
    """int64 [n], on the host, ascending: indices among the S (or P) entries."""
    ids: Tensor
    """int64 [n, 1 + top]: the token of the entry, then the likeliest tokens in order. [n, 1] for the whole
    vocabulary."""
    values: Tensor
    """float32 [n, 1 + top]; float64 if the logits are float64. -inf for padding."""
    rank: Tensor
    """int64 [n]: 1 + number of tokens ahead of the entry's own token."""
    error: Tensor
    """bool [n]: True if the logits contain NaN or +inf, or nothing finite. The values are then
    meaningless."""


def assembled(
    parts: Sequence[Part], entries: np.ndarray, asked: np.ndarray, order: np.ndarray | None = None
) -> LogprobTensors:
    """Concatenate ``parts`` into the logprobs of ``entries``. ``asked``: number of alternatives per entry.
    Alternatives beyond this number become padding: id -1 and value -inf.

    ``order``: the entries in the order of the parts, for processed logprobs. Then tokens that cannot be drawn
    are no alternatives and become padding as well.
    """
    ids, values, rank, error = (torch.cat(column) for column in zip(*parts, strict=True))
    device = ids.device
    beyond = None
    # [n, 1 + top]: True for padding
    if (asked < asked.max()).any():
        beyond = torch.arange(ids.shape[1], device=device) > upload(asked, device).unsqueeze(1)
    if order is not None:
        place = upload(np.argsort(order), device)
        ids, values, rank, error = ids[place], values[place], rank[place], error[place]
    # The whole vocabulary keeps its order, so no token is left out.
    if order is not None and ids.shape == values.shape:
        never = (values == ops.NEG_INF) & (torch.arange(ids.shape[1], device=device) > 0)
        beyond = never if beyond is None else never | beyond
    if beyond is not None:
        ids, values = ids.masked_fill(beyond, -1), values.masked_fill(beyond, ops.NEG_INF)
    return LogprobTensors(entries=entries, ids=ids, values=values, rank=rank, error=error)
