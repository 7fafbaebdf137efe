"""GGML blocks have the values of the format's package, and products use these values."""

from __future__ import annotations

import pytest
import torch

from tests.ops.rows_alone import check_rows_alone
from tests.ops.test_cpu_linear import DTYPES, HALF_ULP, ROWS, case
from tests.support.ggml_blocks import drawn, fitted, meaning
from tests.support.pairwise import sampled
from weft.gguf.container import PACKED
from weft.ops import coded, cpu, ggml, implementations, torch_ops
from weft.ops.coded import Codes, MixedCodes
from weft.ops.cpu import linear as ops
from weft.ops.stacks import stacked

Tensor = torch.Tensor
assert implementations  # registers every one

KINDS = list(ggml.BLOCKS)
#: Types with scales in two levels, and the places of the float16 of minimums.
LEVELS = [kind for kind, block in ggml.BLOCKS.items() if block.coding.scales == 4]
MINIMUMS = {"Q4_K": 2, "Q5_K": 2, "Q2_K": 82}
#: Memory in relation to the file. Q3_K and Q2_K have 4 bits in memory.
MEMORY = {"Q3_K": 1.33, "Q2_K": 1.96}
#: (outputs, inputs): whole blocks, and some of the columns of a packed one.
SHAPES = ((128, 768), (70, 256), (6, 1280))


def codes_of(kind: str, shape: tuple[int, int], seed: int = 0) -> tuple[Codes, Tensor]:
    """Return (codes, their float64 values)."""
    raw = torch.from_numpy(drawn(kind, *shape, seed=seed))
    return coded.of_blocks(kind, raw), ggml.dequantize(kind, raw, torch.float64)


def test_types_that_stay_packed_are_those_that_are_known() -> None:
    assert set(PACKED) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_the_packages(kind: str) -> None:
    raw = drawn(kind, 37, 768)
    assert torch.equal(ggml.dequantize(kind, torch.from_numpy(raw), torch.float32), meaning(kind, raw))
    codes = coded.of_blocks(kind, torch.from_numpy(raw))
    assert codes.shape == (37, 768)
    assert codes.nbytes == raw.nbytes
    assert torch.equal(coded.dequantize(codes, torch.float32), meaning(kind, raw))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_table(kind: str) -> None:
    """Every number, exactly in float32 and rounded once to bf16; on torch the same."""
    codes, exact = codes_of(kind, (70, 1024))
    ids = torch.tensor([69, 0, 33, 33, 31, 64])
    for dtype in DTYPES:
        found = ops.coded_embedding(ids, ops.pack_codes(codes), dtype)
        assert torch.equal(found, exact.float()[ids].to(dtype))
        assert torch.equal(torch_ops.coded_embedding(ids, codes, dtype), found)
    with pytest.raises(IndexError, match="id 70 is not in a table of 70"):
        ops.coded_embedding(torch.tensor([70]), ops.pack_codes(codes), torch.float32)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_that_of_the_file(kind: str) -> None:
    codes, _ = codes_of(kind, (64, 1024))
    assert ops.pack_codes(codes).data.nbytes <= MEMORY.get(kind, 1.03) * codes.nbytes


def slack_of(kind: str, x: Tensor, codes: Codes, exact: Tensor) -> Tensor:
    """Return a bound on the error of float32 sums; with minimums it includes the subtracted part."""
    size = exact.abs()
    if (at := MINIMUMS.get(kind)) is not None:
        raw = codes.values.clone().unflatten(-1, (-1, ggml.BLOCKS[kind].bytes))
        raw[..., at : at + 2] = 0
        size = ggml.dequantize(kind, raw.flatten(-2), torch.float64).abs()
        size = size + (size - exact).abs()
    return (x.shape[1] + 3) * 2.0**-23 * (x.double().abs() @ size.T)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products(dtype: torch.dtype, kind: str, kernel: str) -> None:
    """Within the error of the sums of the dequantized matrix in float64."""
    tiles = "amx_bf16" in cpu.capabilities()  # scales of one level multiply sums
    rounded = kernel == "brgemm" and dtype == torch.bfloat16 and (kind in LEVELS or not tiles)
    for shape in SHAPES:
        codes, exact = codes_of(kind, shape)
        packed = ops.pack_codes(codes)
        gated = ops.pack_gated_codes(codes)
        for rows in (1, 2, 3, 45):
            x, _, bias = case(rows, shape, dtype)
            product = x.double() @ exact.T + bias.double()
            slack = slack_of(kind, x, codes, exact) + (2.0**-8 * (x.double().abs() @ exact.abs().T)) * rounded
            made = ops.linear(x, packed, bias)
            assert made.dtype == dtype
            miss = (made.double() - product).abs()
            assert (miss <= slack + 1.01 * HALF_ULP[dtype] * product.abs() + 1e-6 * bias.abs()).all()
            wanted = torch_ops.gated(product, "silu")
            found = ops.gated_linear(x, gated, bias, "silu").double()
            assert torch.allclose(found, wanted, rtol=2 * HALF_ULP[dtype] + 1e-5, atol=1e-5 + 0.03 * rounded)


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("kind", KINDS)
def test_large_activations_are_exact(kind: str) -> None:
    """A power of two as a factor of x changes no bit of the results, except by overflow of the sums."""
    codes, _ = codes_of(kind, (34, 256))
    packed = ops.pack_codes(codes)
    for dtype in DTYPES:
        x, _, _ = case(5, (34, 256), dtype)
        wanted = ops.linear(x, packed) * 2.0**100
        assert wanted.isfinite().all()
        for rows in (1, 5):
            assert torch.equal(ops.linear(x[:rows] * 2.0**100, packed), wanted[:rows])


@pytest.mark.usefixtures("extension")
@sampled({"dtype": list(DTYPES), "shape": [(128, 768), (70, 2304)], "kind": KINDS, "gated": [False, True]})
def test_bits_of_a_row_are_its_own(
    dtype: torch.dtype, shape: tuple[int, int], kind: str, gated: bool, kernel: str, kept_threads: None
) -> None:
    """Bits depend on neither row count, place, other rows nor threads."""
    codes, _ = codes_of(kind, shape)
    x, _, bias = case(600, shape, dtype)
    packed = ops.pack_gated_codes(codes) if gated else ops.pack_codes(codes)

    def run(rows: Tensor) -> Tensor:
        return ops.gated_linear(rows, packed, bias, "silu") if gated else ops.linear(rows, packed, bias)

    check_rows_alone(run, x, ROWS)


@pytest.mark.usefixtures("extension")
def test_bits_do_not_depend_on_the_division_of_outputs() -> None:
    """Ranks with a part of the rows compute the same bits."""
    for kind in KINDS:
        codes, _ = codes_of(kind, (128, 768))
        x, _, _ = case(9, (128, 768), torch.bfloat16)
        whole = ops.linear(x, ops.pack_codes(codes))
        assert torch.equal(ops.linear(x, ops.pack_codes(codes[48:100])), whole[:, 48:100])


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_several_kinds(dtype: torch.dtype) -> None:
    """Queries and keys of one type and values of another give the results of each type alone."""
    parts = [
        codes_of(kind, (rows, 768), rows)[0] for kind, rows in (("Q4_K", 96), ("Q4_K", 40), ("Q6_K", 70))
    ]
    made = coded.mixed(parts)
    assert isinstance(made, MixedCodes)
    assert [len(part) for part in made.parts] == [136, 70]
    exact = coded.dequantize(made, torch.float64)
    for rows in (1, 5, 40):
        x, _, bias = case(rows, (206, 768), dtype)
        found = ops.linear(x, ops.pack_codes(made), bias)
        each = [
            ops.linear(x, ops.pack_codes(part), bias[begin : begin + len(part)])
            for part, begin in zip(made.parts, (0, 136), strict=True)
        ]
        assert torch.equal(found, torch.cat(each, dim=1))
        assert torch.allclose(found.double(), x.double() @ exact.T + bias.double(), rtol=0.01, atol=1e-2)
    wanted = x.double() @ exact.T + bias.double()
    assert torch.allclose(torch_ops.linear(x.double(), made, bias.double()), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_parts_of_what_they_mean(kind: str) -> None:
    codes, exact = codes_of(kind, (12, 768))
    assert torch.equal(coded.dequantize(codes[2:7], torch.float64), exact[2:7])
    half = codes.columns(256, 768)
    assert half is not None
    assert torch.equal(coded.dequantize(half, torch.float64), exact[:, 256:])
    assert codes.columns(0, 768) is codes
    assert codes.columns(16, 768) is None
    assert (codes.columns(0, 384) is None) == (ggml.BLOCKS[kind].numbers == 256)
    both = coded.joined([codes[:5], codes[5:]])
    assert both is not None
    assert torch.equal(coded.dequantize(both, torch.float64), exact)
    stack = stacked([codes[:6], codes[6:]])
    assert stack is not None
    assert stack.shape == (2, 6, 768)
    assert torch.equal(coded.dequantize(stack, torch.float64).flatten(0, 1), exact)


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.1), ("Q6_K", 0.02)])
def test_what_tests_write_is_near_what_was_meant(kind: str, most: float) -> None:
    values = torch.randn(20, 768).numpy()
    found = meaning(kind, fitted(kind, values)).numpy()
    assert ((found - values) ** 2).mean() ** 0.5 < most
