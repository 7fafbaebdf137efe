"""Linear layers of the CPU extension: close to float64, and every row's bits its own."""

from __future__ import annotations

import pytest
import torch

from tests.support.pairwise import sampled
from weft.ops import torch_ops
from weft.ops.cpu import linear as ops

Tensor = torch.Tensor

DTYPES = (torch.bfloat16, torch.float32)
#: (outputs, inputs): whole blocks, tails of both, odd inputs, one of each.
SHAPES = ((1280, 768), (768, 2304), (70, 33), (34, 64), (6, 1), (2, 130))
ROWS = (0, *range(1, 65), 100, 512)
FEW_ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 33, 64, 512)
"""Of several threads."""
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
    """The float64 product, and a bound of what float32 sums in any order may miss it by."""
    added = torch.zeros(weight.shape[0]).double() if bias is None else bias.double()
    product = x.double() @ weight.double().T + added
    magnitude = x.double().abs() @ weight.double().abs().T + added.abs()
    return product, (x.shape[1] + 3) * 2.0**-23 * magnitude


def assert_linear(made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    product, slack = exact(x, weight, bias)
    assert made.dtype == x.dtype
    assert made.shape == product.shape
    assert ((made.double() - product).abs() <= slack + 1.01 * HALF_ULP[x.dtype] * product.abs()).all()


def assert_gated(made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    product, slack = exact(x, weight, bias)
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
        # Rows whose scale is 1: one weight of 127 each, and the value under test.
        weight = torch.stack([values, torch.full_like(values, 127)], dim=1).to(dtype)
        x = torch.tensor([[1.0, 0.0]], dtype=dtype)
        assert torch.equal(ops.linear(x, ops.pack_int8(weight))[0].float(), values)


@sampled(
    {
        "dtype": list(DTYPES),
        "shape": [(1280, 768), (768, 2304), (70, 33), (70, 4650), (70, 6176)],
        "form": ["linear", "gated", "int8", "gated_int8"],
    },
    slow=True,
)
def test_bits_of_a_row_are_its_own(
    dtype: torch.dtype, shape: tuple[int, int], form: str, kernel: str, threads: None
) -> None:
    """Whatever the number of rows, its place, the other rows, and the number of threads."""
    x, weight, bias = case(1024, shape, dtype)
    pack = {"linear": ops.pack, "gated": ops.pack_gated, "int8": ops.pack_int8}.get(form, ops.pack_gated_int8)
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
        # One float is a step of its own, so the shape has to differ too.
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
