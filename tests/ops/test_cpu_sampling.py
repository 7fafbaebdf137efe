"""Direct sampling of the CPU extension: the very tokens of weft/ops/sampling.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.pairwise import sampled
from weft.ops import sampling as reference
from weft.ops.cpu import sampling as ops
from weft.types.sampling import signed_seed

Tensor = torch.Tensor

pytestmark = pytest.mark.usefixtures("extension")
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.bfloat16, torch.float32)


def noise(count: int) -> tuple[Tensor, Tensor, Tensor]:
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    return seeds, torch.arange(count), torch.randint(0, 1 << 17, (count,))


def full(count: int, value: float) -> Tensor:
    return torch.full((count,), value, dtype=torch.float64)


@sampled(
    {
        "dtype": list(DTYPES),
        "vocab": [1, 5, 50, 1000, 5003, 40001],
        "spread": [0.0, 0.1, 1.0, 3.0, 20.0],
    },
    slow=True,
)
def test_tokens_are_the_references(dtype: torch.dtype, vocab: int, spread: float) -> None:
    torch.manual_seed(vocab)
    count = 12
    logits = (torch.randn(count, vocab + 3) * spread).to(dtype)
    logits[:, vocab:] = 1e4  # padded columns
    logits[::3, : vocab // 2] = -INF
    rows = torch.randperm(count)
    own = logits[rows, :vocab]
    ids, error = ops.greedy(logits, rows, vocab)
    assert torch.equal(ids, reference.greedy(own)[0])
    assert not error.any()
    seed, choice, position = noise(count)
    for temperature in (1.1e-5, 0.3, 1.0, 7.0):
        for min_p in (0.0, 0.02, 1.0):
            degrees, least = full(count, temperature), full(count, min_p)
            x = own.float() / degrees.float().unsqueeze(1)
            wanted = reference.sample_open(
                x, least if min_p else None, reference.Noise(seed=seed, choice=choice, position=position)
            )
            made, error = ops.sample(logits, rows, vocab, degrees, least, seed, choice, position)
            assert torch.equal(error, reference.broken(x))
            assert torch.equal(made[~error], wanted[~error]), (temperature, min_p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_plainest_form_agrees_where_every_token_counts(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    logits = (torch.randn(64, 2003) * 0.5).to(dtype)
    seed, choice, position = noise(64)
    wanted = reference.sample_all(
        logits.float(), reference.Noise(seed=seed, choice=choice, position=position)
    )
    made, _ = ops.sample(logits, torch.arange(64), 2003, full(64, 1.0), full(64, 0.0), seed, choice, position)
    assert torch.equal(made, wanted)


@pytest.mark.parametrize(
    ("seed", "choice", "position", "token", "g"),
    [
        (0, 0, 0, 0, 0.0848202511),
        (0x0123456789ABCDEF, 0, 5, 7, -0.5010688644),
        (0x0123456789ABCDEF, 1, 5, 7, 4.9150352663),
        (2**64 - 1, 2, 131071, 151935, -0.6468533736),
    ],
)
def test_vectors_of_the_rule(seed: int, choice: int, position: int, token: int, g: float) -> None:
    """``token`` beats another token exactly when its logit exceeds the difference of their noise."""
    other = 3
    columns = (torch.tensor([signed_seed(seed)]), torch.tensor([choice]), torch.tensor([position]))
    with_noise = reference.Noise(seed=columns[0], choice=columns[1], position=columns[2])
    needed = float(with_noise.of(torch.tensor([other]))) - g
    for shift, winner in ((1e-4, token), (-1e-4, other)):
        logits = torch.full((1, 151936), -INF)
        logits[0, other], logits[0, token] = 0.0, needed + shift
        made, _ = ops.sample(logits, torch.tensor([0]), 151936, full(1, 1.0), full(1, 0.0), *columns)
        assert int(made) == winner


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 64, 2500])
def test_broken_rows_say_so(dtype: torch.dtype, vocab: int) -> None:
    logits = torch.zeros(5, vocab, dtype=dtype)
    logits[0, vocab - 1], logits[1, 3], logits[2] = NAN, INF, -INF
    logits[3, 2] = -INF
    rows = torch.arange(5)
    columns = [torch.zeros(5, dtype=torch.int64)] * 3
    for made in (
        ops.greedy(logits, rows, vocab),
        ops.sample(logits, rows, vocab, full(5, 1.0), full(5, 0.0), *columns),
    ):
        assert made[1].tolist() == [True, True, True, False, False]
    assert ops.greedy(logits, rows, vocab)[0][3:].tolist() == [0, 0]


def test_division_can_break_a_row() -> None:
    logits = torch.full((1, 4), 3e38)
    columns = [torch.zeros(1, dtype=torch.int64)] * 3
    assert ops.sample(logits, torch.tensor([0]), 4, full(1, 0.1), full(1, 0.0), *columns)[1].all()


def test_rows_outside_the_logits_are_refused() -> None:
    with pytest.raises(RuntimeError, match="row 2 of 2"):
        ops.greedy(torch.zeros(2, 8), torch.tensor([2]), 8)
