"""The fast forms of the rule against the plain forms, and the distribution of sampled tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.support.slow import mostly_slow
from weft.ops import sampling as ops
from weft.types.sampling import TokenParams

NAN, INF = float("nan"), float("inf")


def noise(count: int, seed: int = 0) -> ops.Noise:
    positions = torch.arange(count)
    return ops.Noise(seed=torch.full((count,), seed), choice=positions % 3, position=positions)


@pytest.mark.parametrize("ties", [False, True])
@mostly_slow("dtype", [torch.float32, torch.float64], [torch.float32])
@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 6.0, 1e3, 1e15])
def test_skipping_hopeless_tokens_changes_nothing(
    make: SimpleNamespace, spread: float, dtype: torch.dtype, ties: bool
) -> None:
    of = make.scene(300, 700, seed=1, ties=ties)
    x = of.logits.to(dtype) * spread
    x[::7, 5:300] = -INF
    assert ops.sample_open(x, None, noise(300)).equal(ops.sample_all(x, noise(300)))
    for min_p in (0.0, 1e-8, 0.3, 1.0):
        column = torch.full((300,), min_p, dtype=torch.float64)
        weight = (x.double() - x.double().amax(1, keepdim=True)).exp()
        kept = x.masked_fill(weight < min_p, -INF)
        assert ops.sample_open(x, column, noise(300)).equal(ops.sample_all(kept, noise(300)))


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.8, 0.999, 1.0])
@pytest.mark.parametrize("top_k", [1, 2, 9, 60, 200, 600])
@pytest.mark.parametrize("min_p", [0.0, 0.01])
def test_looking_at_few_tokens_first_changes_nothing(
    make: SimpleNamespace, top_k: int, top_p: float, min_p: float, ties: bool
) -> None:
    count, vocab = 40, 600
    x = make.scene(count, vocab, seed=2, ties=ties).logits / 2
    x[::5, 50:] = -INF
    filters = ops.Filters(
        top_k=torch.full((count,), top_k),
        top_p=torch.full((count,), top_p, dtype=torch.float64),
        min_p=torch.full((count,), min_p, dtype=torch.float64),
        all_top_k=top_k < vocab,
    )
    general = ops.sample_filtered(x, filters, noise(count), ())
    for widths in ((1, 8, 64), (32,), (200, 599)):
        assert ops.sample_filtered(x, filters, noise(count), widths).equal(general)


def test_rows_with_and_without_top_k_may_be_filtered_together(make: SimpleNamespace) -> None:
    count, vocab = 60, 600
    x = make.scene(count, vocab, seed=4).logits
    filters = ops.Filters(
        top_k=torch.tensor([5, 20, vocab] * 20),
        top_p=torch.full((count,), 0.7, dtype=torch.float64),
        min_p=torch.zeros(count, dtype=torch.float64),
        all_top_k=False,
    )
    together = ops.sample_filtered(x, filters, noise(count), (64,))
    for row in range(count):
        one = slice(row, row + 1)
        alone = replace(filters.at(one), all_top_k=int(filters.top_k[row]) < vocab)
        assert ops.sample_filtered(x[one], alone, noise(count).at(one), (64,)).equal(together[one])


@pytest.mark.parametrize("count", [1, 3, 64, 129, 299, 300])
def test_top_ids_are_the_stable_order(make: SimpleNamespace, count: int) -> None:
    x = make.scene(50, 300, ties=True).logits
    x[::3, 100:250] = -INF
    expected = x.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    assert ops.top_ids(x, count).equal(expected)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 255, 256, 257, 300, 1000])
def test_first_max_is_the_first(vocab: int) -> None:
    x = torch.randint(0, 3, (200, vocab + 5), generator=torch.Generator().manual_seed(0)).float()
    x[::2] = 0
    x[::2, vocab // 2] = 2
    expected = np.argmax(x[:, :vocab].numpy(), axis=1)
    assert ops.first_max(x[:, :vocab]).tolist() == expected.tolist()
    x[:, vocab - 1] = NAN
    assert ops.first_max(x[:, :vocab]).tolist() == [vocab - 1] * 200


@pytest.mark.parametrize(
    "params",
    [
        TokenParams(temperature=1.0),
        TokenParams(temperature=0.7),
        TokenParams(top_k=5),
        TokenParams(top_p=0.8, temperature=1.5),
        TokenParams(min_p=0.1),
        TokenParams(top_k=9, top_p=0.9, min_p=0.04, temperature=1.3),
    ],
    ids=str,
)
@pytest.mark.parametrize("fixed", ["seed", "position"])
def test_samples_follow_the_distribution(
    plain: SimpleNamespace, make, params: TokenParams, fixed: str
) -> None:
    """Chi-square over 8,000 fixed draws, at the statistic's 99.9th percentile (Wilson and Hilferty)."""
    vocab, draws = 12, 8_000
    logits = torch.tensor([[1.3, -0.4, 2.0, 0.0, 0.7, -2.0, 1.9, 0.3, -1.0, 1.1, -0.2, 0.5]])
    scaled = logits[0].double() / params.temperature
    kept, _ = plain.kept(scaled.tolist(), params)
    weights = torch.softmax(scaled[kept], dim=0)
    if fixed == "seed":
        slots, positions = [0] * draws, list(range(draws))
        sampler = make.sampler([params], vocab=vocab, seeds=[12345])
    else:
        slots, positions = list(range(draws)), [17] * draws
        sampler = make.sampler([params] * draws, vocab=vocab, seeds=list(range(draws)))
    history = torch.zeros(len(set(slots)), 1, dtype=torch.int32)
    rows = make.rows(slots, range(draws), positions)
    tokens = sampler.sample(logits.expand(draws, -1), rows, history, history[:, 0].long()).tokens
    counts = torch.bincount(tokens, minlength=vocab).double()
    assert counts.sum() == counts[kept].sum()
    expected = weights * draws
    statistic = float(((counts[kept] - expected) ** 2 / expected).sum())
    free = len(kept) - 1
    limit = free * (1 - 2 / (9 * free) + 3.0902 * math.sqrt(2 / (9 * free))) ** 3
    assert statistic < limit
