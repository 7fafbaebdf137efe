"""Adapters of experts on packed bases: single products equal the op, and rows depend on nothing else."""

from __future__ import annotations

import pytest
import torch

from weft.config.spec import MoESpec
from weft.layers.build import AdapterOptions, Build
from weft.moe.block import RoutedMLP
from weft.ops.low_rank import AdapterRows

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K, SHARED = 64, 40, 6, 2, 24
PLACES = [-1, 1, 1, 0, -1, 2, 1, -1, 0]
SPECS = {
    "plain": MoESpec(
        experts=EXPERTS,
        top_k=TOP_K,
        intermediate=INNER,
        renormalize=True,
        layers=(0,),
        shared=SHARED,
        shared_gate=True,
    ),
    "biased": MoESpec(
        experts=EXPERTS,
        top_k=TOP_K,
        intermediate=INNER,
        renormalize=True,
        layers=(0,),
        bias=True,
        limit=0.8,
        alpha=1.5,
    ),
}
FORMS = ["none", "int8", "w8a8", "int4", "w4a8", "fp8"]


def block(name: str, dtype: torch.dtype, quantization: str, scale: float = 0.2) -> RoutedMLP:
    """Return a block with adapters in the places 0 and 1; place 2 changes nothing here."""
    options = AdapterOptions(places=3, rank=4, experts=True)
    build = Build(dtype=dtype, device=CPU, quantization=quantization, adapters=options)
    made = RoutedMLP(HIDDEN, SPECS[name], "silu", build)
    random = torch.Generator().manual_seed(4)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    low = made.low
    assert low is not None
    stacks = [(low.up, EXPERTS, 2, HIDDEN, 2 * INNER), (low.down, EXPERTS, 1, INNER, HIDDEN)]
    stacks += [(low.shared_up, 1, 2, HIDDEN, 2 * SHARED), (low.shared_down, 1, 1, SHARED, HIDDEN)]
    for one, count, parts, inputs, outputs in stacks:
        if one is None:
            continue
        half = outputs // parts
        spans = [(part, part * half, (part + 1) * half) for part in range(parts)]
        one.allocate_stack(count, parts, (outputs, inputs), spans)
        for number in range(count):
            for place, rank in ((0, 4), (1, 2)):
                at = number * 3 + place
                one.pool.a[at, :, :rank].copy_(torch.randn(parts, rank, inputs, generator=random) * scale)
                one.pool.b[at, :rank].copy_(torch.randn(rank, outputs, generator=random) * scale)
                one.pool.set_rank(at, rank)
    low.changing |= {0, 1}
    low.changing_shared |= {0, 1} if SPECS[name].shared else set()
    made.pack()
    return made


def rows(numbers: list[int]) -> AdapterRows:
    return AdapterRows(
        torch.tensor(numbers, dtype=torch.int32), sorted({place for place in numbers if place >= 0})
    )


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(len(PLACES), HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("quantization", FORMS)
@pytest.mark.parametrize("name", SPECS)
def test_adapters_of_zeros_change_nothing(name: str, quantization: str) -> None:
    """The single products are the products of the packed op."""
    # Rows between both matrices are rounded to bfloat16 here, and perhaps to 8 bits after that.
    coarse = 1e-1 if quantization.endswith("a8") else 2e-2
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, coarse), (torch.float64, 1e-12)):
        made = block(name, dtype, quantization, scale=0.0)
        x = inputs(dtype)
        torch.testing.assert_close(made(x, None, rows(PLACES)), made(x), rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("quantization", ["none", "int4", pytest.param("w8a8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SPECS)
def test_bits_of_a_row_alone(name: str, quantization: str) -> None:
    made = block(name, torch.bfloat16, quantization)
    x = inputs(torch.bfloat16)
    together, base = made(x, None, rows(PLACES)), made(x)
    for row, place in enumerate(PLACES):
        alone = made(x[row : row + 1], None, rows([place]))
        assert torch.equal(alone[0], together[row]), row
        assert torch.equal(base[row], together[row]) == (place in (-1, 2))


def test_values_of_the_definition() -> None:
    made = block("plain", torch.float64, "none")
    x = inputs(torch.float64)
    low, packed = made.low, made._packed
    experts, scales, share = made._rank.route(x, None, packed)
    together = made(x, None, rows(PLACES))
    for row, place in enumerate(PLACES):
        due = torch.zeros(HIDDEN, dtype=torch.float64)
        matrices = [
            (packed.gate_up[e], packed.down[e], low.up.pool, low.down.pool, 3 * e + place, scale)
            for e, scale in zip(experts[row].tolist(), scales[row], strict=True)
        ]
        pools = low.shared_up.pool, low.shared_down.pool
        matrices.append((packed.shared_gate_up, packed.shared_down, *pools, place, share[row, 0]))
        for up, down, of_up, of_down, at, scale in matrices:
            if place >= 0:
                half = len(up) // 2
                added = [of_up.b[at].T[part * half :][:half] @ of_up.a[at, part] for part in range(2)]
                up = up + torch.cat(added)
                down = down + of_down.b[at].T @ of_down.a[at, 0]
            gate, value = (up @ x[row]).chunk(2)
            due += scale * (down @ (torch.nn.functional.silu(gate) * value))
        torch.testing.assert_close(together[row], due, rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_factors_leave_biases_alone(dtype: torch.dtype) -> None:
    """DoRA: the product without the bias is scaled, in torch and in the layout of the C++ operations."""
    made = block("biased", dtype, "none")
    products, x = made.products, inputs(dtype)
    numbers = torch.full((len(x),), 2 * 3 + 1, dtype=torch.int32)
    at = AdapterRows(numbers, [2 * 3 + 1])
    for low, product, bias in (
        (made.low.up, products.up, products.biases(2)[0]),
        (made.low.down, products.down, products.biases(2)[1]),
    ):
        given = x if low is made.low.up else x[:, :INNER].contiguous()
        plain = product(2, given, biased=False)
        torch.testing.assert_close(plain + bias, product(2, given))
        low.add(plain, given, at)
        factors = torch.rand(len(bias), generator=torch.Generator().manual_seed(5), dtype=dtype) + 0.5
        low.pool.factors[2 * 3 + 1] = factors
        scaled = product(2, given)
        low.add(scaled, given, at, bias)
        torch.testing.assert_close(scaled, plain * factors + bias, rtol=1e-4, atol=1e-5)
