"""Triton products with packed weights against the values of the codes, independent of other rows.

They run in the interpreter on the CPU, or on a GPU. The interpreter rounds bfloat16 towards zero.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.test_coded import FORMS, codes_of, every_code, meaning
from tests.support.routed import routed, tokens
from tests.support.slow import mostly_slow
from weft.ops import moe as torch_moe
from weft.ops import triton as kernels
from weft.ops.coded import Codes, MixedCodes
from weft.ops.registry import choose

Tensor = torch.Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READY = importlib.util.find_spec("triton") is not None and (DEVICE.type == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
#: dtype -> the largest error allowed, relative to the sum of magnitudes
TYPES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
#: (outputs, inputs): whole tiles, tails of both, odd inputs, one.
SHAPES = ((64, 128), (20, 330), (34, 33), (6, 1))


def given(rows: int, inputs: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=made).to(dtype).to(DEVICE)


def packed(codes: Codes) -> Any:
    from weft.ops.triton import coded

    return coded.pack(codes.to(DEVICE))


def check(made: Tensor, x: Tensor, codes: Codes, bias: Tensor | None = None) -> None:
    weight = meaning(codes).to(DEVICE)
    wanted = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    assert (made.dtype, made.shape) == (x.dtype, wanted.shape)
    assert ((made.double() - wanted).abs() <= TYPES[x.dtype] * size + 1e-30).all()


@runs
@mostly_slow("form", list(FORMS), ["fp8"])
def test_products_of_codes(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every form of tile, of all inputs and of parts, and by dequantizing some columns at a time."""
    from weft.ops.triton import coded

    monkeypatch.setattr(coded, "LEAST_STEPS", 1)
    monkeypatch.setattr(coded, "COLUMNS", 16)
    monkeypatch.setattr(coded, "DEQUANTIZED", 4000)
    assert coded.parts_of(3, 20, 330, coded.NARROW, 64) == 5
    for shape in SHAPES:
        codes = codes_of(form, shape)
        weight = packed(codes)
        for dtype, rows, tiles in (
            (torch.float32, 3, coded.MIDDLE),
            (torch.bfloat16, 17, None),
            (torch.bfloat16, 5, coded.NARROW),
            (torch.float16, 1, coded.NARROW),
        ):
            x, bias = given(rows, shape[1], dtype), given(1, shape[0], dtype, 1)[0]
            check(coded.product(x, weight, bias, tiles), x, codes, bias)
            if tiles is not None:
                check(coded.product(x, weight, bias, tiles, whole=False), x, codes, bias)
        check(coded.linear(x, weight), x, codes)
    assert coded.linear(x[:0], weight).shape == (0, 6)


@runs
@pytest.mark.parametrize("form", list(FORMS))
def test_dequantized_rows_are_what_codes_mean(form: str) -> None:
    from weft.ops.triton import coded

    for shape in SHAPES:
        codes = codes_of(form, shape)
        rows = slice(shape[0] // 3, shape[0])
        made = coded.dequantized(packed(codes), rows, torch.float32)
        wanted = meaning(codes)[rows].to(DEVICE)
        assert ((made.double() - wanted).abs() <= 2.0**-22 * wanted.abs()).all()


@runs
@mostly_slow("group", [2, 6, 16, 24, 40, 48], [6, 48])
def test_groups_of_any_size(group: int) -> None:
    from weft.ops.triton import coded

    codes = replace(codes_of("int4 zeros", (6, 240)), group=group)
    count = -(-240 // group)
    made = torch.Generator().manual_seed(group)
    scales = (0.5 + torch.rand(6, count, generator=made)) / 100
    zeros = torch.randint(0, 16, (6, count), generator=made, dtype=torch.uint8)
    codes = replace(codes, scales=scales, zeros=zeros)
    for dtype in (torch.float32, torch.bfloat16):
        x = given(5, 240, dtype)
        check(coded.linear(x, packed(codes)), x, codes)


@runs
@pytest.mark.parametrize("form", list(FORMS))
def test_every_code_is_exact(form: str) -> None:
    """With one-hot inputs and scales of 1 the product is the exact value of a code."""
    from weft.ops.triton import coded

    codes = every_code(form)
    for dtype in TYPES:
        picked = coded.linear(torch.eye(codes.inputs, dtype=dtype, device=DEVICE), packed(codes))
        assert torch.equal(picked.double(), meaning(codes).T.contiguous().to(DEVICE))


@runs
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
@pytest.mark.parametrize("group", [16, 4096])
def test_every_scale_is_exact(kind: torch.dtype, group: int) -> None:
    """All one-byte scales are exact, for scales of numbers and of sums."""
    from weft.ops.triton import coded

    most = 255 if kind == torch.float8_e4m3fn else 241
    scales = torch.arange(most, dtype=torch.uint8)
    scales = scales[(scales & 127) != 127] if kind == torch.float8_e4m3fn else scales
    ones = torch.full((len(scales), 10), 2, dtype=torch.uint8)  # 1.0 in E2M1, and 0.0
    codes = Codes(
        numbers="e2m1",
        values=ones,
        inputs=20,
        group=group,
        scales=scales.unsqueeze(1).expand(-1, 2 if group == 16 else 1).contiguous().view(kind),
    )
    x = torch.zeros(1, 20, device=DEVICE)
    x[0, 18] = 1
    assert torch.equal(coded.linear(x, packed(codes))[0].cpu(), codes.scales[:, 0].float())


@runs
def test_inputs_in_another_order_and_rows_of_several_kinds() -> None:
    from weft.ops.triton import coded

    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    codes = replace(codes_of("int4", (70, 256)), order=order)
    x = given(9, 256, torch.bfloat16)
    check(coded.linear(x, packed(codes)), x, codes)
    parts = [codes_of("fp8 blocks", (22, 256)), codes_of("int4 zeros", (35, 256)), codes_of("int8", (9, 256))]
    mixture = coded.pack(MixedCodes(tuple(parts)).to(DEVICE))
    bias = given(1, 66, torch.bfloat16, 1)[0]
    made = coded.linear(x, mixture, bias)
    assert len(mixture) == 66
    for part, begin in zip(parts, (0, 22, 57), strict=True):
        rows = slice(begin, begin + len(part))
        check(made[:, rows], x, part, bias[rows])


@runs
@pytest.mark.usefixtures("ordered_products")
@mostly_slow("form", ["int4 zeros", "fp8", "nvfp4"], ["nvfp4"])
def test_bits_of_a_row_are_its_own(form: str) -> None:
    """The invariant form is independent of the row count; the fast form only within its own tiles."""
    from weft.ops.triton import coded

    weight = packed(codes_of(form, (20, 200)))
    x = given(130, 200, torch.bfloat16)
    whole = coded.linear_invariant(x, weight)
    for begin, count in ((0, 1), (60, 17)):
        rows = slice(begin, begin + count)
        assert torch.equal(coded.linear_invariant(x[rows].clone(), weight), whole[rows])
    few = coded.linear(x[:16], weight)
    assert torch.equal(coded.linear(x[5:6].clone(), weight), few[5:6])
    gated = coded.gated_linear_invariant(x, weight, None, "silu")
    assert torch.equal(coded.gated_linear_invariant(x[7:9].clone(), weight, None, "silu"), gated[7:9])


def test_what_is_chosen_for_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel exists for every rounding, invariant where demanded, and none waits for the device."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "takes_words", lambda: False)
    cuda, half = torch.device("cuda"), torch.bfloat16
    for op in ("linear", "gated_linear", "moe", "moe_pieces"):
        for form in ("", "_int8", "_int4", "_fp8"):
            found = [choose(op + form, half, cuda, invariant=demanded) for demanded in (False, True)]
            assert [one.name for one in found] == ["triton", "triton-invariant"], op + form
            assert not any(one.asks for one in found)
            assert all((one.pack if form else one.pack_codes) is not None for one in found)
            assert choose(op + form, torch.float64, cuda).name == "torch"
    assert kernels.takes_codes(half, cuda)
    assert not kernels.takes_codes(torch.float64, cuda)
    assert not kernels.takes_codes(half, torch.device("cpu"))


# --- routed blocks ---


def of_experts(form: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (block with coded matrices, the same block in float64)."""
    plain = routed("gated_shared", dtype)
    names = ("gate_up", "down", "shared_gate_up", "shared_down")
    codes = {name: codes_of(form, tuple(getattr(plain, name).shape), 5) for name in names}
    wide = {name: meaning(one).to(DEVICE) for name, one in codes.items()}
    there = {
        f: v.to(DEVICE)
        for f in plain.__dataclass_fields__
        if isinstance(v := getattr(plain, f), Tensor) and f not in names
    }
    plain = replace(plain, **there, dtype=dtype)
    doubled = {f: v.double() for f, v in there.items() if v.is_floating_point()}
    moved = {name: one.to(DEVICE) for name, one in codes.items()}
    return replace(plain, **moved), replace(plain, **doubled, **wide)


@runs
@pytest.mark.slow
@pytest.mark.parametrize("form", ["int4 zeros", "fp8 blocks", "mxfp4", "nvfp4"])
def test_experts_of_codes(form: str) -> None:
    from weft.ops.triton import moe

    for dtype, tolerance, run in (
        (torch.float32, 1e-5, moe.moe_invariant),
        (torch.bfloat16, 5e-2, moe.moe),
    ):
        weights, doubled = of_experts(form, dtype)
        weights = moe.pack_codes(weights)
        x, ids = (one.to(DEVICE) for one in tokens(6, dtype))
        wanted = torch_moe.moe(x.double(), ids, doubled)
        made = run(x, ids, weights)
        assert (made.dtype, made.shape) == (dtype, wanted.shape)
        assert (made.double() - wanted).abs().max() <= tolerance * wanted.abs().max()


@runs
@pytest.mark.usefixtures("ordered_products")
def test_bits_of_a_token_are_its_own() -> None:
    from weft.ops.triton import moe

    weights = moe.pack_codes(of_experts("nvfp4", torch.bfloat16)[0])
    x, ids = (one.to(DEVICE) for one in tokens(12, torch.bfloat16))
    whole = moe.moe_invariant(x, ids, weights)
    for begin, count in ((0, 1), (4, 7)):
        part = slice(begin, begin + count)
        assert torch.equal(moe.moe_invariant(x[part], ids[part], weights), whole[part])


@runs
@mostly_slow("form", ["int8", "int4", "fp8"], ["int4"])
def test_rounded_weights(form: str) -> None:
    """``--quantization`` packs the values of the CPU's operations."""
    from weft.ops.triton import coded, moe

    weight, x = given(70, 200, torch.bfloat16, 2), given(5, 200, torch.bfloat16)
    made = coded.linear(x, getattr(coded, f"pack_{form}")(weight))
    here = choose(f"linear_{form}", torch.float64, torch.device("cpu"))
    wanted = here.run(x.cpu().double(), here.pack(weight.cpu()))
    assert torch.allclose(made.cpu().double(), wanted, rtol=2e-2, atol=2e-2)
    plain = routed("gated_shared", torch.float32)
    there = replace(plain, **{f: v.to(DEVICE) for f, v in vars_of(plain).items()})
    rows, ids = tokens(6, torch.float32)
    block = choose(f"moe_{form}", torch.float64, torch.device("cpu"))
    expected = block.run(rows.double(), ids, block.pack(plain_in(plain, torch.float64)))
    found = moe.moe(rows.to(DEVICE), ids.to(DEVICE), getattr(moe, f"pack_{form}")(there))
    assert torch.allclose(found.cpu().double(), expected, rtol=1e-3, atol=1e-3)
    none = replace(there, gate_up=there.gate_up[:0], down=there.down[:0])
    assert len(getattr(moe, f"pack_{form}")(none).down) == 0


def vars_of(weights: Any) -> dict[str, Tensor]:
    return {f: v for f in weights.__dataclass_fields__ if isinstance(v := getattr(weights, f), Tensor)}


def plain_in(weights: Any, dtype: torch.dtype) -> Any:
    return replace(weights, **{f: v.to(dtype) for f, v in vars_of(weights).items() if v.is_floating_point()})
