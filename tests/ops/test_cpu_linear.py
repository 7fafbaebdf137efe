"""Linear layers of the CPU extension: close to float64, and independent of other rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.pairwise import sampled
from weft.ops import coded, torch_ops
from weft.ops.cpu import linear as ops

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float32)
#: (outputs, inputs): whole blocks, tails of both, odd inputs, one of each.
SHAPES = ((1280, 768), (768, 2304), (70, 33), (34, 64), (6, 1), (2, 130))
ROWS = (0, *range(1, 65), 100, 512)
FEW_ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 512)
"""Row counts for several threads."""
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}

pytestmark = pytest.mark.usefixtures("extension")


def case(rows: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight, bias; sums are of order 1."""
    outputs, inputs = shape
    made = torch.Generator().manual_seed(rows + 7 * outputs + inputs)
    x = torch.randn(rows, inputs, generator=made)
    weight = torch.randn(outputs, inputs, generator=made) / inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(outputs, generator=made).to(dtype)


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the float64 product, and a bound on the error of float32 sums in any order."""
    added = torch.zeros(weight.shape[0]).double() if bias is None else bias.double()
    product = x.double() @ weight.double().T + added
    magnitude = x.double().abs() @ weight.double().abs().T + added.abs()
    return product, (x.shape[1] + 3) * 2.0**-23 * magnitude


def assert_linear(
    made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, meant: Tensor | None = None
) -> None:
    """Assert that ``made`` is within rounding of the product. ``meant`` is the float64 value of x, x by
    default.
    """
    product, slack = exact(x if meant is None else meant, weight, bias)
    assert made.dtype == x.dtype
    assert made.shape == product.shape
    assert ((made.double() - product).abs() <= slack + 1.01 * HALF_ULP[x.dtype] * product.abs()).all()


def assert_gated(
    made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, meant: Tensor | None = None
) -> None:
    """``meant``: as of ``assert_linear``."""
    product, slack = exact(x if meant is None else meant, weight, bias)
    gate, up = product.chunk(2, dim=1)
    gate_slack, up_slack = slack.chunk(2, dim=1)
    wanted = torch_ops.gated(product, activation)
    # No activation here is steeper than 1.13; the vector exponential is within 3e-7.
    miss = 1.2 * gate_slack * (up.abs() + up_slack) + up_slack * (gate.abs() + 1) + 1e-6 * (gate * up).abs()
    assert made.dtype == x.dtype
    assert made.shape == wanted.shape
    assert ((made.double() - wanted).abs() <= miss + 1.01 * HALF_ULP[x.dtype] * wanted.abs() + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_rounded_once(
    dtype: torch.dtype, shape: tuple[int, int], biased: bool, kernel: str
) -> None:
    x, weight, bias = case(45, shape, dtype)
    added = bias if biased else None
    assert_linear(ops.linear(x, ops.pack(weight), added), x, weight, added)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_linear(dtype: torch.dtype, shape: tuple[int, int], activation: str, kernel: str) -> None:
    x, weight, bias = case(45, shape, dtype)
    packed = ops.pack_gated(weight)
    for added in (bias, None):
        assert_gated(ops.gated_linear(x, packed, added, activation), x, weight, added, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 34), (1280, 768), (34, 63)])
def test_int8_is_its_quantized_matrix(dtype: torch.dtype, shape: tuple[int, int], kernel: str) -> None:
    x, weight, bias = case(45, shape, dtype)
    quantized = torch_ops.to_int8(weight)
    used = quantized.values.double() * quantized.scales.double()
    assert_linear(ops.linear(x, ops.pack_int8(weight), bias), x, used, bias)
    made = ops.gated_linear(x, ops.pack_gated_int8(weight), bias, "silu")
    assert_gated(made, x, used, bias, "silu")
    # Half a step of the largest weight of a row, for each input.
    error = (ops.linear(x, ops.pack_int8(weight)).double() - x.double() @ weight.double().T).abs()
    step = weight.double().abs().amax(dim=1) / 127
    product, slack = exact(x, weight, None)
    bound = 0.501 * x.double().abs().sum(dim=1, keepdim=True) * step + slack
    assert (error <= bound + 1.01 * HALF_ULP[dtype] * (product.abs() + bound)).all()


def test_every_int8_value_is_exact(kernel: str) -> None:
    values = torch.arange(-127, 128, dtype=torch.float32)
    for dtype in DTYPES:
        # Rows with scale 1: one weight of 127 each, and the value under test.
        weight = torch.stack([values, torch.full_like(values, 127)], dim=1).to(dtype)
        x = torch.tensor([[1.0, 0.0]], dtype=dtype)
        assert torch.equal(ops.linear(x, ops.pack_int8(weight))[0].float(), values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_8_bits_are_their_codes(dtype: torch.dtype, shape: tuple[int, int], kernel: str) -> None:
    """Sums of integers: the very numbers of the reference, and within half a step of x and of the weights."""
    x, weight, bias = case(45, shape, dtype)
    made = torch_ops.to_w8a8(weight)
    codes, steps = torch_ops.rounded_rows(x)
    assert codes.abs().max() == 127
    sums = (codes.double() @ made.values.double().T).float()
    assert sums.abs().max() < 2**24
    plain = sums * made.scales.float().view(1, -1) * steps + bias.float()
    assert torch.equal(ops.linear(x, ops.pack_w8a8(weight), bias), plain.to(dtype))
    assert torch.equal(torch_ops.linear_int8(x, made, bias), plain.to(dtype))
    assert (codes.double() * steps - x.double()).abs().le(0.501 * steps).all()
    found = ops.gated_linear(x, ops.pack_gated_w8a8(weight), bias, "silu")
    wanted = torch_ops.gated(plain.double(), "silu")
    assert ((found.double() - wanted).abs() <= 1e-6 + 1.01 * HALF_ULP[dtype] * wanted.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (70, 200)])
def test_rows_and_weights_of_8_bits_in_groups(
    dtype: torch.dtype, shape: tuple[int, int], kernel: str
) -> None:
    """Each group of inputs of x has its own step. A row that is not finite spoils no other row."""
    x, weight, bias = case(45, shape, dtype)
    x[:, 1::2] *= 100
    x[:, 64:192] *= 1e-3  # steps of groups differ
    x[7, shape[1] // 2] = float("inf")
    finite = x.isfinite().all(dim=1)
    for group in coded.ROW_GROUPS:
        made = torch_ops.to_w8a8(weight, group=group)
        codes, steps = torch_ops.rounded_rows(x, group)
        rows = (codes.double() * steps.double())[finite, : shape[1]]
        parts = made.values.double() * made.scales.double()
        wanted = rows @ parts.T + bias.double()
        bound = 1e-6 * (rows.abs() @ parts.abs().T + bias.double().abs())
        bound += 1.01 * HALF_ULP[dtype] * (wanted.abs() + bound)
        for found in (
            ops.linear(x, ops.pack_w8a8(weight, group=group), bias),
            torch_ops.linear_int8(x, made, bias),
        ):
            assert ((found[finite].double() - wanted).abs() <= bound).all()
            assert found[7].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_8_bits_in_groups(dtype: torch.dtype, shape: tuple[int, int], kernel: str) -> None:
    """int8 rows against int4 weights match the float64 reference within rounding, with steps per 64
    inputs.
    """
    x, weight, bias = case(45, shape, dtype)
    x[:, 1::2] *= 100  # steps differ between groups where there are some
    x[:, 64:128] *= 1e-3
    codes = coded.to_w4a8(weight)
    rounded, steps = torch_ops.rounded_rows(x, 64)
    rows = (rounded.double() * steps.double())[:, : x.shape[1]]
    meant = coded.dequantize(replace(codes, row_bits=None), torch.float64)
    assert_linear(ops.linear(x, ops.pack_w4a8(weight), bias), rows.to(dtype), meant, bias, rows)
    wanted = torch_ops.linear(x, codes, bias).double()
    assert (wanted - (rows @ meant.T + bias.double())).abs().max() <= 0.01 * wanted.abs().max()
    made = ops.gated_linear(x, ops.pack_gated_w4a8(weight), bias, "silu")
    assert_gated(made, rows.to(dtype), meant, bias, "silu", rows)


@pytest.mark.parametrize("pack", [ops.pack_w8a8, ops.pack_w4a8])
def test_no_rows_have_no_8_bits(pack: Any) -> None:
    x, weight, bias = case(0, (70, 130), torch.float32)
    assert ops.linear(x, pack(weight), bias).shape == (0, 70)
    assert torch_ops.linear(x, coded.to_w4a8(weight), bias).shape == (0, 70)
    assert torch_ops.linear_int8(x, torch_ops.to_w8a8(weight), bias).shape == (0, 70)


def test_largest_codes_and_many_inputs(kernel: str) -> None:
    """The largest integer sums of either sign do not overflow; more inputs are refused."""
    x = torch.ones(3, 65_000)
    x[1] = -1
    x[2, ::2] = -1
    weight = torch.ones(2, 65_000)
    weight[1] = -1
    made = ops.linear(x, ops.pack_w8a8(weight))
    assert torch.allclose(made, torch.tensor([[65e3, -65e3], [-65e3, 65e3], [0.0, 0.0]]), rtol=1e-6)
    with pytest.raises(RuntimeError, match="65000 inputs"):
        ops.pack_w8a8(torch.ones(1, 65_001))
    made = ops.linear(torch.ones(1, 73_728), ops.pack_w8a8(torch.ones(1, 73_728), group=128))
    assert made == 73_728


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pack", [ops.pack_w8a8, ops.pack_w4a8])
def test_rows_that_have_no_8_bits(pack: Any, dtype: torch.dtype, kernel: str) -> None:
    """Zeros stay zeros, a non-finite value spoils only its row, and very small and large values are
    rounded.
    """
    x, weight, bias = case(8, (70, 130), dtype)
    whole = ops.linear(x, pack(weight), bias)
    x[0] = 0
    x[1, 3] = float("nan")
    x[2, 5] = float("inf")
    x[3, 129] = -float("inf")
    x[4] *= 1e-38
    x[5] *= 1e37
    x[6] = torch.finfo(dtype).smallest_normal / 128
    made = ops.linear(x, pack(weight), bias)
    assert torch.equal(made[0], bias)
    assert made[1:4].isnan().all()
    assert (made[4] - bias).abs().max() <= 1e-6 + 2 * HALF_ULP[dtype] * bias.abs().max()
    assert made[5].isfinite().all()
    assert made[6].isfinite().all()
    assert torch.equal(made[7], whole[7])


@sampled(
    {
        "dtype": list(DTYPES),
        "shape": [(1280, 768), (768, 2304), (70, 33), (70, 4650), (70, 6176)],
        "form": [
            *("linear", "gated", "int8", "gated_int8", "w8a8", "w8a8-64", "w8a8-128"),
            *("gated_w8a8", "w4a8", "gated_w4a8"),
        ],
    },
    slow=True,
)
def test_bits_of_a_row_are_its_own(
    dtype: torch.dtype, shape: tuple[int, int], form: str, kernel: str, kept_threads: None
) -> None:
    """Bits depend on neither row count, place, other rows nor threads."""
    x, weight, bias = case(1024, shape, dtype)
    pack = {
        "linear": ops.pack,
        "gated": ops.pack_gated,
        "int8": ops.pack_int8,
        "gated_int8": ops.pack_gated_int8,
        "w8a8": ops.pack_w8a8,
        "w8a8-64": partial(ops.pack_w8a8, group=64),
        "w8a8-128": partial(ops.pack_w8a8, group=128),
        "gated_w8a8": ops.pack_gated_w8a8,
        "w4a8": ops.pack_w4a8,
        "gated_w4a8": ops.pack_gated_w4a8,
    }[form]
    packed = pack(weight)

    def run(rows: Tensor) -> Tensor:
        if "gated" in form:
            return ops.gated_linear(rows, packed, bias, "silu")
        return ops.linear(rows, packed, bias)

    whole = run(x)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert torch.equal(run(x), whole)
        for rows in ROWS if count == 1 else FEW_ROWS:
            begin = rows % 7
            assert torch.equal(run(x[begin : begin + rows]), whole[begin : begin + rows]), (count, rows)
    spoiled = x[:64].clone()
    spoiled[1::2] = float("nan")
    assert torch.equal(run(spoiled)[::2], whole[:64:2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_need_not_be_adjacent(dtype: torch.dtype) -> None:
    x, weight, bias = case(20, (70, 33), dtype)
    packed = ops.pack(weight)
    wanted = ops.linear(x, packed, bias)
    wide = torch.full((40, 50), float("nan"), dtype=dtype)
    wide[::2, 3:36] = x
    assert torch.equal(ops.linear(wide[::2, 3:36], packed, bias), wanted)
    assert torch.equal(ops.linear(x.T.contiguous().T, packed, bias), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_takes_any_strides(dtype: torch.dtype) -> None:
    x, weight, _ = case(3, (70, 33), dtype)
    wanted = ops.linear(x, ops.pack(weight))
    assert torch.equal(ops.linear(x, ops.pack(weight.T.contiguous().T)), wanted)
    assert torch.equal(ops.linear(x, ops.pack(torch.nn.Parameter(weight, requires_grad=False))), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(70, 33), (64, 64), (1, 1)])
def test_embedding_reads_the_heads_matrix(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    _, weight, _ = case(0, shape, dtype)
    packed = ops.pack(weight)
    ids = torch.randint(0, shape[0], (100,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(ops.embedding(ids, packed), weight[ids])
    assert torch.equal(ops.embedding(ids[::3], packed), weight[ids[::3]])
    assert ops.embedding(ids[:0], packed).shape == (0, shape[1])
    for wrong in (-1, shape[0]):
        with pytest.raises(IndexError):
            ops.embedding(torch.tensor([wrong]), packed)


def test_wrong_shapes_and_dtypes_are_refused() -> None:
    x, weight, bias = case(3, (64, 32), torch.bfloat16)
    packed = ops.pack(weight)
    with pytest.raises(RuntimeError, match="30 inputs"):
        ops.linear(x[:, :30], packed)
    with pytest.raises(RuntimeError, match="another dtype"):
        # A single float is a valid step, so the shape has to differ too.
        ops.linear(torch.randn(3, 16), packed)
    with pytest.raises(RuntimeError, match="bias must be"):
        ops.linear(x, packed, bias.float())
    with pytest.raises(RuntimeError, match="bfloat16 or float32"):
        ops.linear(x.double(), packed)
    with pytest.raises(RuntimeError, match="even number of rows"):
        ops.pack_gated(weight[:63])
    with pytest.raises(KeyError):
        ops.gated_linear(x, ops.pack_gated(weight), None, "tanh")


def test_infinite_sums_stay_infinite() -> None:
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    x = torch.tensor([[3e38, 3e38], [-3e38, -3e38], [float("nan"), 1]], dtype=torch.bfloat16)
    made = ops.linear(x, ops.pack(weight))
    assert made[0].isposinf().all()
    assert made[1].isneginf().all()
    assert made[2].isnan().all()
