"""What one slot's parameters, or a grammar, say of single tokens, in the form that the sampler applies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.ops.upload import upload
from weft.types.plan import TokenMasks
from weft.types.sampling import TokenParams

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


def lists_of(params: TokenParams, vocab_size: int, device: torch.device) -> Lists | None:
    """What ``params`` say of single tokens; None when that is nothing."""
    bias = {token: value for token, value in params.logit_bias if 0 <= token < vocab_size}
    words = [word for word in params.bad if len(word) > 1 and 0 <= word[-1] < vocab_size]
    lists = Lists(
        banned=_columns([word[0] for word in params.bad if len(word) == 1], vocab_size),
        stop=_columns(list(params.stop_ids) if params.min_tokens > 0 else [], vocab_size),
        bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
        bias=np.fromiter(bias.values(), np.float64, len(bias)),
        allowed=None if params.allowed is None else _columns(list(params.allowed), vocab_size),
        words=_words(words, device) if words else None,
    )
    used = lists.allowed is not None or lists.words is not None
    used = used or any(len(ids) for ids in (lists.banned, lists.stop, lists.bias_ids))
    return lists if used else None


def pairs_of(lists: list[tuple[int, np.ndarray]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(row, id), int64 [N] each, of all ids of (row, ids)."""
    ids = np.concatenate([ids for _, ids in lists]) if lists else np.empty(0, np.int64)
    owner = np.repeat([row for row, _ in lists], [len(ids) for _, ids in lists]).astype(np.int64)
    pairs = upload(np.stack([owner, ids]), device)
    return pairs[0], pairs[1]


def _words(words: list[tuple[int, ...]], device: torch.device) -> Words:
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int64)
    prefixes = np.full((len(words), int(lengths.max())), -1, dtype=np.int32)
    for row, word in enumerate(words):
        prefixes[row, prefixes.shape[1] - len(word) + 1 :] = word[:-1]
    last = np.array([word[-1] for word in words], dtype=np.int64)
    return Words(*(upload(column, device) for column in (prefixes, lengths, last)))


def _columns(ids: list[int], vocab_size: int) -> np.ndarray:
    array = np.unique(np.asarray(ids, dtype=np.int64))
    return array[(array >= 0) & (array < vocab_size)]


def words_of(masks: TokenMasks, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(words int32 [masks, .], int64 [order]: the mask of each of the entries ``order``; any number of those
    that have none). There is a mask.
    """
    count = len(masks.entries)
    if masks.entries[-1] == count - 1:  # the first ``count`` entries, so a mask has its entry's number
        places = np.minimum(order, count - 1)
    else:
        numbers = np.zeros(1 + max(int(order.max()), int(masks.entries[-1])), np.int64)
        numbers[masks.entries] = np.arange(count)
        places = numbers[order]
    words = masks.words.reshape(count, -1)
    return (
        words if words.flags.writeable else words.copy(),
        places,
    )  # a frame's are not, and torch wants its own
