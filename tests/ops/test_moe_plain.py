"""Routed blocks whose experts have two matrices: every form against the definition."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from tests.support.slow import mostly_slow
from weft.ops import triton as kernels
from weft.ops.implementations import moe_plain
from weft.ops.moe import Gate, Routed, by_gather, by_group
from weft.ops.moe_plain import LatentRouted
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


@pytest.mark.skipif(not kernels.interpreting(), reason="needs TRITON_INTERPRET=1")
@mostly_slow(
    ("form", "dtype", "bound", "invariant"),
    [
        ("", torch.float32, 1e-5, False),
        ("", torch.float32, 1e-5, True),
        ("", torch.bfloat16, 0.05, False),
        ("_int8", torch.float32, 0.05, False),
        ("_int4", torch.float32, 0.3, True),
    ],
    [("", torch.float32, 1e-5, True)],
)
def test_kernels_follow_the_definition(form: str, dtype: torch.dtype, bound: float, invariant: bool) -> None:
    """Experts without a gate on a GPU ask the host nothing, so their steps can be captured."""
    weights, x = weights_of(dtype)
    op = choose(f"moe_plain{form}", dtype, torch.device("cuda"), invariant=invariant)
    assert op.name == ("triton-invariant" if invariant else "triton")
    assert not op.asks
    packed = weights if op.pack is None else op.pack(weights)
    assert distance(op.run(x, None, packed), expected(x, weights)) <= bound


@pytest.mark.slow
@pytest.mark.skipif(not kernels.interpreting(), reason="needs TRITON_INTERPRET=1")
def test_kernels_of_latent_experts_equal_torch() -> None:
    """The experts read and write rows of another width; the shared expert does not."""
    weights, x = weights_of(torch.float32)
    generator = torch.Generator().manual_seed(1)
    width = 24
    enter, leave = (torch.randn(size, generator=generator) / 8 for size in ((width, HIDDEN), (HIDDEN, width)))
    narrow = replace(weights, gate_up=weights.gate_up[:, :, :width], down=weights.down[:, :width])
    narrow = replace(narrow, gate_up=narrow.gate_up.contiguous(), down=narrow.down.contiguous())
    latent = LatentRouted(
        **{one.name: getattr(narrow, one.name) for one in fields(narrow)},
        enter=lambda rows: rows @ enter.T,
        leave=lambda rows: rows @ leave.T,
    )
    here, there = (
        choose("moe_plain", torch.float32, torch.device(where), invariant=where == "cuda")
        for where in ("cpu", "cuda")
    )
    assert distance(there.run(x, None, latent), here.run(x, None, latent).double()) < 1e-5
