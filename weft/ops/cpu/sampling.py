"""Greedy and unfiltered sampling in the CPU extension (csrc/sampling.cpp), from bf16 or float32 logits.

The tokens equal the tokens of weft/ops/sampling.py. A row is read once or twice, and only tokens that can win
get noise.
"""

from __future__ import annotations

import torch

from weft.ops import cpu
from weft.ops.cpu.served import DTYPES

Tensor = torch.Tensor


def serves(logits: Tensor) -> bool:
    """Return True if the functions below can be called with these logits."""
    return logits.device.type == "cpu" and logits.dtype in DTYPES and logits.stride(-1) == 1 and cpu.load()


Masks = tuple[Tensor, Tensor]
"""(words int32 [masks, ceil(vocab_size / 32)], places int64 [R]: the mask of each row). Bit i of word w
allows token 32 w + i."""


def greedy(
    logits: Tensor, rows: Tensor, vocab_size: int, masks: Masks | None = None
) -> tuple[Tensor, Tensor]:
    """Return (argmax int64 [R], error bool [R]) of ``logits[rows, :vocab_size]``. Ties go to the lowest id.

    logits: [L, >= V]; rows: int64 [R]. Tokens outside ``masks`` count as -inf. ``error``: the row has NaN or
    +inf, or no finite value.
    """
    words, places = (None, None) if masks is None else masks
    ids, error = torch.ops.weft_cpu.greedy.default(logits, rows, vocab_size, words, places)
    return ids, error


def allow_bits(logits: Tensor, rows: Tensor, vocab_size: int, masks: Masks) -> tuple[Tensor, Tensor]:
    """Return (float32 [R, vocab_size], error bool [R]): ``logits[rows, :vocab_size]`` with masks applied.

    Tokens outside the mask become -inf. ``error`` refers to the unmasked logits. logits, rows, error: see
    ``greedy``.
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
    """Apply steps 5 to 7 of the sampling rule without top_k and top_p: (tokens int64 [R], error bool [R]).
    logits, rows, masks: see ``greedy``. temperature, min_p: float64 [R]; min_p 0 keeps everything. seed,
    choice, position: int64 [R], the arguments of the noise. error: the logits of the row cannot be sampled.
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
    """Finish a decode step with one token per row. Return (tokens int64 [R], error bool [R]).

    Row r of ``logits`` gives slot ``slots[r]`` (int64 [R], without repeats) its next token: by ``greedy`` for
    a temperature below 1e-5, otherwise by ``sample``. The token of a row with an error is 0. The token is
    written to ``history`` (int32 [., length]) after position ``num_computed`` (int64), which increases by
    one. ``live`` (int64) becomes 0.

    columns: temperature and min_p (float64), seed and choice (int64), for all slots.
    """
    ids, error = torch.ops.weft_cpu.end_decode_.default(
        logits, slots, vocab_size, *columns, history, num_computed, live
    )
    return ids, error
