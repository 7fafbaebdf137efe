"""The merge of two attention results."""

from __future__ import annotations

import math

import pytest
import torch

from weft.attention.mla.merge import merge

NAN, INF = float("nan"), float("inf")


@pytest.mark.requirement("B13")
def test_two_empty_states_give_zero_and_no_mass() -> None:
    out, mass = merge(torch.zeros(2, 3), torch.full((2,), -INF), torch.zeros(2, 3), torch.full((2,), -INF))
    assert torch.equal(out, torch.zeros(2, 3))
    assert torch.equal(mass, torch.full((2,), -INF))


@pytest.mark.parametrize("garbage", [NAN, INF, 7.0])
def test_nothing_of_an_empty_state_enters(garbage: float) -> None:
    """The output of the empty state may hold anything, on either side."""
    one, mass = torch.tensor([[1.5, -2.0]]), torch.tensor([0.25])
    empty, nothing = torch.full((1, 2), garbage), torch.tensor([-INF])
    for made in (merge(one, mass, empty, nothing), merge(empty, nothing, one, mass)):
        assert torch.equal(made[0], one)
        assert torch.equal(made[1], mass)
    both = merge(empty, nothing, empty, nothing)
    assert torch.equal(both[0], torch.zeros(1, 2))
    assert torch.equal(both[1], nothing)


def test_is_attention_over_both_parts() -> None:
    torch.manual_seed(0)
    scores, values = torch.randn(4, 9, dtype=torch.float64) * 30, torch.randn(9, 5, dtype=torch.float64)

    def part(keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return scores[:, keys].softmax(-1) @ values[keys], scores[:, keys].logsumexp(-1)

    out, mass = merge(*part(slice(0, 4)), *part(slice(4, 9)))
    assert torch.allclose(out, scores.softmax(-1) @ values, rtol=1e-13, atol=1e-13)
    assert torch.allclose(mass, scores.logsumexp(-1), rtol=1e-14)


def test_masses_far_apart_neither_overflow_nor_vanish() -> None:
    out, mass = merge(torch.ones(1, 1), torch.tensor([1e4]), torch.zeros(1, 1), torch.tensor([1e4 - 1]))
    assert math.isclose(float(out), 1 / (1 + math.exp(-1)), rel_tol=1e-6)
    out, mass = merge(torch.ones(1, 1), torch.tensor([-1e4]), torch.zeros(1, 1), torch.tensor([1e4]))
    assert float(out) == 0.0
    assert float(mass) == 1e4


def test_a_broken_row_stays_broken_and_alone() -> None:
    out, _ = merge(torch.ones(2, 2), torch.tensor([NAN, 0.0]), torch.ones(2, 2), torch.tensor([0.0, 0.0]))
    assert out[0].isnan().all()
    assert torch.equal(out[1], torch.ones(2))
