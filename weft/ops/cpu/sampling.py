"""Greedy and unfiltered sampling by the CPU extension (csrc/sampling.cpp), from bf16 or float32 logits.

The tokens are those of weft/ops/sampling.py. A row is read once or twice, and noise is made only for tokens
that can win.
"""

from __future__ import annotations

import torch

from weft.ops import cpu
from weft.ops.cpu.served import DTYPES

Tensor = torch.Tensor


def serves(logits: Tensor) -> bool:
    """Whether the functions below can be called with these logits."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(-1) == 1 and cpu.load()


Masks = tuple[Tensor, Tensor]
"""(words int32 [masks, ceil(vocab_size / 32)], places int64 [R]: the mask of each row). Bit i of word w
allows token 32 w + i."""


def greedy(
    logits: Tensor, rows: Tensor, vocab_size: int, masks: Masks | None = None
) -> tuple[Tensor, Tensor]:
    """(argmax int64 [R], error bool [R]) of ``logits[rows, :vocab_size]``; ties go to the lowest id.

    logits: [L, >= V]; rows: int64 [R]. ``masks``: other tokens count as -inf. ``error``: the row holds NaN or
    +inf, or nothing finite.
    """
    words, places = (None, None) if masks is None else masks
    ids, error = torch.ops.weft_cpu.greedy.default(logits, rows, vocab_size, words, places)
    return ids, error


def allow_bits(logits: Tensor, rows: Tensor, vocab_size: int, masks: Masks) -> tuple[Tensor, Tensor]:
    """(float32 [R, vocab_size]: ``logits[rows, :vocab_size]``, with -inf where a mask does not allow the
    token; error bool [R], of the logits as they are).

    logits, rows, error: as for ``greedy``.
    """
    made, error = torch.ops.weft_cpu.allow_bits.default(logits, rows, vocab_size, *masks)
    return made, error


def sample(
    logits: Tensor,
    rows: Tensor,
    vocab_size: int,
    temperature: Tensor,
    min_p: Tensor,
    seed: Tensor,
    choice: Tensor,
    position: Tensor,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """Steps 5 to 7 of the sampling rule without top_k and top_p: (tokens int64 [R], error bool [R]).

    logits, rows, masks: as for ``greedy``. temperature, min_p: float64 [R], min_p 0 where it keeps
    everything. seed, choice, position: int64 [R], what the noise is a function of.
    """
    words, places = (None, None) if masks is None else masks
    ids, error = torch.ops.weft_cpu.sample.default(
        logits, rows, vocab_size, temperature, min_p, seed, choice, position, words, places
    )
    return ids, error


def end_decode(
    logits: Tensor,
    slots: Tensor,
    vocab_size: int,
    columns: tuple[Tensor, Tensor, Tensor, Tensor],
    history: Tensor,
    num_computed: Tensor,
    live: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The end of a step of one token a row, all of it: (tokens int64 [R], 0 of an error; error bool [R]).

    Row r of ``logits`` gives slot ``slots[r]`` (int64 [R], each once) its next token: by ``greedy`` where its
    temperature is below 1e-5, else by ``sample``. The token goes into ``history`` (int32 [., length]) behind
    the position ``num_computed`` (int64), which goes on by one; ``live`` (int64) becomes 0.

    columns: temperature and min_p (float64), seed and choice (int64), each of all slots.
    """
    ids, error = torch.ops.weft_cpu.end_decode_.default(
        logits, slots, vocab_size, *columns, history, num_computed, live
    )
    return ids, error
