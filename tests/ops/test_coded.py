"""Matrices of few bits: the CPU extension computes with the values of the codes, independently per row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.ops.rows_alone import check_rows_alone
from tests.ops.test_cpu_linear import DTYPES, HALF_ULP, assert_gated, assert_linear, case, exact
from tests.support.pairwise import sampled
from tests.support.slow import mostly_slow
from weft.ops import coded, cpu, implementations, tiled, torch_ops
from weft.ops.coded import Codes
from weft.ops.cpu import linear as ops
from weft.ops.registry import choose
from weft.ops.stacks import stacked

Tensor = torch.Tensor
assert implementations  # registers every one

#: (outputs, inputs): whole blocks, tails of both, odd inputs, one of each.
SHAPES = ((320, 768), (192, 2304), (70, 33), (34, 64), (6, 1), (2, 130), (34, 4650))
#: Counts up to 64 are the counts of plain matrices (test_cpu_linear).
FEW_ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 47, 48, 49, 63, 64, 100, 512)
#: (numbers, scales, zeros, factors, group): every form, with groups that end within, at and after the inputs.
FORMS = {
    "int4": ("int4", torch.float32, False, False, 128),
    "int4 zeros": ("int4", torch.float32, True, False, 32),
    "int4 groups of 48": ("int4", torch.float32, True, False, 48),
    "int8": ("int8", torch.float32, False, False, 4096),
    "int8 zeros": ("int8", torch.float32, True, False, 128),
    "mxfp4": ("e2m1", torch.float8_e8m0fnu, False, False, 32),
    "nvfp4": ("e2m1", torch.float8_e4m3fn, False, True, 16),
    "fp8": ("e4m3", torch.float32, False, False, 4096),
    "fp8 blocks": ("e4m3", torch.float32, False, True, 128),
    "mxfp8": ("e4m3", torch.float8_e8m0fnu, False, False, 32),
}


def codes_of(form: str, shape: tuple[int, ...], seed: int = 0) -> Codes:
    """Return random codes with sums of magnitude 1."""
    numbers, scales, zeros, factors, group = FORMS[form]
    made = torch.Generator().manual_seed(seed)
    inputs = shape[-1]
    count = -(-inputs // group)
    four = numbers in ("int4", "e2m1")
    values = torch.randint(0, 16 if four else 256, shape, generator=made, dtype=torch.uint8)
    if numbers == "e4m3":
        values[(values & 127) == 127] = 56
    largest = {"int4": 8, "int8": 128, "e2m1": 6, "e4m3": 448}[numbers] * inputs**0.5
    size = (0.5 + torch.rand(*shape[:-1], count, generator=made)) / largest
    if scales == torch.float8_e8m0fnu:
        powers = (size.log2().round() + 127).to(torch.uint8)
        kept = powers.view(torch.float8_e8m0fnu)
    else:
        kept = (size * (largest if factors else 1)).to(scales)
    return Codes(
        numbers=numbers,
        values=coded.nibbles(values) if four else values,
        inputs=inputs,
        group=group,
        scales=kept,
        zeros=torch.randint(0, 16 if four else 256, kept.shape, generator=made, dtype=torch.uint8)
        if zeros
        else None,
        factors=((0.5 + torch.rand(shape[:-1], generator=made)) / largest).double() if factors else None,
    )


def in_groups_of_64(shape: tuple[int, ...]) -> Codes:
    """Return int4 codes as of ``--quantization int4``."""
    codes = codes_of("int4 zeros", shape)
    assert codes.zeros is not None
    scales, zeros = (one[..., ::2].contiguous() for one in (codes.scales, codes.zeros))
    return replace(codes, group=64, scales=scales, zeros=zeros)


def meaning(codes: Codes) -> Tensor:
    return coded.dequantize(codes, torch.float64)


def test_what_codes_mean() -> None:
    """By the definition, one number at a time."""
    for form, (numbers, _, _, _, group) in FORMS.items():
        codes = codes_of(form, (4, 70))
        whole = meaning(codes)
        for n, k in ((0, 0), (1, 33), (3, 69), (2, 64)):
            code = int(codes.values[n, k // 2 if codes.four else k])
            if codes.four:
                code = code >> 4 if k % 2 else code & 15
            g = k // group
            number = float(code)
            if numbers == "e2m1":
                number = coded.E2M1[code]
            elif numbers == "e4m3":
                number = torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn).double().item()
            else:
                middle = coded.MIDDLE[numbers]
                number -= middle if codes.zeros is None else int(codes.zeros[n, g])
            number *= codes.scales[n, g].double().item()
            if codes.factors is not None:
                number *= codes.factors[n].double().item()
            assert whole[n, k].item() == pytest.approx(number, rel=1e-12), (form, n, k)


def rounds(form: str, inputs: int, dtype: torch.dtype, kernel: str) -> bool:
    """Return True if weights are rounded to bf16: always by brgemm, and by AMX tiles for scales within a
    tile.
    """
    _, scales, _, _, group = FORMS[form]
    if kernel != "brgemm" or dtype != torch.bfloat16:
        return False
    tiles = "amx_bf16" in cpu.capabilities()
    return not tiles or (scales == torch.float32 and group % 32 != 0 and group < inputs)


def assert_close(made: Tensor, x: Tensor, codes: Codes, bias: Tensor | None, rounded: bool) -> None:
    """``rounded``: the weights are, to bf16."""
    weight = meaning(codes)
    if not rounded:
        return assert_linear(made, x, weight, bias)
    product, slack = exact(x, weight, bias)
    slack = slack + 2.0**-8 * (x.double().abs() @ weight.abs().T)
    assert ((made.double() - product).abs() <= slack + 1.01 * HALF_ULP[x.dtype] * product.abs()).all()


@pytest.mark.usefixtures("extension")
@mostly_slow("dtype", DTYPES, [torch.bfloat16])
@pytest.mark.parametrize("form", list(FORMS))
def test_products_of_codes(dtype: torch.dtype, form: str, kernel: str) -> None:
    """Products equal the float64 product with the values of the codes, rounded once."""
    for shape in SHAPES:
        rounded = rounds(form, shape[1], dtype, kernel)
        codes = codes_of(form, shape)
        packed = ops.pack_codes(codes)
        for rows in (1, 3, 45):
            x, _, bias = case(rows, shape, dtype)
            assert_close(ops.linear(x, packed, bias), x, codes, bias, rounded)
        if not rounded:
            gated = ops.gated_linear(x, ops.pack_gated_codes(codes), bias, "silu")
            assert_gated(gated, x, meaning(codes), bias, "silu")


def every_code(form: str) -> Codes:
    """Return three rows with all finite codes of a form, scale 1 and different zero points."""
    numbers, _, zeros, _, _ = FORMS[form]
    count = 16 if numbers in ("int4", "e2m1") else 256
    values = torch.arange(count, dtype=torch.uint8).repeat(3, 1)
    if numbers == "e4m3":
        values[(values & 127) == 127] = 0
    return Codes(
        numbers=numbers,
        values=coded.nibbles(values) if count == 16 else values,
        inputs=count,
        group=count,
        scales=torch.ones(3, 1),
        zeros=torch.tensor([[0], [count - 1], [7]], dtype=torch.uint8) if zeros else None,
    )


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("form", list(FORMS))
def test_every_code_is_exact(form: str) -> None:
    """With one-hot inputs and scales of 1 the product is the exact value of a code."""
    codes = every_code(form)
    for dtype in DTYPES:
        picked = ops.linear(torch.eye(codes.inputs, dtype=dtype), ops.pack_codes(codes))
        assert torch.equal(picked.double(), meaning(codes).T.contiguous())


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_every_scale_is_exact(kind: torch.dtype, dtype: torch.dtype, kernel: str) -> None:
    """All one-byte scales are exact, except that bf16 instructions flush scales below 2^-126 to 0."""
    scales = torch.arange(255, dtype=torch.uint8).view(kind).unsqueeze(1)
    scales = scales[torch.arange(255) != 127] if kind == torch.float8_e4m3fn else scales
    ones = torch.full((len(scales), 1), 2, dtype=torch.uint8)  # 1.0 in E2M1
    codes = Codes(numbers="e2m1", values=ones, inputs=1, group=32, scales=scales)
    made = ops.linear(torch.ones(1, 1, dtype=dtype), ops.pack_codes(codes))[0].float()
    wanted = scales[:, 0].float()
    if dtype == torch.bfloat16 and flushes_subnormals():
        wanted[wanted.abs() < 2.0**-126] = 0
    assert torch.equal(made, wanted)


def flushes_subnormals() -> bool:
    """True if the CPU multiplies by instructions of bf16, which take numbers below 2^-126 as 0."""
    return "avx512_bf16" in cpu.capabilities()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("power", [1, 2, 127, 252, 253])
def test_powers_up_to_the_ends_of_bf16(power: int, kernel: str) -> None:
    """All finite E2M1 values times a power are exact in all columns, or 0 where bf16 flushes."""
    numbers = torch.tensor(coded.E2M1, dtype=torch.float64) * 2.0 ** (power - 127)
    values = torch.arange(16, dtype=torch.uint8)
    values[numbers.abs() >= 2.0**128] = 0
    wanted = numbers[values.long()]
    if flushes_subnormals():
        wanted[wanted.abs() < 2.0**-126] = 0
    scales = torch.full((32, 1), power, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    packed = coded.nibbles(values.repeat(32, 1))
    codes = Codes(numbers="e2m1", values=packed, inputs=16, group=32, scales=scales)
    made = ops.linear(torch.eye(16, dtype=torch.bfloat16), ops.pack_codes(codes))
    assert torch.equal(made.double(), wanted.unsqueeze(1).expand(-1, 32))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("form", list(FORMS))
def test_large_activations_are_exact(form: str, kernel: str) -> None:
    """A power of two as a factor of x changes no bit of the results, except by overflow of the sums."""
    codes = codes_of(form, (34, 130))
    packed = ops.pack_codes(codes)
    for dtype in DTYPES:
        x, _, _ = case(5, (34, 130), dtype)
        wanted = ops.linear(x, packed) * 2.0**100
        assert wanted.isfinite().all()
        for rows in (1, 3, 5):
            assert torch.equal(ops.linear(x[:rows] * 2.0**100, packed), wanted[:rows])


@pytest.mark.usefixtures("extension")
@sampled(
    {
        "dtype": list(DTYPES),
        "shape": [(1280, 768), (768, 2304), (70, 33), (70, 80), (70, 4650)],
        "form": list(FORMS),
        "gated": [False, True],
    },
    slow=True,
)
def test_bits_of_a_row_are_its_own(
    dtype: torch.dtype, shape: tuple[int, int], form: str, gated: bool, kernel: str, kept_threads: None
) -> None:
    """Bits depend on neither row count, place, other rows nor threads."""
    codes = codes_of(form, shape)
    x, _, bias = case(1024, shape, dtype)
    packed = ops.pack_gated_codes(codes) if gated else ops.pack_codes(codes)

    def run(rows: Tensor) -> Tensor:
        return ops.gated_linear(rows, packed, bias, "silu") if gated else ops.linear(rows, packed, bias)

    check_rows_alone(run, x, FEW_ROWS)


@pytest.mark.usefixtures("extension")
def test_inputs_in_another_order(kernel: str) -> None:
    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    codes = replace(codes_of("int4", (70, 256)), order=order)
    x, _, _ = case(9, (70, 256), torch.bfloat16)
    rounded = rounds("int4", 256, x.dtype, kernel)
    assert_close(ops.linear(x, ops.pack_codes(codes)), x, codes, None, rounded)


@pytest.mark.parametrize("form", list(FORMS))
def test_parts_of_codes_are_parts_of_what_they_mean(form: str) -> None:
    codes = codes_of(form, (12, 384))
    whole = meaning(codes)
    order = torch.tensor([3, 1, 11])
    assert torch.equal(meaning(codes[2:7]), whole[2:7])
    assert torch.equal(meaning(codes[order]), whole[order])
    begin = codes.group if codes.group < 384 else 128
    part = codes.columns(begin, 384)
    assert part is not None
    assert torch.equal(meaning(part), whole[:, begin:])
    for ends in ((8, 384), (0, 200), (40, 344)):
        cut = codes.columns(*ends)
        assert cut is not None
        assert torch.equal(meaning(cut), whole[:, slice(*ends)])
        assert cut.group <= max(codes.group, 8) or codes.group >= 384
    assert (codes.columns(6, 384) is None) == (codes.group < 384)
    assert torch.equal(meaning(coded.storable(codes)), whole)
    again = coded.joined([codes[:5], codes[5:]])
    assert again is not None
    assert torch.equal(meaning(again), whole)
    stack = stacked([codes[:6], codes[6:]])
    assert stack is not None
    assert stack.shape == (2, 6, 384)
    assert torch.equal(meaning(stack).flatten(0, 1), whole)


def test_rows_are_rounded_where_groups_are_whole() -> None:
    codes = coded.to_w4a8(torch.randn(6, 256))
    for ends, rounds in (((64, 256), True), ((0, 128), True), ((32, 256), False), ((0, 96), False)):
        part = codes.columns(*ends)
        assert part is not None
        assert part.row_bits == (8 if rounds else None)
    assert coded.joined([codes, coded.to_int4(torch.randn(6, 256))]) is None


@pytest.mark.parametrize("inputs", [96, 33])
def test_large_matrices_are_rounded_and_multiplied_in_parts(
    inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, x, bias = torch.randn(500, inputs), torch.randn(3, inputs), torch.randn(500)
    whole = torch_ops.to_int8_codes(weight)
    monkeypatch.setattr(coded, "ROUNDED_NUMBERS", 64 * inputs)
    monkeypatch.setattr(torch_ops, "SLICE", 128 * inputs)
    codes = torch_ops.to_int8_codes(weight)
    assert torch.equal(codes.values, whole.values)
    assert torch.equal(codes.scales, whole.scales)
    for linear in (torch_ops.linear, tiled.linear):
        assert torch.allclose(linear(x, codes, bias), x @ meaning(codes).float().T + bias, atol=1e-4)


def test_rows_of_different_groups_are_joined() -> None:
    """Rows with one scale join rows with groups at the smaller group size. Other forms do not join."""
    first, second = codes_of("fp8", (6, 384)), replace(codes_of("fp8 blocks", (4, 384)), factors=None)
    both = coded.joined([first, second])
    assert both is not None
    assert both.group == 128
    assert torch.equal(meaning(both), torch.cat([meaning(first), meaning(second)]))
    assert coded.joined([first, codes_of("int8", (4, 384))]) is None
    assert coded.joined([first, replace(first, order=torch.randperm(384))]) is None


@pytest.mark.parametrize("name", ["int4", "fp8"])
@pytest.mark.parametrize("op", ["linear", "gated_linear"])
def test_rounded_weights(name: str, op: str, extension: None) -> None:
    """Weights packed for --quantization are within half a step, and equal on torch and in C++."""
    x, weight, bias = case(5, (70, 200), torch.bfloat16)
    codes = coded.to_int4(weight) if name == "int4" else coded.to_fp8(weight)
    error = (meaning(codes) - weight.double()).abs()
    groups = torch.arange(200) // codes.group
    scales = codes.scales.double()[:, groups]
    if name == "int4":
        assert (error <= 1.001 * scales).all()  # half a step, and the zero point's half
        assert (error.mean() / weight.double().abs().mean()) < 0.1
    else:
        assert (error <= 2.0**-4 * weight.double().abs() + scales * 2.0**-10).all()
    more = ("silu",) if op == "gated_linear" else ()
    made = []
    for invariant in (False, True):
        found = choose(f"{op}_{name}", torch.float64, torch.device("cpu"), invariant=invariant)
        made.append(found.run(x.double(), found.pack(weight), bias.double(), *more))
    ours = choose(f"{op}_{name}", torch.bfloat16, torch.device("cpu"))
    assert ours.name == "cpu"
    made.append(ours.run(x, ours.pack(weight), bias, *more).double())
    product = x.double() @ meaning(codes).T + bias.double()
    wanted = torch_ops.gated(product, "silu") if more else product
    for one, tolerance in zip(made, (1e-12, 1e-12, 2e-2), strict=True):
        assert torch.allclose(one, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(70, 200), (3, 10, 200)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_some_rows_at_a_time(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The codes are equal, and float32 memory stays within the limit."""
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    wanted = [to(weight) for to in (coded.to_int4, coded.to_fp8)]
    monkeypatch.setattr(coded, "ROUNDED_NUMBERS", 2100)
    seen: list[int] = []
    grouped = coded._grouped

    def watched(some: torch.Tensor, group: int) -> tuple[torch.Tensor, int]:
        seen.append(some.numel())
        return grouped(some, group)

    monkeypatch.setattr(coded, "_grouped", watched)
    for to, whole in zip((coded.to_int4, coded.to_fp8), wanted, strict=True):
        found = to(weight)
        assert found.shape == shape
        assert all(torch.equal(*both) for both in zip(found.tensors(), whole.tensors(), strict=True))
    assert len(seen) == 2 * (7 if len(shape) == 2 else 3)
    assert max(seen) == 2000


@pytest.mark.parametrize("largest", [False, True])
def test_int8_some_rows_at_a_time(largest: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(70, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    most = 2 * weight.float().abs().amax(1, keepdim=True) if largest else None
    whole = torch_ops.to_int8(weight, most)
    monkeypatch.setattr(coded, "ROUNDED_NUMBERS", 2100)
    assert coded.rows_at_once(weight) == 10
    found = torch_ops.to_int8(weight, most)
    assert torch.equal(found.values, whole.values)
    assert torch.equal(found.scales, whole.scales)
