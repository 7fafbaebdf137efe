"""Weights of 8 and of 4 bits times rows that the CPU extension rounds to 16 bits (csrc/rounded.h)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.ops.test_cpu_linear import HALF_ULP, assert_gated, case
from tests.support.routed import routed, tokens
from weft.layers.build import Build
from weft.ops import coded, cpu, moe, torch_ops
from weft.ops.cpu import linear as ops
from weft.ops.cpu import moe as experts

Tensor = torch.Tensor

SHAPES = ((70, 33), (34, 64), (6, 1), (40, 200), (96, 1152))
LARGEST = 127 * 256 + 127

pytestmark = pytest.mark.usefixtures("extension")


@pytest.fixture(autouse=True)
def words(extension: None) -> None:
    if "word_rows" not in cpu.capabilities():
        pytest.skip("needs a build that rounds rows to 16 bits: VNNI, and no fast products of bf16")


def rounded(x: Tensor, group: int) -> Tensor:
    """Return rows [T, K] rounded to 16 bits by the rule of csrc/rounded.h, float64."""
    filled = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % group)).unflatten(1, (-1, group))
    largest = filled.abs().amax(-1, keepdim=True)
    steps = 2.0 ** torch.floor(torch.log2(largest.clamp(min=2.0**-126)) - 14).clamp(min=-126)
    steps = torch.where(largest / steps > LARGEST, 2 * steps, steps)
    return ((filled / steps).round() * steps).flatten(1)[:, : x.shape[1]]


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return rows with outliers, of very different sizes, and of zeros."""
    x, _, _ = case(count, (1, inputs), torch.float32)
    x[:, inputs // 3] *= 1000
    for row, scale in enumerate((1e-30, 1e30, 0.0, 2.0**-125, 1e-38)):
        x[2 * row + 1] *= scale
    x[0, 0] = 255 * 2.0**3  # the only fraction of bf16 that needs the next power of two
    return x.to(dtype)


def rounds_rows(packed: ops.PackedMatrix) -> bool:
    """Return True if products with ``packed`` round rows of x to 16 bits."""
    return packed.coding is not None and packed.coding["numbers"] in coded.WORD_ROWS.values()


def close(found: Tensor, rows: Tensor, weight: Tensor) -> bool:
    """Return True if ``found`` is the product up to float32 sums of groups and one rounding."""
    wanted = rows @ weight.T
    bound = 1e-6 * (rows.abs() @ weight.abs().T) + 2.0**-126
    return bool(
        ((found.double() - wanted).abs() <= bound + 1.01 * HALF_ULP[found.dtype] * wanted.abs()).all()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("group", coded.ROW_GROUPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_bytes_are_those_of_rounded_rows(
    shape: tuple[int, int], group: int, dtype: torch.dtype
) -> None:
    _, weight, _ = case(1, shape, torch.bfloat16)
    x = rows_of(45, shape[1], dtype)
    made = torch_ops.to_int8(weight)
    used = made.values.double() * made.scales.double()
    packed = ops.pack_int8(weight, group=group)
    assert packed.coding is not None
    found = ops.linear(x, packed)
    assert close(found, rounded(x, group), used)
    for row in (*range(15), 44):
        assert torch.equal(ops.linear(x[row : row + 1], packed), found[row : row + 1])
    for rows in (2, 7, 29):
        assert torch.equal(ops.linear(x[:rows], packed), found[:rows])
    x[7, shape[1] // 2] = float("inf")
    again = ops.linear(x, packed)
    assert again[7].isnan().all()
    assert torch.equal(again[8:], found[8:])


@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_nibbles_are_those_of_rounded_rows(shape: tuple[int, int]) -> None:
    _, weight, _ = case(1, shape, torch.bfloat16)
    x = rows_of(45, shape[1])
    used = coded.dequantize(coded.to_int4(weight), torch.float64)
    packed = ops.pack_int4(weight)
    found = ops.linear(x, packed)
    assert close(found, rounded(x, coded.INT4_GROUP), used)
    for rows in (1, 3, 5, 12, 13, 29):
        assert torch.equal(ops.linear(x[:rows], packed), found[:rows])
    x, _, bias = case(45, shape, torch.bfloat16)
    gated = ops.gated_linear(x, ops.pack_gated_int4(weight), bias, "silu")
    assert_gated(gated, x, used, bias, "silu", rounded(x, coded.INT4_GROUP))


def test_numbers_of_bf16_near_the_largest_are_exact() -> None:
    """Rows without small numbers have the sums of exact rows."""
    x = (torch.randn(9, 256).abs().clamp(0.05, 3) * torch.randn(9, 256).sign()).bfloat16()
    assert torch.equal(rounded(x, 128), x.double())
    weight = torch.eye(256).bfloat16()
    assert torch.equal(ops.linear(x, ops.pack_int8(weight)), x)


def test_many_inputs_are_rounded_like_those_of_a_rank() -> None:
    """A matrix with more inputs than one sum of bytes takes: groups have sums of their own."""
    inputs = 73_728
    x, weight = torch.ones(3, inputs).bfloat16(), torch.ones(2, inputs).bfloat16()
    x[1] = -1
    weight[1, 1::2] = -1
    packed = ops.pack_int8(weight)
    assert rounds_rows(packed)
    assert packed.coding == ops.pack_int8(weight[:, : inputs // 2].contiguous()).coding
    assert torch.equal(ops.linear(x, packed), torch.tensor([[1.0, 0], [-1, 0], [1, 0]]).bfloat16() * inputs)
    head = ops.pack_codes(torch_ops.to_int8_codes(weight))
    assert isinstance(head, ops.PackedMatrix)
    assert rounds_rows(head)


def test_a_head_of_8_bits_is_also_a_table() -> None:
    _, weight, _ = case(1, (70, 200), torch.bfloat16)
    codes = torch_ops.to_int8_codes(weight)
    packed, ids = ops.pack_codes(codes), torch.tensor([0, 69, 33])
    assert isinstance(packed, ops.PackedMatrix)
    assert packed.coding == codes.coding._asdict()
    exact = coded.dequantize(codes, torch.float64)
    assert torch.equal(ops.coded_embedding(ids, packed, torch.bfloat16), exact[ids].bfloat16())
    x = rows_of(45, 200)
    assert close(ops.linear(x, packed), rounded(x, 128), exact)


def test_experts_are_those_of_rounded_rows() -> None:
    """In float32, where rows in 16 bits differ from the rows."""
    plain = routed("gated_shared", torch.float32, hidden=256, inner=192, shared=128)
    weights = moe.in_int4(moe.rounded(plain, lambda matrices: coded.to_int4(matrices.bfloat16())))

    def block(x: Tensor, group: int) -> Tensor:
        def matrix(x: Tensor, weight: coded.Codes, bias: Tensor | None) -> Tensor:
            used = coded.dequantize(weight, torch.float64)
            return torch_ops.linear(rounded(x, group) if group else x, used, bias)

        by_expert = partial(moe.by_expert, matrix=matrix)
        return moe.block(x, ids, weights, moe.Pieces(F.linear, matrix, torch_ops.gated, by_expert))

    x, ids = tokens(37, torch.float32, hidden=256)
    found, wanted, exact = (
        experts.moe(x, ids, experts.pack(weights)),
        block(x.double(), 64),
        block(x.double(), 0),
    )
    assert (found - wanted).norm() <= 0.2 * (exact - wanted).norm()


def test_halves_of_experts_are_rounded_by_themselves() -> None:
    weights = routed("gated_shared", torch.bfloat16)
    for pack, numbers in ((experts.pack_int8, 10), (experts.pack_int4, 11)):
        for inner, shared in ((64, 0), (0, 64)):
            made = pack(replace(weights, inner_group=inner, shared_inner_group=shared)).matrices
            for matrix, group in ((made.down, inner), (made.shared_down, shared)):
                words = matrix.coding is not None and matrix.coding.numbers == numbers
                assert words == (group > 0)
                assert not words or matrix.coding.group == group
            assert made.up.coding.numbers == made.shared_up.coding.numbers == numbers


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("inputs", "group"), [(1024, 128), (512, 64), (1408, 0)])
def test_ranks_round_the_groups_of_one_rank(quantization: str, inputs: int, group: int) -> None:
    """Sums over two, four and eight ranks are those of one rank, where ranks have whole groups."""
    build = Build(dtype=torch.bfloat16, device=torch.device("cpu"), quantization=quantization)
    op = build.matrix_op("linear", divided=inputs)
    assert op.pack is not None
    x, weight = rows_of(11, inputs)[::2], torch.randn(7, inputs).bfloat16()
    pack = op.pack
    if quantization == "int8":
        pack = partial(op.pack, largest=weight.abs().amax(dim=1, keepdim=True))
    whole = pack(weight)
    assert rounds_rows(whole) == (group > 0)
    if not group:
        return
    made = op.run(x, whole, None).double()
    for ranks in (2, 4, 8):
        parts = zip(x.chunk(ranks, dim=1), weight.chunk(ranks, dim=1), strict=True)
        total = sum(op.run(rows.float(), pack(part.contiguous()), None).double() for rows, part in parts)
        assert (
            (total - made).abs() <= 1.01 * 2.0**-8 * made.abs() + 1e-6 * x.double().norm(dim=1)[:, None]
        ).all()


@pytest.mark.parametrize(
    ("counts", "groups"),
    [((2, 4, 8), (0, 0)), ((2, 4), (64, 64)), ((2,), (128, 64)), ((), (128, 64))],
)
def test_rows_are_rounded_if_all_numbers_of_ranks_have_whole_groups(
    counts: tuple[int, ...], groups: tuple[int, int]
) -> None:
    """2,304 inputs: two ranks have 9 groups of 128, four ranks 9 groups of 64."""
    assert (coded.row_group("int8", 2304, counts), coded.row_group("int4", 2304, counts)) == groups
    cpu_device = torch.device("cpu")
    build = Build(dtype=torch.bfloat16, device=cpu_device, quantization="int8", rank_counts=counts)
    assert build.matrix_op("linear", divided=2304) is build.op(f"linear_int8-{groups[0] or 'exact'}")


def test_models_in_float32_keep_their_rows() -> None:
    weight = torch.randn(34, 1024)
    for quantization in ("int8", "int4"):
        build = Build(dtype=torch.float32, device=torch.device("cpu"), quantization=quantization)
        for op in (build.matrix_op("linear"), build.matrix_op("linear", divided=1024)):
            assert op.pack is not None
            assert not rounds_rows(op.pack(weight))
            assert rounds_rows(op.pack(weight.bfloat16()))
