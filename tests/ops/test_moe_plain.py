"""Routed blocks whose experts have two matrices: every form against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.ops.implementations import moe_plain
from weft.ops.moe import Gate, Routed, by_gather, by_group
from weft.ops.registry import choose
from weft.ops.routing import Rule, route

Tensor = torch.Tensor

HIDDEN, INNER, EXPERTS, SHARED = 64, 32, 5, 64
RULE = Rule(top_k=2, scoring="sigmoid", renormalize=True, scale=1.5)


def weights_of(dtype: torch.dtype) -> tuple[Routed, Tensor]:
    """Return random weights, and rows x [9, hidden]."""
    generator = torch.Generator().manual_seed(0)

    def noise(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    exact = torch.float64 if dtype == torch.float64 else torch.float32
    weights = Routed(
        rule=RULE,
        gate=Gate(activation="relu2"),
        router=noise(EXPERTS, HIDDEN).to(exact),
        correction=noise(EXPERTS).to(exact),
        gate_up=(noise(EXPERTS, INNER, HIDDEN) / 8).to(dtype),
        down=(noise(EXPERTS, HIDDEN, INNER) / 8).to(dtype),
        shared_gate_up=(noise(SHARED, HIDDEN) / 8).to(dtype),
        shared_down=(noise(HIDDEN, SHARED) / 8).to(dtype),
        dtype=dtype,
    )
    return weights, noise(9, HIDDEN).to(dtype)


def expected(x: Tensor, weights: Routed) -> Tensor:
    """Return the block by the definition in float64, token by token."""
    x = x.double()
    chosen, scales = route(x @ weights.router.double().T, RULE, weights.correction.double())
    made = (x @ weights.shared_gate_up.double().T).relu().square() @ weights.shared_down.double().T
    for token, (experts, factors) in enumerate(zip(chosen.tolist(), scales.tolist(), strict=True)):
        for expert, factor in zip(experts, factors, strict=True):
            inner = (weights.gate_up[expert].double() @ x[token]).relu().square()
            made[token] += factor * (weights.down[expert].double() @ inner)
    return made


def distance(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("form", "dtype", "bound"),
    [
        ("", torch.float64, 1e-12),
        ("", torch.float32, 1e-5),
        ("_int8", torch.float32, 0.05),
        ("_w8a8", torch.float32, 0.05),
        ("_int4", torch.float32, 0.3),
    ],
)
def test_the_block_follows_the_definition(
    form: str, dtype: torch.dtype, bound: float, invariant: bool
) -> None:
    weights, x = weights_of(dtype)
    op = choose(f"moe_plain{form}", dtype, torch.device("cpu"), invariant=invariant)
    packed = weights if op.pack is None else op.pack(weights)
    found = op.run(x, None, packed)
    assert distance(found, expected(x, weights)) <= bound
    if invariant:
        alone = torch.cat([op.run(x[row : row + 1], None, packed) for row in range(len(x))])
        assert torch.equal(found, alone)


@pytest.mark.parametrize("form", [by_gather, by_group])
def test_forms_without_a_wait_equal_the_loop(form: Any) -> None:
    weights, x = weights_of(torch.bfloat16)
    ids = torch.tensor([[0, 4], [1, 1], [3, 2]])
    loop = choose("moe_plain_pieces", torch.bfloat16, torch.device("cpu")).run().experts(x[:3], ids, weights)
    assert distance(form(x[:3], ids, weights, moe_plain.plain), loop.double()) < 0.02
