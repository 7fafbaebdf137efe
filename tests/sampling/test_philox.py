"""Philox words and Gumbel noise against published values and an independent implementation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.ops.philox import GUMBEL_SPAN, gumbel, merge_lanes, philox, row_lanes, token_words
from weft.types.sampling import signed_seed

WORDS = st.integers(0, (1 << 32) - 1)

# Known answers published with the Random123 library: counter, key, output.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

# The sampling rule's test vectors: (seed, choice, position, id) -> w, g.
VECTORS = [
    ((0, 0, 0, 0), 1713891541, 0.0848202511),
    ((0x0123456789ABCDEF, 0, 5, 7), 824448557, -0.5010688644),
    ((0x0123456789ABCDEF, 1, 5, 7), 4263577010, 4.9150352663),
    (((1 << 64) - 1, 2, 131071, 151935), 636303982, -0.6468533736),
]


def column(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_known_answers(counter, key, output, plain: SimpleNamespace) -> None:
    made = philox(tuple(column(c) for c in counter), tuple(column(k) for k in key))
    assert tuple(int(word) for word in made) == output
    assert tuple(plain.philox(counter, key)) == output


@pytest.mark.parametrize(("at", "word", "noise"), VECTORS)
def test_vectors_of_the_rule(at, word: int, noise: float, plain: SimpleNamespace) -> None:
    seed, choice, position, token = at
    columns = (column(signed_seed(seed)), column(choice), column(position))
    made = token_words(*columns, column(token))
    assert int(made) == word == plain.word(*at)
    assert int(merge_lanes(row_lanes(*columns, 151936), 151936)[0, token]) == word
    assert abs(float(gumbel(made)) - noise) < 1e-9
    assert abs(plain.gumbel(word) - noise) < 1e-9


@given(seed=st.integers(0, (1 << 64) - 1), choice=st.integers(0, 127), position=WORDS, token=WORDS)
def test_words_match_plain_integers(plain: SimpleNamespace, seed, choice, position, token) -> None:
    made = token_words(column(signed_seed(seed)), column(choice), column(position), column(token))
    assert int(made) == plain.word(seed, choice, position, token)


@pytest.mark.parametrize("vocab", [1, 2, 3, 4, 5, 37, 130])
def test_row_form_equals_token_form(vocab: int) -> None:
    seeds = column(*(signed_seed(s) for s in (0, 1, 1 << 63, (1 << 64) - 1)))
    choices, positions = column(0, 1, 2, 127), column(0, 7, 131071, 2**31 - 1)
    rows = merge_lanes(row_lanes(seeds, choices, positions, vocab), vocab)
    assert rows.shape == (4, vocab)
    ids = torch.arange(vocab)
    assert rows.equal(token_words(seeds[:, None], choices[:, None], positions[:, None], ids))


def test_noise_stays_within_the_span() -> None:
    extremes = gumbel(column(0, (1 << 32) - 1))
    assert extremes[0] == pytest.approx(-3.1301, abs=1e-3)
    assert extremes[1] == pytest.approx(22.8739, abs=1e-3)
    assert extremes[1] - extremes[0] < GUMBEL_SPAN


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert signed_seed(-1) == signed_seed((1 << 64) - 1) == -1
    assert signed_seed(1 << 64) == 0
    assert signed_seed(1 << 63) == -(1 << 63)
