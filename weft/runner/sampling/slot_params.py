"""Sampling parameters of every slot on the host, and the classes of work that the sampler needs per slot.

Per-token rules of the parameters or of a grammar have the form that the sampler applies.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch

from weft.common.errors import EngineDead
from weft.ops import sampling as ops
from weft.ops.sampling import Columns
from weft.ops.upload import upload
from weft.types.plan import AllocSlot, TokenMasks
from weft.types.sampling import TokenParams, signed_seed

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


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
INTS = ("top_k", "min_tokens", "logprobs", "prompt_logprobs", "seed", "choice")
COLUMNS = Columns(*((*FLOATS, *INTS).index(name) for name in Columns._fields))
"""Places of the parameters of a draw in a row of ``SlotParams.table``."""

# Bits of a row's class: the sampling work of the row. Rows of one class are processed together.
GREEDY, LISTS, PENALTY, TOP_K, TOP_P, MIN_P, MASK = (1 << bit for bit in range(7))
DIRECT = (0, GREEDY, MIN_P)  # classes without changed logits and without sorting
CHANGED = LISTS | PENALTY | MASK  # classes with one of these bits change the logits before the draw
STAGE = 7
"""Bits from here on hold the index of the first of ``ops.WIDTHS`` that is at least the row's top_k."""


class SlotParams:
    """Parameters of each slot from ``alloc`` to ``free``. Columns of free slots are arbitrary.

    floats    float64 [slots, FLOATS], on the host
    ints      int64 [slots, INTS], on the host
    table     int64 [slots, FLOATS and INTS], on the device: the same values, floats as bit patterns
    classes   int64 [slots]
    direct    bool [slots]: True if a captured step can draw the row: on a CPU a class in ``DIRECT`` without
              logprobs, on a GPU any class without changed logits and without logprobs. True for a free slot
    lists     token lists per slot; None for a slot without lists
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab = vocab_size
        self._device = device
        self._taken = np.zeros(num_slots, dtype=bool)
        rows = np.zeros((num_slots, len(FLOATS) + len(INTS)), dtype=np.int64)
        self.floats = rows[:, : len(FLOATS)].view(np.float64)
        self.ints = rows[:, len(FLOATS) :]
        self._rows = rows
        # On a CPU the memory of ``floats`` and ``ints``; on a GPU a copy, updated for each new sequence.
        self.table = torch.from_numpy(rows).to(device)
        self.classes = np.zeros(num_slots, dtype=np.int64)
        self.direct = np.ones(num_slots, dtype=bool)
        self.all_direct = True
        """True if ``direct`` is True for all slots."""
        self.lists: list[Lists | None] = [None] * num_slots

    def alloc(self, op: AllocSlot) -> None:
        """Store the parameters of a new sequence, its lists and its class. Raises EngineDead if the slot is
        in use."""
        if self._taken[op.slot]:
            raise EngineDead(f"sampler: slot {op.slot} is given to a sequence before the last one was freed")
        params = op.params
        top_k = params.top_k if 0 < params.top_k < self._vocab else self._vocab
        own = {"top_k": top_k, "seed": signed_seed(op.seed), "choice": op.choice}
        self._taken[op.slot] = True
        self.floats[op.slot] = [getattr(params, name) for name in FLOATS]
        self.ints[op.slot] = [own[name] if name in own else getattr(params, name) for name in INTS]
        lists = lists_of(params, self._vocab, self._device)
        self.lists[op.slot] = lists
        self.classes[op.slot] = kind = self._class(params, top_k, lists)
        drawn = kind in DIRECT if self._device.type == "cpu" else not kind & CHANGED
        self._set_direct(op.slot, drawn and params.logprobs < 0)
        if self._device.type == "cuda":
            row = torch.from_numpy(self._rows[op.slot]).pin_memory()
            self.table[op.slot].copy_(row, non_blocking=True)

    def free(self, slot: int) -> None:
        """Free the slot. Raises EngineDead if the slot is free already."""
        if not self._taken[slot]:
            raise EngineDead(f"sampler: slot {slot} is freed and has no sequence")
        self._taken[slot] = False
        self.lists[slot] = None
        self._set_direct(slot, True)

    def _set_direct(self, slot: int, direct: bool) -> None:
        if self.direct[slot] != direct:
            self.direct[slot] = direct
            self.all_direct = bool(self.direct.all())

    def draws(self, slots: np.ndarray) -> bool:
        """Return True if a captured step can draw the rows of all ``slots``."""
        return self.all_direct or bool(self.direct[slots].all())

    def clear(self) -> None:
        """Free every slot."""
        self._taken.fill(False)
        self.direct.fill(True)
        self.all_direct = True
        self.lists = [None] * len(self.lists)

    def _class(self, params: TokenParams, top_k: int, lists: Lists | None) -> int:
        """Return the class of a row: bits for the steps of the sampling rule that the parameters need, and
        the width of top-k. ``GREEDY`` excludes all filters."""
        kind = 0 if lists is None else LISTS
        if params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty:
            kind |= PENALTY
        if params.temperature < 1e-5:
            return kind | GREEDY
        if top_k < self._vocab:
            kind |= TOP_K | bisect_left(ops.WIDTHS, top_k) << STAGE
        kind |= TOP_P if params.top_p < 1 else 0
        kind |= MIN_P if params.min_p > 0 else 0
        return kind
