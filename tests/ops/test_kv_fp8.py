"""Lines of an 8-bit cache: their encoding and its precision."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable

import pytest
import torch

from tests.support.slow import mostly_slow
from weft.ops import kv_fp8, torch_ops
from weft.ops import triton as kernels
from weft.ops.cpu import fused

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READY = importlib.util.find_spec("triton") is not None and (DEVICE == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
#: Every finite value of E4M3 by definition: 1 sign, 4 exponent (bias 7), 3 mantissa bits.
POSITIVE = sorted(
    {m * 2.0**-9 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)


def _nearest(x: float) -> float:
    """By exhaustion; of two equally near the one with the even mantissa."""
    size = abs(x)
    best = min(range(len(POSITIVE)), key=lambda i: (abs(POSITIVE[i] - size), i % 2))
    return math.copysign(POSITIVE[best], x)


def _lines(dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(60, 32, dtype=torch.float64) * torch.logspace(-3, 3, 60, dtype=torch.float64)[:, None]
    x[0] = 0
    x[1, 0] = 448 * 2.0**-3  # the largest value at a border of the scale
    x[2, 0] = math.nextafter(448 * 2.0**5, math.inf) if dtype == torch.float64 else 456 * 2.0**5
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_scales_by_their_definition(dtype: torch.dtype) -> None:
    lines = _lines(dtype)
    values, scales = kv_fp8.quantize(lines)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.dtype == torch.float32
    for x, q, s in zip(lines.double().tolist(), values.double().tolist(), scales.tolist(), strict=True):
        top = max(map(abs, x))
        assert math.frexp(s)[0] == 0.5, "a power of two"
        assert top <= 448 * s
        assert top == 0 or top > 224 * s, "not the smallest that fits"
        assert q == [_nearest(v / s) for v in x]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reading_is_exact(dtype: torch.dtype) -> None:
    values, scales = kv_fp8.quantize(_lines(dtype))
    made = kv_fp8.dequantize(values, scales, dtype)
    assert made.dtype == dtype
    assert torch.equal(made.double(), values.double() * scales.double()[:, None])
    again, same = kv_fp8.quantize(made)
    assert torch.equal(kv_fp8.dequantize(again, same, dtype), made), "what was read is written unchanged"


def test_relative_error() -> None:
    lines = torch.randn(1000, 128, generator=torch.Generator().manual_seed(1))
    made = kv_fp8.dequantize(*kv_fp8.quantize(lines), torch.float32)
    large = lines.abs() > lines.abs().amax(1, keepdim=True) / 2**13
    assert ((made - lines).abs() / lines.abs())[large].max() <= 2**-4
    assert (made - lines).norm() / lines.norm() < 0.03


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_line_that_is_not_finite_reads_as_nan(dtype: torch.dtype, broken: float) -> None:
    lines = torch.ones(3, 16, dtype=dtype)
    lines[1, 5] = broken
    made = kv_fp8.dequantize(*kv_fp8.quantize(lines), dtype)
    assert made[1].isnan().all()
    assert torch.equal(made[[0, 2]], lines[[0, 2]])


def test_the_largest_and_the_smallest_numbers() -> None:
    for dtype in DTYPES[1:]:
        info = torch.finfo(dtype)
        most = info.max if dtype == torch.float16 else 2.0**127
        lines = torch.tensor([[most, 1.0], [info.tiny, 0.0], [info.tiny / 4, 0.0]], dtype=dtype)
        made = kv_fp8.dequantize(*kv_fp8.quantize(lines), dtype)
        assert torch.isfinite(made).all(), dtype
        assert made[0, 0] == most
        assert made[1, 0] == info.tiny
    assert kv_fp8.quantize(torch.zeros(2, 0, 4))[0].shape == (2, 0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_op_writes_the_lines_that_the_plain_one_writes(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    heads, kv_heads, dim, block, tokens = 4, 2, 16, 4, 11
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    wide = torch_ops.wide(dtype)
    angles = torch.rand(tokens, dim // 2, dtype=wide)
    weights = torch.rand(2, dim).to(dtype)
    writes = torch.randperm(6 * block)[:tokens] + block
    plain = torch.full((8, 2, kv_heads, block, dim), math.nan, dtype=dtype)
    cache = torch.full(plain.shape, math.nan, dtype=torch.float8_e4m3fn)
    scales = torch.full(plain.shape[:-1], math.nan)
    common = (qkv, heads, kv_heads, weights[0], weights[1], 1e-6, angles.cos(), angles.sin())
    wanted = torch_ops.qkv_rope_cache(*common, plain, writes)
    made = kv_fp8.qkv_rope_cache_fp8(*common, cache, scales, writes)
    assert torch.equal(made, wanted)
    expected, own = kv_fp8.quantize(plain)
    written = torch.zeros(8 * block, dtype=torch.bool)
    written[writes] = True
    where = written.view(8, 1, 1, block).expand(own.shape)
    assert torch.equal(cache.view(torch.uint8)[where], expected.view(torch.uint8)[where])
    assert torch.equal(scales[where], own[where])
    assert scales[~where].isnan().all(), "nothing else was touched"


def _hard_lines(each: int, dim: int) -> torch.Tensor:
    """Return lines float32 [80, each, dim] with every code, of all sizes. Lines [8, 3] and [9, 6] are not
    finite."""
    tokens = 80
    lines = torch.randn(tokens, each, dim) * torch.logspace(-30, 30, tokens)[:, None, None]
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.cat((every, every * 1.0625, every * 0.984))
    lines[30:] = codes[torch.randint(0, len(codes), lines[30:].shape)]
    lines = lines.nan_to_num(3.0)
    lines[5] = 0
    lines[6, :, 3] = 448 * 2.0**-4
    lines[7, :, 3] = 450 * 2.0**-4
    lines[8, 3, 4] = math.nan
    lines[9, 6, 5] = -math.inf
    lines[10] *= 1e-9  # denormal numbers of float32
    return lines


def _check_the_same_bits(op: Callable[..., torch.Tensor], dtype: torch.dtype, dim: int, device: str) -> None:
    """The heads are not rotated, so only the lines are computed; the lines contain every code."""
    torch.manual_seed(3)
    heads, kv_heads, block, tokens = 2, 3, 4, 80
    lines = _hard_lines(heads + 2 * kv_heads, dim)
    qkv = lines.view(tokens, -1).to(dtype).to(device)
    writes = (torch.randperm(60 * block)[:tokens] + block).to(device)
    angles = (torch.ones(tokens, 4, device=device), torch.zeros(tokens, 4, device=device))
    made = []
    for run in (kv_fp8.qkv_rope_cache_fp8, op):
        cache = torch.zeros(64, 2, kv_heads, block, dim, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.zeros(cache.shape[:-1], device=device)
        q = run(qkv, heads, kv_heads, None, None, 1e-6, *angles, cache, scales, writes)
        made.append((q, cache, scales))
    (wanted_q, wanted, wanted_scales), (q, cache, scales) = made
    assert torch.equal(q, wanted_q)
    assert torch.equal(scales.isnan(), wanted_scales.isnan())
    finite = ~scales.isnan()
    assert (~finite).sum() == 2
    assert torch.equal(scales[finite], wanted_scales[finite])
    assert torch.equal(cache.view(torch.uint8)[finite], wanted.view(torch.uint8)[finite])
    assert len(cache.view(torch.uint8)[finite].unique()) > 250


@pytest.mark.parametrize("dim", [16, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("extension")
def test_the_cpu_op_writes_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    _check_the_same_bits(fused.qkv_rope_cache_fp8, dtype, dim, "cpu")


@runs
@mostly_slow("dim", [36, 128], [36])
@mostly_slow("dtype", [torch.float32, torch.bfloat16], [torch.bfloat16], ids=str)
def test_the_kernel_writes_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    from weft.ops.triton import fused as kernel

    _check_the_same_bits(kernel.qkv_rope_cache_fp8, dtype, dim, DEVICE)


@runs
@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16], ids=str)
@pytest.mark.parametrize("normed", [True, False])
def test_the_kernel_writes_latents_by_the_same_rule(dtype: torch.dtype, normed: bool) -> None:
    """Codes and scales are those of the kernel's own latents in the model's dtype. All else is as in the
    kernel for plain caches, whose latents other tests compare with torch."""
    from weft.ops.triton import latent as kernel

    torch.manual_seed(4)
    first, lora, rope, block, tokens = 21, 52, 6, 4, 12
    joined = torch.randn(tokens, first + lora + rope).to(dtype).to(DEVICE)
    joined[5, first : first + lora] = 0
    joined[6, first + 3] = math.nan
    joined[7, first + 4] = math.inf
    weight = (torch.randn(lora) * torch.logspace(-3, 2, lora)).to(dtype).to(DEVICE)
    q_weight = torch.rand(first).to(dtype).to(DEVICE) if normed else None
    angles = torch.rand(tokens, rope // 2, device=DEVICE)
    writes = (torch.randperm(6 * block)[:tokens] + block).to(DEVICE)
    common = (joined, q_weight, weight, 1e-6, angles.cos(), angles.sin(), normed)
    plain = torch.zeros(8, block, lora + rope, dtype=dtype, device=DEVICE)
    wanted_q = kernel.latent_rope_cache(*common, plain, writes)
    cache = torch.zeros(8, block, lora, dtype=torch.float8_e4m3fn, device=DEVICE)
    scales = torch.full((8, block), -1.0, device=DEVICE)
    keys = torch.zeros(8, block, rope, dtype=dtype, device=DEVICE)
    q = kernel.latent_rope_cache_fp8(*common, cache, scales, keys, writes)
    assert torch.equal(q, wanted_q)
    assert torch.equal(keys, plain[..., lora:])
    values, own = kv_fp8.quantize(plain[..., :lora].reshape(-1, lora)[writes])
    made = scales.view(-1)[writes]
    assert own.isnan().sum() == 2
    assert torch.equal(made.isnan(), own.isnan())
    finite = ~own.isnan()
    assert torch.equal(made[finite], own[finite])
    codes = cache.view(torch.uint8).view(-1, lora)
    assert torch.equal(codes[writes][finite], values.view(torch.uint8)[finite])
    others = torch.ones(8 * block, dtype=torch.bool, device=DEVICE)
    others[writes] = False
    assert (scales.view(-1)[others] == -1).all(), "nothing else was touched"
    assert not codes[others].any()


@runs
@mostly_slow(
    ("dtype", "wide"),
    [*((dtype, False) for dtype in DTYPES[1:]), *((dtype, True) for dtype in DTYPES[2:])],
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=str,
)
@pytest.mark.parametrize("coded", [0, 36])
def test_the_kernel_writes_whole_lines_with_the_same_bits(
    dtype: torch.dtype, wide: bool, coded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines are parts of wider rows, in the dtype of the cache or in float32. Exact elements take several
    rounds. Other places stay as they are."""
    from weft.ops.triton import eight_bits

    monkeypatch.setattr(eight_bits, "STEP", 8)
    torch.manual_seed(5)
    width, places = 57, torch.randperm(6 * 50)
    lines = _hard_lines(7, width + 5).view(-1, width + 5)[::5].to(dtype)
    lines[::9, 50] = -448 * 2.0**-4
    # Rounding to the cache's dtype comes first: it removes the factor, and ties of codes are ties again.
    lines = (lines.float() * (1 + 2.0**-13) if wide else lines).to(DEVICE)[:, 2 : width + 2]
    rows = places[: len(lines)].to(DEVICE)
    made = []
    for run in (kv_fp8.write_lines, eight_bits.write_lines):
        exact = torch.full((6, 50, width - coded), 7.0, dtype=dtype, device=DEVICE)
        codes = torch.full((6, 50, coded), 7.0, device=DEVICE).to(torch.float8_e4m3fn)
        caches = (codes, torch.full((6, 50), 7.0, device=DEVICE), exact)[0 if coded else 2 :]
        run(caches, rows, lines)
        made.append(caches)
    wanted, found = made
    assert torch.equal(found[-1].view(torch.uint8), wanted[-1].view(torch.uint8))
    if coded:
        assert torch.equal(found[1].isnan(), wanted[1].isnan())
        finite = ~found[1].isnan()
        assert torch.equal(found[1][finite], wanted[1][finite])
        assert torch.equal(found[0].view(torch.uint8)[finite], wanted[0].view(torch.uint8)[finite])
        assert len(found[0].view(torch.uint8)[finite].unique()) > 240
    untouched = places[len(lines) :]
    assert (found[-1].view(-1, width - coded)[untouched] == 7).all()
