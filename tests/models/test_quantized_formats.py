"""Every quantized format against independently computed values, bit for bit in float64."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.support import quantized as make
from weft.config.spec import QuantizedSpec
from weft.models.quantized import awq, float4, float8, gptq, packed
from weft.models.quantized.readers import LacksTensors, read
from weft.models.quantized.scales import Misfit, as_numbers
from weft.ops import coded

F64 = torch.float64


def _weight(*shape: int, seed: int = 0) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made * torch.logspace(-3, 0, shape[-1])


# --- FP8 ---


@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (130, 1), (5, 129)])
@pytest.mark.parametrize("exponents", [False, True])
@pytest.mark.parametrize("scale", ["tensor", "channel", "block"])
def test_fp8(scale: str, exponents: bool, shape: tuple[int, int]) -> None:
    parts, exact = make.fp8(_weight(*shape), scale, exponents=exponents)
    made = float8.dequantize(parts["weight"], parts["weight_scale_inv"], F64, (128, 128))
    assert torch.equal(made, exact)
    nearly = float8.dequantize(parts["weight"], parts["weight_scale_inv"], torch.float32, (128, 128))
    assert nearly.dtype == torch.float32
    assert torch.allclose(nearly.double(), exact, rtol=2**-23, atol=0)


@pytest.mark.parametrize("block", [(1, 32), (16, 16), (64, 128), (128, 64)])
def test_fp8_blocks_of_other_sizes(block: tuple[int, int]) -> None:
    """The block size comes from the configuration, or from an even division if the configuration does not
    fit.
    """
    parts, exact = make.fp8(_weight(128, 256), "block", block=block, exponents=block[0] == 1)
    for said in (block, None, (128, 128)):
        assert torch.equal(float8.dequantize(parts["weight"], parts["weight_scale_inv"], F64, said), exact)


def test_fp8_shapes_of_one_scale_and_of_rows() -> None:
    parts, exact = make.fp8(_weight(48, 64), "tensor")
    for shape in ((), (1,), (1, 1)):
        scale = parts["weight_scale_inv"].reshape(shape)
        assert torch.equal(float8.dequantize(parts["weight"], scale, F64), exact)
    parts, exact = make.fp8(_weight(48, 64), "channel")
    for shape in ((48,), (48, 1)):
        scale = parts["weight_scale_inv"].reshape(shape)
        assert torch.equal(float8.dequantize(parts["weight"], scale, F64), exact)


def test_fp8_equals_transformers() -> None:
    parts, _ = make.fp8(_weight(256, 384), "block")
    values, scale = parts["weight"], parts["weight_scale_inv"]
    ours = float8.dequantize(values, scale, torch.float32, (128, 128))
    assert torch.equal(ours, Fp8Dequantize(None)._dequantize_one(values, scale, torch.float32))
    parts, _ = make.fp8(_weight(200, 300), "block")  # the last blocks are cut
    values, scale = parts["weight"], parts["weight_scale_inv"]
    ours = float8.dequantize(values, scale, torch.float32, (128, 128))
    of_each = scale.repeat_interleave(128, 0)[:200].repeat_interleave(128, 1)[:, :300]
    assert torch.equal(ours, values.float() * of_each)


def test_e5m2_and_int8_values() -> None:
    weight = _weight(8, 16)
    scale = torch.rand(8, 1) + 0.5
    for dtype in (torch.float8_e5m2, torch.int8):
        values = (weight * 50).to(dtype)
        assert torch.equal(float8.dequantize(values, scale, F64), values.double() * scale.double())


def test_exponents() -> None:
    codes = torch.tensor([0, 1, 126, 127, 128, 254], dtype=torch.uint8)
    expected = torch.tensor([2.0**-127, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127], dtype=F64)
    assert torch.equal(as_numbers(codes, F64), expected)
    assert torch.equal(as_numbers(codes.view(torch.float8_e8m0fnu), F64), expected)
    assert as_numbers(torch.tensor([255], dtype=torch.uint8), F64).isnan().all()


# --- FP4 ---


@pytest.mark.parametrize("divides", [False, True])
def test_nvfp4(divides: bool) -> None:
    parts, exact = make.nvfp4(_weight(24, 96), divides=divides)
    values = parts["weight_packed" if divides else "weight"]
    which = {"divisor": parts["weight_global_scale"]} if divides else {"factor": parts["weight_scale_2"]}
    assert torch.equal(float4.dequantize(values, parts["weight_scale"], F64, **which), exact)
    assert (exact != 0).float().mean() > 0.8


def test_mxfp4() -> None:
    values, scale, exact = make.mxfp4(_weight(24, 96))
    assert torch.equal(float4.dequantize(values, scale, F64), exact)
    signed, typed = values.view(torch.int8), scale.view(torch.float8_e8m0fnu)
    assert torch.equal(float4.dequantize(signed, typed, F64), exact)


def test_every_code_of_four_bits() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 256)
    made = float4.unpack(every, F64)
    expected = [v for high in range(16) for low in range(16) for v in (coded.E2M1[low], coded.E2M1[high])]
    assert made.tolist() == [expected]
    assert sorted({abs(v) for v in expected}) == make.E2M1


def test_mxfp4_blocks_equal_transformers() -> None:
    """GPT-OSS: experts [E, outputs, inputs / 32, 16] are matrices [inputs, outputs]."""
    values, scale, exact = make.mxfp4(_weight(3, 40, 64))
    blocks = values.unflatten(-1, (-1, 16))
    assert blocks.shape == (3, 40, 2, 16)
    theirs = convert_moe_packed_tensors(blocks, scale, dtype=torch.float32)
    form, pieces = read({"blocks": blocks, "scales": scale}, QuantizedSpec(method="mxfp4"), F64)
    made = list(pieces)
    assert form == "MXFP4"
    assert [piece.index for piece in made] == [(0,), (1,), (2,)]
    ours = torch.stack([piece.values for piece in made])
    assert torch.equal(ours, exact.transpose(1, 2))
    assert torch.equal(ours.float(), theirs)


def test_fp4_under_a_plain_name_equals_transformers() -> None:
    """DeepSeek V4's experts: int8 bytes and E8M0 scales for each 32."""
    values, scale, exact = make.mxfp4(_weight(24, 96))
    parts = {"": values.view(torch.int8), "scale": scale.view(torch.float8_e8m0fnu)}
    form, pieces = read(parts, QuantizedSpec(method="fp8", block=(128, 128)), F64)
    assert form == "MXFP4"
    made = next(pieces).values
    assert torch.equal(made, exact)
    theirs = Fp8Dequantize(None)._dequantize_one(parts[""], parts["scale"], torch.float32)
    assert torch.equal(made.float(), theirs)


# --- integers ---


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize("desc_act", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq(bits: int, desc_act: bool, v2: bool) -> None:
    parts, exact = make.gptq((48, 96), bits, 32, desc_act=desc_act, v2=v2, seed=bits)
    tensors = (parts["qweight"], parts["qzeros"], parts["scales"], F64)
    made = gptq.dequantize(*tensors, groups=parts["g_idx"], offset=0 if v2 else 1)
    assert torch.equal(made, exact)
    wrong = gptq.dequantize(*tensors, groups=parts["g_idx"], offset=1 if v2 else 0)
    assert not torch.equal(wrong, exact)
    if not desc_act:
        assert torch.equal(gptq.dequantize(*tensors, offset=0 if v2 else 1), exact)


def test_gptq_zero_points_wrap() -> None:
    """A zero point of 0 is stored as the largest value."""
    parts, exact = make.gptq((128, 32), 4, 32, seed=3)
    stored = {int(w) >> (4 * i) & 15 for w in parts["qzeros"].flatten() for i in range(8)}
    assert 15 in stored
    made = gptq.dequantize(parts["qweight"], parts["qzeros"], parts["scales"], F64)
    assert torch.equal(made, exact)


@pytest.mark.parametrize(("shape", "group"), [((48, 96), 32), ((8, 64), 64), ((64, 40), 8)])
def test_awq(shape: tuple[int, int], group: int) -> None:
    parts, exact = make.awq(shape, group)
    made = awq.dequantize(parts["qweight"], parts["qzeros"], parts["scales"], F64)
    assert torch.equal(made, exact)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("shape", "group", "zeros", "order"),
    [
        ((48, 96), 32, False, False),
        ((20, 100), 0, False, False),
        ((20, 96), 32, True, False),
        ((20, 96), 0, True, False),
        ((24, 96), 32, False, True),
    ],
)
def test_packed(bits: int, shape: tuple[int, int], group: int, zeros: bool, order: bool) -> None:
    parts, exact = make.packed(shape, bits, group, zeros=zeros, order=order)
    made = packed.dequantize(
        parts["weight_packed"],
        parts["weight_scale"],
        parts["weight_shape"],
        F64,
        zeros=parts.get("weight_zero_point"),
        groups=parts.get("weight_g_idx"),
    )
    assert torch.equal(made, exact)


# --- parts that do not fit ---


def test_scales_that_do_not_fit_are_refused() -> None:
    values = torch.zeros(100, 100, dtype=torch.float8_e4m3fn)
    with pytest.raises(Misfit, match=r"grid of \[3, 7\]"):
        float8.dequantize(values, torch.ones(3, 7), F64)
    with pytest.raises(Misfit, match=r"do not fit .* 4 bits"):
        float4.dequantize(torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 3), F64)
    parts, _ = make.awq((16, 64), 32)
    with pytest.raises(Misfit, match="qweight"):
        awq.dequantize(parts["qweight"], parts["qzeros"], parts["scales"][:, :8], F64)
    with pytest.raises(Misfit, match="equal groups"):
        awq.dequantize(parts["qweight"][:63], parts["qzeros"], parts["scales"], F64)
    parts, _ = make.gptq((16, 64), 4, 32)
    with pytest.raises(Misfit, match="refers to another"):
        gptq.dequantize(parts["qweight"], parts["qzeros"], parts["scales"], F64, groups=parts["g_idx"] + 1)


def test_parts_that_are_missing_are_named() -> None:
    fp8 = torch.zeros(4, 4, dtype=torch.float8_e4m3fn)
    bytes_ = torch.zeros(4, 16, dtype=torch.uint8)
    cases = [
        ({"": fp8}, "fp8", "scale"),
        ({"scale": torch.ones(1)}, "fp8", ""),
        ({"": bytes_, "scale": torch.ones(4, 2).to(torch.float8_e4m3fn)}, "modelopt", "factor"),
        ({"qweight": torch.zeros(1, 8, dtype=torch.int32)}, "gptq", "qzeros"),
        ({"scales": torch.ones(1, 8)}, "awq", "qweight"),
        ({"blocks": bytes_}, "mxfp4", "scales"),
    ]
    for parts, method, lacking in cases:
        with pytest.raises(LacksTensors) as raised:
            read(parts, QuantizedSpec(method=method), F64)
        assert raised.value.role == lacking
