"""Matrices in words: the layout, the PTX that unpacks them, and products against the values of the codes.

Products run in Triton's interpreter without PTX, or on a Hopper GPU with PTX.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.ops import ptx, test_coded
from tests.ops.test_coded import FORMS, in_groups_of_64, meaning
from tests.support.slow import mostly_slow
from weft.ops import torch_ops, words
from weft.ops import triton as kernels
from weft.ops.coded import Codes, MixedCodes, nibbles
from weft.ops.registry import choose
from weft.ops.words import Words, words_of

Tensor = torch.Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
triton_is_there = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
interprets = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or not kernels.interpreting(),
    reason="needs Triton and TRITON_INTERPRET=1",
)
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not kernels.takes_words(), reason="needs a Hopper GPU"),
]
WORDED = ["int4 groups of 64", *(form for form in FORMS if form not in ("int8 zeros", "int4 groups of 48"))]
SHAPES = ((64, 128), (70, 330), (130, 1290))
REAL = ((192, 1024), (6144, 4096), (70, 330), (1000, 4680))
ROWS = (1, 16, 17, 64, 65, 128, 256, 300)


@pytest.fixture(autouse=True)
def any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow matrices that whole tiles make much larger."""
    monkeypatch.setattr(words, "PADDING", 1e9)


def codes_of(form: str, shape: tuple[int, ...]) -> Codes:
    return in_groups_of_64(shape) if form == "int4 groups of 64" else test_coded.codes_of(form, shape)


def worded(form: str, shape: tuple[int, ...]) -> tuple[Codes, Words]:
    codes = codes_of(form, shape)
    made = words_of(codes.to(DEVICE))
    assert made is not None
    return codes, made


def given(rows: int, inputs: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=made).bfloat16().to(DEVICE)


def check(made: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """Compare with float64. The interpreter rounds bfloat16 towards zero."""
    wanted = x.double() @ weight.T + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    slack = 2.0**-7 * wanted.abs() + (8e-3 if kernels.interpreting() else 2.0**-12) * size
    if len(x) > 256:  # the matrix is rounded to bfloat16: 6 standard deviations of the sum
        slack += 6 * 2.0**-9 * (x.double().square() @ weight.square().T).sqrt()
    assert (made.dtype, made.shape) == (x.dtype, wanted.shape)
    assert ((made.double() - wanted).abs() <= slack + 1e-30).all()


@mostly_slow("form", WORDED, ["int4 zeros", "nvfp4", "fp8 blocks"])
def test_rows_of_words_are_the_codes(form: str) -> None:
    """Words keep every code, scale, zero point and factor."""
    for shape in SHAPES:
        codes, made = worded(form, shape)
        rows = torch.tensor([0, shape[0] - 1, 5], device=DEVICE)
        back = made[rows]
        four = codes.four and codes.inputs % 2 == 0
        assert not four or torch.equal(back.values.cpu(), codes.values[rows.cpu()])
        assert torch.allclose(meaning(back).cpu(), meaning(codes)[rows.cpu()], rtol=2.0**-22, atol=0)
        found = torch_ops.coded_embedding(rows, made, torch.bfloat16)  # type: ignore[arg-type]
        assert found.shape == (3, shape[1])


def test_memory_and_formats_without_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tiles take the memory of the codes; other formats and wasteful shapes are refused."""
    for form in WORDED:
        codes = codes_of(form, (128, 1024))
        made = words_of(codes)
        assert made is not None
        assert made.nbytes <= 1.06 * codes.nbytes, form
    for form in ("int8 zeros", "int4 groups of 48"):
        assert words_of(codes_of(form, (128, 960))) is None
    row = codes_of("int4 zeros", (64, 32))
    whole = words_of(row)
    assert whole is not None
    assert torch.allclose(meaning(whole[torch.arange(64)]), meaning(row), rtol=2.0**-22, atol=0)
    blocks = codes_of("mxfp4", (64, 256))
    apart = blocks.scales.view(torch.uint8).clone()
    apart[0, 0], apart[1, 1] = 1, 200
    assert words_of(replace(blocks, scales=apart.view(blocks.scales.dtype))) is None
    monkeypatch.setattr(words, "PADDING", 1.25)
    assert words_of(codes_of("int4", (64, 130))) is None


def test_groups_with_a_scale_of_zero() -> None:
    codes = codes_of("nvfp4", (66, 256))
    scales = codes.scales.view(torch.uint8).clone()
    scales[3, 2], scales[65, 15] = 0, 0
    codes = replace(codes, scales=scales.view(codes.scales.dtype))
    made = words_of(codes)
    assert made is not None
    assert torch.allclose(meaning(made[torch.arange(66)]), meaning(codes), rtol=2.0**-22, atol=0)


def unpacked(made: Words) -> Tensor:
    """Return the weights that the PTX makes, float64 [N, K]."""
    from weft.ops.triton.pairs import unpacking_of

    text = unpacking_of(made)
    tiles, steps, tile, width = made.values.shape
    count = words.STEP // width
    columns = made.values.numpy().view(np.uint32)
    arguments: list[Any] = []
    if made.zeros is not None:
        arguments = [made.zeros.numpy().view(np.uint32)[..., None]]
    elif made.way == "merged":
        each = words._bytes(made.scales.movedim(2, 3)).flatten(3)  # [tiles, steps, TILE, groups]
        bits = (each * made.merge.shift + made.merge.base).numpy().astype(np.uint32)
        arguments = [(bits | bits << 16)[..., g : g + 1] for g in range(made.groups)]
    # A pair of registers for the words, and for each argument.
    registers = {f"${count}": columns[..., ::2], f"${count + 1}": columns[..., 1::2]}
    for place, column in enumerate(arguments):
        registers |= {f"${count + 2 + 2 * place + i}": column for i in range(2)}
    done = ptx.run(text, registers)
    parts = []
    for j in range(count):
        low, high = ptx._halves(done[f"${j}"])
        parts.append(np.stack(np.broadcast_arrays(low, high), axis=-1).reshape(tiles, steps, tile, width))
    weight = torch.from_numpy(np.stack(parts, axis=3).reshape(tiles, steps, tile, words.STEP))
    if made.way == "sum":
        scales = made.scales.double().movedim(2, 3).repeat_interleave(words.STEP // made.groups, dim=3)
        weight = weight * scales
    weight = weight.transpose(1, 2).reshape(tiles * tile, steps * words.STEP)
    weight = weight * made.factors.double().unsqueeze(1)
    return weight[: made.outputs, : made.inputs]


@triton_is_there
@pytest.mark.parametrize("form", WORDED)
def test_ptx_makes_the_numbers(form: str) -> None:
    """Every code at every place of a word, with many scales; nothing is rounded."""
    codes = codes_of(form, (130, 520))
    made = words_of(codes)
    assert made is not None
    wanted = meaning(codes)
    assert torch.allclose(unpacked(made), wanted, rtol=2.0**-22, atol=0)
    values = codes.values if not codes.four else torch.cat((codes.values & 15, codes.values >> 4))
    assert len(values.unique()) == (16 if codes.four else 254 if codes.numbers == "e4m3" else 256)


@triton_is_there
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e8m0fnu])
def test_ptx_multiplies_every_code_by_every_scale(kind: torch.dtype) -> None:
    e4m3 = kind == torch.float8_e4m3fn
    scales = torch.arange(1, 127) if e4m3 else torch.arange(60, 181)
    group = 16 if e4m3 else 32
    values = torch.arange(16, dtype=torch.uint8).repeat(len(scales), 8)
    codes = Codes(
        numbers="e2m1",
        values=nibbles(values),
        inputs=128,
        group=group,
        scales=scales.to(torch.uint8).unsqueeze(1).repeat(1, 128 // group).view(kind),
    )
    made = words_of(codes)
    assert made is not None
    assert torch.equal(unpacked(made), meaning(codes))


@interprets
@pytest.mark.slow
@pytest.mark.parametrize("form", WORDED)
def test_products(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In narrow and wide tiles, with one part of the inputs and with several."""
    from weft.ops.triton import words as kernel

    monkeypatch.setattr(kernel, "LEAST_STEPS", 1)
    for shape in SHAPES:
        codes, made = worded(form, shape)
        x, bias = given(3, shape[1]), given(1, shape[0], 1)[0]
        for tile, many in ((kernel.FORMS[0], False), (kernel.FORMS[1], True)):
            out = torch.empty(3, shape[0], dtype=torch.bfloat16)
            kernel.run(x, made, bias, out, tile, many)
            check(out, x, meaning(codes), bias)
        weights = kernel.dequantized(made, 0, made.values.shape[0], torch.float32)
        assert torch.allclose(weights.double(), meaning(codes), rtol=2.0**-21, atol=0)


@interprets
@pytest.mark.slow
def test_mixtures_and_orders() -> None:
    """Rows of several formats, of which some have no words, and inputs in another order."""
    from weft.ops.triton import words_linear as layers

    order = torch.randperm(256, generator=torch.Generator().manual_seed(3))
    ordered = replace(codes_of("int4", (70, 256)), order=order)
    x = given(5, 256)
    check(layers.linear(x, layers.pack(ordered)), x, meaning(ordered))
    parts = (codes_of("fp8 blocks", (22, 256)), codes_of("int8 zeros", (9, 256)))
    bias = given(1, 31, 1)[0]
    made = layers.linear(x, layers.pack(MixedCodes(parts)), bias)
    check(made, x, torch.cat([meaning(part) for part in parts]), bias)
    assert layers.linear(x[:0], layers.pack(ordered)).shape == (0, 70)


@interprets
@pytest.mark.slow
@pytest.mark.usefixtures("ordered_products")
def test_bits_of_a_row_are_its_own() -> None:
    from weft.ops.triton import words_linear as layers

    _, made = worded("nvfp4", (20, 520))
    x = given(20, 520)
    whole = layers.linear_invariant(x, made)
    assert torch.equal(layers.linear_invariant(x[7:8].clone(), made), whole[7:8])


def test_what_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words in bfloat16 on Hopper; rows of codes for other dtypes, and for experts."""
    monkeypatch.setattr(kernels, "takes_words", lambda: True)
    cuda, half = torch.device("cuda"), torch.bfloat16
    for form in ("", "_int8", "_w8a8", "_int4", "_w4a8", "_fp8"):
        found = [choose("linear" + form, half, cuda, invariant=demanded) for demanded in (False, True)]
        assert [one.name for one in found] == ["triton-words", "triton-invariant-words"]
        assert choose("linear" + form, torch.float64, cuda).name == "torch"


# --- on a GPU ---


class TestOnGpu:
    """Products with PTX."""

    pytestmark = on_gpu

    @pytest.mark.parametrize("form", WORDED)
    def test_products(self, form: str) -> None:
        """Every format, in real and in odd shapes, with all numbers of rows."""
        from weft.ops.triton import words_linear as layers

        for shape in REAL:
            codes, made = worded(form, shape)
            assert layers.checked_words(made).right
            weight = meaning(codes.to(DEVICE))
            bias = given(1, shape[0], 1)[0]
            for rows in ROWS:
                x = given(rows, shape[1])
                check(layers.linear(x, made, bias), x, weight, bias)
                check(
                    layers.linear_invariant(x, made, bias), x, weight, bias
                )  # with bias: fewer compilations

    @pytest.mark.parametrize("form", WORDED)
    def test_bits_of_a_row_are_its_own(self, form: str) -> None:
        from weft.ops.triton import words_linear as layers

        _, made = worded(form, (6144, 4096))
        x = given(256, 4096)
        whole = layers.linear_invariant(x, made)
        for begin, count in ((0, 1), (100, 1), (5, 16), (30, 64), (0, 130)):
            rows = slice(begin, begin + count)
            assert torch.equal(layers.linear_invariant(x[rows].clone(), made), whole[rows]), count
        few = layers.linear(x[:16], made)
        assert torch.equal(layers.linear(x[5:6].clone(), made), few[5:6])

    @pytest.mark.parametrize("form", WORDED)
    def test_all_forms_give_equal_bits(self, form: str) -> None:
        """The fast kernel is then the invariant one. The verdict of ``checked`` decides at run time."""
        from weft.ops.triton import words_linear as layers

        _, made = worded(form, (192, 2048))
        assert layers.checked_words(made).alike

    def test_a_wrong_kernel_is_found(self, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
        """A planted fault in the PTX: the other layout is used, and a warning names the format."""
        from weft.ops.triton import words as kernel
        from weft.ops.triton import words_linear as layers

        layers.checked.cache_clear()
        right = kernel.unpacking_of
        monkeypatch.setattr(kernel, "unpacking_of", lambda made: right(made).replace("0x4308", "0x4309"))
        try:
            made = layers.pack(codes_of("int4", (192, 1024)).to(DEVICE))
        finally:
            layers.checked.cache_clear()
        assert isinstance(made, Codes)
        assert "int4 in words is not used" in caplog.text
