"""Per-token rules of sampling parameters or of a grammar, in the form that the sampler applies."""

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
    """Bad words of two or more ids, on the device because words can be many."""

    prefixes: Tensor
    lengths: Tensor
    last: Tensor


@dataclass(frozen=True, slots=True)
class Lists:
    """Token lists of one slot: ids (int64), all inside the vocabulary."""

    banned: np.ndarray
    stop: np.ndarray
    """Banned while fewer than min_tokens output tokens exist."""
    bias_ids: np.ndarray
    bias: np.ndarray
    allowed: np.ndarray | None
    words: Words | None


def lists_of(params: TokenParams, vocab_size: int, device: torch.device) -> Lists | None:
    """Return the per-token rules of ``params``; None if no rule applies.

    Ids outside the vocabulary are dropped. A bad word of one id is banned outright; a longer word bans its
    last id behind its other ids.
    """
    bias = {token: value for token, value in params.logit_bias if 0 <= token < vocab_size}
    # Only the last id of a word needs to be in the vocabulary: the prefix is compared with the history.
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
    """Return (row, id), int64 [N] each, for all ids of the (row, ids) pairs in ``lists``."""
    ids = np.concatenate([ids for _, ids in lists]) if lists else np.empty(0, np.int64)
    owner = np.repeat([row for row, _ in lists], [len(ids) for _, ids in lists]).astype(np.int64)
    pairs = upload(np.stack([owner, ids]), device)
    return pairs[0], pairs[1]


def _words(words: list[tuple[int, ...]], device: torch.device) -> Words:
    """Return bad words as device columns: prefixes int32 [words, longest prefix], right-aligned; lengths of
    the prefixes and last ids, int64 [words]."""
    lengths = np.array([len(word) - 1 for word in words], dtype=np.int64)
    prefixes = np.full((len(words), int(lengths.max())), -1, dtype=np.int32)
    for row, word in enumerate(words):
        # [words, longest prefix], right-aligned and padded with -1
        prefixes[row, prefixes.shape[1] - len(word) + 1 :] = word[:-1]
    last = np.array([word[-1] for word in words], dtype=np.int64)
    return Words(*(upload(column, device) for column in (prefixes, lengths, last)))


def _columns(ids: list[int], vocab_size: int) -> np.ndarray:
    array = np.unique(np.asarray(ids, dtype=np.int64))
    return array[(array >= 0) & (array < vocab_size)]


def words_of(masks: TokenMasks, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (words int32 [masks, .], mask index int64 [order] of each entry in ``order``).

    ``masks`` must not be empty. Entries without a mask get an arbitrary index.
    """
    count = len(masks.entries)
    if masks.entries[-1] == count - 1:  # masks cover the first ``count`` entries: mask index = entry
        places = np.minimum(order, count - 1)
    else:
        numbers = np.zeros(1 + max(int(order.max()), int(masks.entries[-1])), np.int64)
        numbers[masks.entries] = np.arange(count)
        places = numbers[order]
    words = masks.words.reshape(count, -1)
    return (
        words if words.flags.writeable else words.copy(),
        places,
    )  # torch needs writable memory, and a received frame is read-only
