"""Low-rank parts of layers: values, rows without an adapter, packed bases."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from weft.layers.build import AdapterOptions, Build
from weft.layers.dense import GateUp, Linear, RowLinear
from weft.layers.shard import whole
from weft.ops.low_rank import AdapterRows

CPU = torch.device("cpu")
INPUTS, OUTPUTS, ROWS = 64, 48, 9
PLACES = [-1, 1, 1, 0, -1, 2, 1, -1, 0]
QUANTIZATIONS = ["none", "int8", "w8a8", "int4", "w4a8", "fp8"]


def build(dtype: torch.dtype, quantization: str = "none", places: int = 3) -> Build:
    options = AdapterOptions(places=places, rank=4 if places else 0)
    return Build(dtype=dtype, device=CPU, quantization=quantization, adapters=options)


def filled(layer: Any, spans: list[tuple[int, int, int]], inputs: int = INPUTS) -> Any:
    """Fill the weight and the places 0 and 1 of a layer with random values; place 2 has no matrices here."""
    random = torch.Generator().manual_seed(4)
    layer.weight.data.copy_(torch.randn(layer.weight.shape, generator=random))
    outputs = layer.weight.shape[0]
    parts = 1 + max(part for part, _, _ in spans)
    if layer.low is not None:
        layer.low.allocate(parts, (outputs, inputs), spans)
        for place, rank in ((0, 4), (1, 2)):
            pool = layer.low.pool
            pool.a[place, :, :rank].copy_(torch.randn(parts, rank, inputs, generator=random) * 0.2)
            pool.b[place, :rank].copy_(torch.randn(rank, outputs, generator=random) * 0.2)
            pool.set_rank(place, rank)
    layer.pack()
    return layer


def rows() -> AdapterRows:
    return AdapterRows(torch.tensor(PLACES, dtype=torch.int32), sorted({p for p in PLACES if p >= 0}))


def due(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Return what the adapters add to each row, [rows, outputs]."""
    pool = layer.low.pool
    made = x.new_zeros(len(x), pool.b.shape[2])
    for row, place in enumerate(PLACES):
        for part, begin, end in pool.spans if place >= 0 else ():
            made[row, begin:end] = x[row] @ pool.a[place, part].T @ pool.b[place, :, begin:end]
    return made


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_packed_base_gets_the_same_addition(quantization: str) -> None:
    x = torch.randn(ROWS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for layer in (
        filled(Linear(INPUTS, OUTPUTS, build(x.dtype, quantization)), [(0, 0, 16), (1, 16, 40), (2, 40, 48)]),
        filled(RowLinear(whole(INPUTS), OUTPUTS, build(x.dtype, quantization)), [(0, 0, OUTPUTS)]),
    ):
        base, adapted = layer(x), layer(x, rows())
        torch.testing.assert_close(adapted, base + due(layer, x), rtol=1e-12, atol=1e-12)
        without = [row for row, place in enumerate(PLACES) if place in (-1, 2)]
        assert torch.equal(adapted[without], base[without])


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_activation_comes_after_the_addition(quantization: str) -> None:
    x = torch.randn(ROWS, INPUTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    spans = [(0, 0, 24), (1, 24, 48)]
    layer = filled(GateUp(INPUTS, whole(24), "silu", build(x.dtype, quantization), bias=False), spans)
    plain = filled(GateUp(INPUTS, whole(24), "silu", build(x.dtype, quantization, 0), bias=False), spans)
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-12, atol=1e-12)
    linear = filled(Linear(INPUTS, 48, build(x.dtype, quantization)), spans)
    gate, up = (linear(x) + due(layer, x)).chunk(2, dim=-1)
    torch.testing.assert_close(layer(x, rows()), F.silu(gate) * up, rtol=1e-12, atol=1e-12)


def test_a_layer_without_places_has_no_low_rank_part() -> None:
    for layer in (
        Linear(INPUTS, OUTPUTS, build(torch.float32, places=0)),
        RowLinear(whole(INPUTS), OUTPUTS, build(torch.float32, places=0)),
        GateUp(INPUTS, whole(24), "silu", build(torch.float32, places=0), bias=False),
    ):
        assert layer.low is None


def test_rows_of_an_index() -> None:
    chosen = rows().at(torch.tensor([1, 4, 5]))
    assert chosen.numbers.tolist() == [1, -1, 2]
    assert [(place, found.tolist()) for place, found in chosen.groups() if found is not None] == [
        (1, [0]),
        (2, [2]),
    ]
    alike = AdapterRows(torch.tensor([1, 1], dtype=torch.int32), [1])
    assert alike.groups() == [(1, None)]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_factors_on_a_packed_base(quantization: str) -> None:
    """Lengths of rows are those of the weight that the layer computes with, and the bias has no factor."""
    dtype = torch.float64
    layer = Linear(INPUTS, OUTPUTS, build(dtype, quantization), bias=True)
    layer.bias.data.copy_(torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(3)))
    filled(layer, [(0, 0, 16), (1, 16, 40), (2, 40, 48)])
    pool = layer.low.pool
    weight = layer.low.base(torch.eye(INPUTS, dtype=dtype)).T
    added = torch.cat([pool.b[0, :, begin:end].T @ pool.a[0, part] for part, begin, end in pool.spans])
    squares = layer.low.squares(INPUTS, pool.a[0], pool.b[0])
    exact = 1e-12 if quantization not in ("w8a8", "w4a8") else 2e-2  # these forms also round the rows of A
    torch.testing.assert_close(squares, (weight + added).square().sum(1), rtol=exact, atol=exact)
    factors = torch.rand(OUTPUTS, generator=torch.Generator().manual_seed(5), dtype=dtype) + 0.5
    x = torch.randn(ROWS, INPUTS, dtype=dtype, generator=torch.Generator().manual_seed(1))
    plain = layer(x, rows())
    pool.factors[0] = factors
    scaled = layer(x, rows())
    for row, place in enumerate(PLACES):
        due = (plain[row] - layer.bias) * factors + layer.bias if place == 0 else plain[row]
        torch.testing.assert_close(scaled[row], due, rtol=1e-12, atol=1e-12)
