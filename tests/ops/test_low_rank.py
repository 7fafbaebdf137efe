"""Low-rank products of the extension: values of the torch reference, and rows that depend on nothing else."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

from weft.ops import triton as kernels
from weft.ops.cpu import low_rank as extension
from weft.ops.low_rank import AdapterRows, LowRankPool, low_rank, make_pool

PLACES, MOST = 4, 11
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(33, 70, 1), (1100, 96, 2), (48, 17, 3)]


CPU = torch.device("cpu")


def random_pool(
    outputs: int, inputs: int, parts: int, dtype: torch.dtype, device: torch.device = CPU
) -> LowRankPool:
    """Return a pool with ranks 11, 3, 0 and 1. The last output belongs to no part."""
    bounds = [outputs * part // parts for part in range(parts)] + [outputs - 1]
    spans = [(part, bounds[part], bounds[part + 1]) for part in range(parts)]
    pool = make_pool(PLACES, MOST, parts, (outputs, inputs), spans, dtype, device)
    for place, rank in enumerate((11, 3, 0, 1)):
        pool.a[place, :, :rank].copy_(torch.randn(parts, rank, inputs) * 0.3)
        pool.b[place, :rank].copy_(torch.randn(rank, outputs) * 0.3)
        pool.set_rank(place, rank)
    return pool


def widened(pool: LowRankPool) -> LowRankPool:
    """Return the pool in float64."""
    return replace(pool, a=pool.a.double(), b=pool.b.double())


def places(count: int) -> AdapterRows:
    numbers = torch.randint(-1, PLACES, (count,), dtype=torch.int32).sort().values.roll(1)
    return AdapterRows(numbers, sorted({n for n in numbers.tolist() if n >= 0}))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "parts"), SHAPES)
def test_values_of_the_reference(outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(outputs)
    pool = random_pool(outputs, inputs, parts, dtype)
    for count in (1, 2, 7, 40):
        x, y, rows = (
            torch.randn(count, inputs).to(dtype),
            torch.randn(count, outputs).to(dtype),
            places(count),
        )
        due = y.double()
        low_rank(due, x.double(), widened(pool), rows)
        made = y.clone()
        extension.low_rank(made, x, pool, rows)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(made.double(), due, rtol=tolerance, atol=tolerance)
        idle = (rows.numbers < 0) | (rows.numbers == 2)
        assert torch.equal(made[idle], y[idle])
        assert torch.equal(made[:, -1], y[:, -1])


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("outputs", "inputs", "parts"), SHAPES)
def test_bits_of_a_row_alone(outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inputs)
    pool = random_pool(outputs, inputs, parts, dtype)
    x, y, rows = torch.randn(23, inputs).to(dtype), torch.randn(23, outputs).to(dtype), places(23)
    together = y.clone()
    extension.low_rank(together, x, pool, rows)
    for row in range(23):
        alone = y[row : row + 1].clone()
        extension.low_rank(
            alone, x[row : row + 1], pool, AdapterRows(rows.numbers[row : row + 1], rows.present)
        )
        assert torch.equal(alone[0], together[row])


TRITON = importlib.util.find_spec("triton") is not None and (
    torch.cuda.is_available() or kernels.interpreting()
)


@pytest.mark.skipif(not TRITON, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("outputs", "inputs", "parts"), [(33, 70, 1), (300, 300, 2), (48, 17, 3)])
def test_the_kernel_of_triton(outputs: int, inputs: int, parts: int, dtype: torch.dtype) -> None:
    from weft.ops.triton.low_rank import low_rank as kernel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(outputs)
    pool = random_pool(outputs, inputs, parts, dtype, device)
    rows = AdapterRows(places(9).numbers.to(device), range(PLACES))
    x, y = (torch.randn(9, size).to(dtype).to(device) for size in (inputs, outputs))
    due = y.double()
    low_rank(due, x.double(), widened(pool), rows)
    made = y.clone()
    kernel(made, x, pool, rows)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(made.double(), due, rtol=tolerance, atol=tolerance)
    idle = (rows.numbers < 0) | (rows.numbers == 2)
    assert torch.equal(made[idle], y[idle])
    assert torch.equal(made[:, -1], y[:, -1])
    for row in range(9):
        alone = y[row : row + 1].clone()
        kernel(alone, x[row : row + 1], pool, AdapterRows(rows.numbers[row : row + 1], rows.present))
        assert torch.equal(alone[0], made[row])


def test_rows_of_a_segment() -> None:
    """A segment without an adapter has no rows. An empty list of places would mean a captured step."""
    rows = AdapterRows(torch.tensor([-1, -1, 2, 0, 2], dtype=torch.int32), [0, 2])
    assert rows.segment(0, 2) is None
    found = rows.segment(2, 3)
    assert found is not None
    assert found.present == (2,)
    assert rows.segment(2, 3) is found
    captured = AdapterRows(rows.numbers, ()).segment(0, 2)
    assert captured is not None
    assert captured.present == ()
