"""Products in FP8 by name against float64, in Triton's interpreter and torch on a CPU, or on a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.support.slow import mostly_slow
from weft.ops.coded import Codes, dequantize
from weft.ops.registry import choose
from weft.ops.triton import interpreting, takes_fp8

Tensor = torch.Tensor

THERE = torch.cuda.is_available()
DEVICE = "cuda" if THERE else "cpu"
READY = importlib.util.find_spec("triton") is not None and (THERE or interpreting()) and takes_fp8()
pytestmark = [
    pytest.mark.skipif(not READY, reason="needs Triton, and a GPU with FP8 products or TRITON_INTERPRET=1"),
    *([pytest.mark.gpu] if THERE else []),
]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE, torch.bfloat16)


def exact(values: Tensor, scales: Tensor) -> Tensor:
    return values.double() * scales.double()


def test_rows_are_rounded() -> None:
    """Rows of zeros, of large and of small numbers, in wider rows.

    The interpreter loses the carry where rounding reaches the next power of two."""
    from weft.ops.triton.scaled import LONGEST_ROW, rounded

    x = normal(4, 300)[:, :200]
    x[0], x[1], x[2] = 0, x[1] * 1e30, x[2] * 1e-20
    values, scales = rounded(x)
    assert torch.equal(scales[:, 0], (x.float().abs().amax(1) / 448).clamp(min=1e-12))
    wrong = (exact(values, scales) - x.double()).abs() > 17 * scales
    assert wrong.double().mean() <= (0 if THERE else 0.1)
    assert torch.equal(values[0].float(), torch.zeros(200, device=DEVICE))
    long = normal(1, LONGEST_ROW + 16)
    values, scales = rounded(long)
    assert (exact(values, scales) - long.double()).abs().max() <= 17 * scales[0, 0]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_row_that_is_no_number_stays_none(wrong: float) -> None:
    """A product of the row is not finite, so that sampling reports the row; other rows are as before."""
    from weft.ops.triton.scaled import linear, pack

    packed, x = pack(normal(32, 64)), normal(3, 64)
    before = linear(x, packed)
    x[1, 5] = wrong
    made = linear(x, packed)
    assert not made[1].isfinite().any()
    assert torch.equal(made[::2], before[::2])


def test_no_rows() -> None:
    from weft.ops.triton.scaled import linear, pack

    assert linear(normal(0, 64), pack(normal(32, 64))).shape == (0, 32)


@mostly_slow("rows", [1, 3, 64], [3])
def test_products_equal_float64(rows: int) -> None:
    """The product of the rounded numbers. Rounding both sides costs less than 5% of a product's size."""
    from weft.ops.triton.scaled import ScaledRows, linear, pack, rounded

    weight, x, bias = normal(48, 256), normal(rows, 256), normal(48)
    packed = pack(weight)
    assert isinstance(packed, ScaledRows)
    made = linear(x, packed, bias).double()
    mine = exact(*rounded(x)) @ exact(packed.values, packed.scales.t()).t() + bias.double()
    size = x.double().abs() @ weight.double().abs().t()
    assert ((made - mine).abs() <= 2.0**-7 * (mine.abs() + bias.double().abs()) + 2.0**-11 * size).all()
    plain = x.double() @ weight.double().t() + bias.double()
    assert (made - plain).abs().max() < 0.05 * size.max()


def test_sizes_without_a_product_are_codes() -> None:
    from weft.ops.triton.scaled import linear, pack

    weight, x = normal(40, 250), normal(3, 250)
    packed = pack(weight)
    assert isinstance(packed, Codes)
    made = linear(x, packed).double()
    assert (made - x.double() @ dequantize(packed, torch.float64).t()).abs().max() < 0.5


def test_deterministic_products_keep_x() -> None:
    """With ``--deterministic`` another implementation is chosen, and a row has the bits that it has alone."""
    name, device = "linear_w8a8-fp8", torch.device("cuda")
    assert choose(name, torch.bfloat16, device).name == "triton"
    op = choose(name, torch.bfloat16, device, invariant=True)
    assert op.name == "triton-invariant"
    pack: Any = op.pack
    packed, x = pack(normal(48, 128)), normal(5, 128)
    made = op.run(x, packed)
    assert torch.equal(op.run(x[:1].clone(), packed), made[:1]) or not THERE
    assert (made.double() - x.double() @ dequantize(packed, torch.float64).t()).abs().max() < 0.5
