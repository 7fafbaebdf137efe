"""Philox-4x32-10 and the Gumbel noise of the sampling rule, in torch int64 arithmetic.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

A 32-bit word is an int64 in [0, 2^32). The noise of a token is a function of (seed, choice, position, id)
alone, so that it is the same in every batch, on every rank and on every device:

    key = (low, high 32 bits of the seed)    counter = (token id >> 2, position, choice, 0)
    w = output word (token id & 3)           u = (w + 0.5) * 2^-32          g = -log(-log(u)), float64

The last counter word is reserved for other uses of the same seed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

WORD = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)

GUMBEL_SPAN = 26.01
"""Upper bound of the range of g. A token further below the largest x cannot win."""


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four output words of Philox-4x32-10.

    ``counter`` and ``key`` are int64 tensors of words in [0, 2^32), with shapes that broadcast together. Pass
    tensors that are constant along a dim with size 1 there. Returns int64 words of the common shape.
    Arguments are not changed.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    full = torch.broadcast_tensors(*counter, *key)[0].shape  # torch.broadcast_shapes imports sympy: 0.3 s
    for number in range(ROUNDS):
        if number:
            k0 = (k0 + WEYL[0]) & WORD
            k1 = (k1 + WEYL[1]) & WORD
        # An int64 product of two words wraps to the right 64 bits. c1 and c3 keep whole products. The bits
        # above the low word, with sign copies of the arithmetic shift, disappear in the next round's mask.
        product0 = c0 * MULTIPLIERS[0]
        product1 = c2 * MULTIPLIERS[1]
        c0 = _xor(product1 >> 32, c1, k0, full).bitwise_and_(WORD)
        c2 = _xor(product0 >> 32, c3, k1, full).bitwise_and_(WORD)
        c1 = product1
        c3 = product0
    return c0, c1 & WORD, c2, c3 & WORD


def _xor(own: Tensor, first: Tensor, second: Tensor, full: torch.Size) -> Tensor:
    """Return ``own ^ first ^ second``, in place once ``own`` has the full shape (from round 3 on)."""
    if own.shape == full:
        return own.bitwise_xor_(first).bitwise_xor_(second)
    return own ^ (first ^ second)


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & WORD, (seeds >> 32) & WORD


def token_words(seeds: Tensor, choices: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Return the word w of each token in ``ids``.

    All arguments are int64 and broadcast together; seeds are bit patterns of uint64. Returns int64 of the
    common shape.
    """
    words = philox((ids >> 2, positions, choices, torch.zeros_like(choices)), _key(seeds))
    lane = ids & 3
    low = torch.where((lane & 1).bool(), words[1], words[0])
    high = torch.where((lane & 1).bool(), words[3], words[2])
    return torch.where((lane & 2).bool(), high, low)


def row_lanes(
    seeds: Tensor, choices: Tensor, positions: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the words of all tokens of each row: int64 [R] each -> four int64 [R, ceil(vocab_size / 4)].

    Lane l contains tokens l, l + 4, l + 8 .. The cost per token is a quarter of ``token_words``.
    """
    counters = torch.arange((vocab_size + 3) // 4, device=seeds.device).unsqueeze(0)  # [1, V / 4]
    seeds, choices, positions = (column.unsqueeze(1) for column in (seeds, choices, positions))  # [R, 1]
    return philox((counters, positions, choices, torch.zeros_like(choices)), _key(seeds))


def merge_lanes(lanes: Sequence[Tensor], vocab_size: int) -> Tensor:
    """Merge four lanes [R, ceil(vocab_size / 4)] to [R, vocab_size], in the order of ids."""
    return torch.stack(tuple(lanes), dim=-1).flatten(1)[:, :vocab_size]


def pick_words(lanes: Sequence[Tensor], rows: Tensor, ids: Tensor) -> Tensor:
    """Return the words of tokens ``ids`` of ``rows`` (int64 [N] each) from the four lanes: int64 [N]."""
    four = torch.stack([lane[rows, ids >> 2] for lane in lanes], dim=-1)
    return four.gather(1, (ids & 3).unsqueeze(1)).squeeze(1)


def gumbel(words: Tensor) -> Tensor:
    """Return g of each word, float64 in [-3.13, 22.88]."""
    uniform = words.double().add_(0.5).mul_(2.0**-32)
    return uniform.log_().neg_().log_().neg_()
