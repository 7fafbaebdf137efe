"""Digests of transferred bytes: 64 bits per span, computed by the writer, checked by the receiver. Pure
numpy.

Words of 64 bits are summed up in blocks of 128, each with a key of its place in the block; sums are words
of the next level, until a single word is left. The two sums in ``term`` have 32 bits, all else has 64 bits:

    term(word, key) = (low(word) + low(key)) * (high(word) + high(key)) + word
    level(words)    = for each 128 words, sum of term(word i, key i) modulo 2^64
    digest          = mix(last sum ^ seed)

The seed is derived from the transfer key (transfer, attempt, incarnation), the sending and the receiving
rank, the destination and the length. So correct bytes at a wrong place, at a wrong rank or in a wrong attempt
have a wrong digest. Over random keys, a change within a block (a flipped bit, too) is missed with a
probability of at most about 2^-32 (NH: Black et al. 1999, "UMAC"). The keys here are fixed and public, so
the bound holds for accidental changes. Digests find faults; digests do not stop forgery.

``weft/ops/cpu/csrc/transfer.cpp`` computes the same bits at the speed of memory. The Python code is the
definition.
"""

from __future__ import annotations

import numpy as np

from weft.common.splitmix import mix, mix_array
from weft.types.transfer import TransferKey

WORDS = 128
"""Number of 64-bit words in a block."""
_MASK = (1 << 64) - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_AT_ONCE = 64 * WORDS  # words per pass: the terms stay in a core's cache
_GOLDEN = 0x9E3779B97F4A7C15


_KEYS = np.array([mix(_GOLDEN * (i + 1) & _MASK) for i in range(WORDS)], np.uint64)
KEYS_LOW, KEYS_HIGH = _KEYS & _LOW, _KEYS >> _HALF


def transfer_seed(key: TransferKey) -> int:
    """Return the common seed of all digests of a transfer."""
    return mix(mix(mix(key.transfer) ^ key.attempt) ^ key.incarnation)


def ranks_seed(key: TransferKey, rank: int, to: int) -> int:
    """Return the seed for spans from the sender's ``rank`` to the receiver's rank ``to``."""
    return mix(mix(transfer_seed(key) ^ rank) ^ to)


def span_seeds(seed: int, region: int, offsets: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return uint64 [n]: the seeds of spans with destination ``offsets`` in the receiver's ``region``.

    ``seed``: see ``ranks_seed``. offsets, lengths: int64 [n].
    """
    start = np.uint64(mix(seed ^ region))
    return mix_array(mix_array(offsets.astype(np.uint64) ^ start) ^ lengths.astype(np.uint64))


def digest(data: np.ndarray, seed: int) -> int:
    """Return the digest of the bytes of ``data``, uint8 [n]."""
    size = len(data)
    words = np.zeros(-(-size // 8), np.uint64)
    words.view(np.uint8)[:size] = data
    while len(words) > 1 or size:
        words, size = _level(words), 0
    return mix((int(words[0]) if len(words) else 0) ^ seed)


def digest_spans(memory: np.ndarray, spans: np.ndarray, seeds: np.ndarray) -> np.ndarray:
    """Return uint64 [n]: the digest of each span. memory: uint8; spans: int64 [n, 2], offset and length."""
    pairs = zip(spans.tolist(), seeds.tolist(), strict=True)
    return np.array([digest(memory[at : at + size], seed) for (at, size), seed in pairs], np.uint64)


def digest_bytes(data: bytes, seed: int) -> int:
    """Return the digest of a message."""
    return digest(np.frombuffer(data, np.uint8), seed)


def _level(words: np.ndarray) -> np.ndarray:
    """Return one uint64 per ``WORDS`` words of ``words``; the last block may be shorter."""
    whole = len(words) // WORDS * WORDS
    sums = []
    for at in range(0, whole, _AT_ONCE):
        blocks = words[at : min(at + _AT_ONCE, whole)].reshape(-1, WORDS)
        sums.append(_terms(blocks, WORDS).sum(axis=1, dtype=np.uint64))
    if whole < len(words):
        rest = words[whole:]
        sums.append(_terms(rest, len(rest)).sum(dtype=np.uint64, keepdims=True))
    return np.concatenate(sums) if sums else words


def _terms(words: np.ndarray, count: int) -> np.ndarray:
    low = ((words & _LOW) + KEYS_LOW[:count]) & _LOW
    high = ((words >> _HALF) + KEYS_HIGH[:count]) & _LOW
    terms: np.ndarray = low * high + words
    return terms
