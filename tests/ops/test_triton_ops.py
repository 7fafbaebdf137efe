"""Triton's elementwise ops and matrix product against torch references, independent of other rows.

They run in the interpreter on the CPU, or on a GPU. The interpreter rounds bfloat16 towards zero.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch

from weft.common.errors import ConfigError
from weft.ops import torch_ops
from weft.ops import triton as kernels
from weft.ops.implementations import triton  # noqa: F401 (registers)
from weft.ops.registry import choose

Tensor = torch.Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
READY = importlib.util.find_spec("triton") is not None and (DEVICE.type == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
#: dtype, and the largest difference beside 1 + the number: the reference may round otherwise, twice
TYPES = [(torch.float32, 4e-6), (torch.float16, 3e-3), (torch.bfloat16, 2.5e-2)]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    return torch.allclose(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("size", [48, 64, 1000])
def test_norms(size: int, dtype: torch.dtype, tolerance: float) -> None:
    from weft.ops.triton import fused

    x, delta, weight = (random(5, size, dtype=dtype, seed=i) for i in range(3))
    weight = weight[0].contiguous()
    assert close(fused.rms_norm(x, weight, 1e-5), torch_ops.rms_norm(x, weight, 1e-5), tolerance)
    heads = x.view(5, 2, -1)
    half = weight[: size // 2]
    assert close(fused.rms_norm(heads, half, 1e-5), torch_ops.rms_norm(heads, half, 1e-5), tolerance)
    expected = torch_ops.add_rms_norm(x.clone(), delta, weight, 1e-5)
    own = x.clone()
    stream, normed = fused.add_rms_norm(own, delta, weight, 1e-5)
    assert stream.data_ptr() == own.data_ptr()
    assert close(stream, expected[0], tolerance)
    assert close(normed, expected[1], tolerance)
    stream, normed = fused.add_rms_norm(x, None, weight, 1e-5)
    assert stream is x
    assert close(normed, torch_ops.rms_norm(x, weight, 1e-5), tolerance)
    assert fused.rms_norm(x[:0], weight, 1e-5).shape == (0, size)


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "half", "norms"),
    [
        (6, 2, 16, 8, (True, True)),
        (4, 4, 20, 10, (False, False)),
        (3, 1, 24, 4, (False, True)),
        (1, 1, 16, 6, (True, False)),
        (2, 1, 16, 0, (False, False)),
    ],
)
def test_rope_and_cache(
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    norms: tuple[bool, bool],
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    """Covers whole, partial and no rotation and single norms; unwritten entries stay NaN."""
    from weft.ops.triton import fused

    # Columns of wider rows, as beside an output gate.
    qkv = random(7, (heads + 2 * kv_heads) * dim + 3, dtype=dtype)[:, 3:]
    weights = [random(dim, dtype=dtype, seed=i) if norm else None for i, norm in enumerate(norms)]
    angles = random(7, half, dtype=torch.float32)
    writes = torch.tensor([4, 5, 6, 7, 12, 13, 20], device=DEVICE)
    cache = torch.full((6, 2, kv_heads, 4, dim), float("nan"), dtype=dtype, device=DEVICE)
    caches = [cache, cache.clone()]
    made = [
        run(qkv, heads, kv_heads, *weights, 1e-6, angles.cos(), angles.sin(), own, writes)  # type: ignore[call-arg]
        for run, own in zip((torch_ops.qkv_rope_cache, fused.qkv_rope_cache), caches, strict=True)
    ]
    assert close(made[1], made[0], tolerance)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert close(caches[1].nan_to_num(), caches[0].nan_to_num(), tolerance)


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("interleaved", "normed"), [(True, True), (False, False)])
def test_entries_of_latent_attention(
    interleaved: bool, normed: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Odd sizes, entries that are not written stay NaN, and rows do not depend on each other."""
    from weft.ops import latent_ops
    from weft.ops.triton import latent

    first, lora, rope = 21, 13, 6
    joined = random(5, first + lora + rope, dtype=dtype)
    weight = random(lora, dtype=dtype, seed=1)
    q_weight = random(first, dtype=dtype, seed=2) if normed else None
    angles = random(5, rope // 2, dtype=torch.float32)
    writes = torch.tensor([4, 5, 6, 12, 0], device=DEVICE)
    made, caches = [], []
    for run in (latent_ops.latent_rope_cache, latent.latent_rope_cache):
        caches.append(torch.full((4, 4, lora + rope), float("nan"), dtype=dtype, device=DEVICE))
        more = (angles.cos(), angles.sin(), interleaved, caches[-1], writes)
        made.append(run(joined, q_weight, weight, 1e-6, *more))
    assert close(made[1], made[0], tolerance)
    assert torch.equal(caches[0].isnan(), caches[1].isnan())
    assert close(caches[1].nan_to_num(), caches[0].nan_to_num(), tolerance)
    alone = torch.empty_like(caches[1])
    more = (angles.cos()[3:4], angles.sin()[3:4], interleaved, alone, writes[3:4])
    assert torch.equal(latent.latent_rope_cache(joined[3:4], q_weight, weight, 1e-6, *more)[0], made[1][3])
    assert torch.equal(alone[3, 0], caches[1][3, 0])


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize("size", [37, 1500])
def test_gated(size: int, dtype: torch.dtype, tolerance: float) -> None:
    from weft.ops.triton import coded, fused

    x = random(3, 2 * size, dtype=dtype)
    for activation in ("silu", "gelu"):
        assert close(fused.gated(x, activation), torch_ops.gated(x, activation), tolerance)
    assert fused.gated(x[:0], "silu").shape == (0, size)
    outer = torch.cat((x, x[:, :5]), dim=1)[:, 3 : 3 + 2 * size]
    gates, values = outer[:, :size], outer[:, size:]
    assert close(fused.sigmoid_gate(values, gates), torch_ops.sigmoid_gate(values, gates), tolerance)
    weight, bias = random(2 * size, 40, dtype=dtype), random(2 * size, dtype=dtype)
    y = random(3, 40, dtype=dtype, seed=9) / 8
    made = coded.gated_linear(y, weight, bias, "silu")
    assert close(made, torch_ops.gated_linear(y, weight, bias, "silu"), 4 * tolerance)


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), TYPES)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 48), (70, 100)])
def test_the_invariant_product(inputs: int, outputs: int, dtype: torch.dtype, tolerance: float) -> None:
    from weft.ops.triton import coded, matmul

    x, weight = random(70, inputs, dtype=dtype) / 8, random(outputs, inputs, dtype=dtype, seed=1)
    bias = random(outputs, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T
    assert close(matmul.linear(x, weight, bias), (exact + bias.double()).to(dtype), tolerance)
    assert close(matmul.linear(x, weight), exact.to(dtype), tolerance)
    assert matmul.linear(x[:0], weight, bias).shape == (0, outputs)
    gate_up = torch.cat([weight, weight])
    expected = torch_ops.gated(x.double() @ gate_up.double().T, "gelu").to(dtype)
    assert close(coded.gated_linear_invariant(x, gate_up, None, "gelu"), expected, 2 * tolerance)


def _each_row_alone(run: Callable[[Tensor], Tensor], x: Tensor) -> None:
    together = run(x.clone())  # the sum may reuse the memory
    for begin, count in ((0, 1), (2, 3), (len(x) - 1, 1)):
        assert torch.equal(run(x[begin : begin + count].clone()), together[begin : begin + count])


@runs
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_do_not_know_of_each_other(dtype: torch.dtype) -> None:
    """Ops declared invariant give equal bits for a row alone."""
    from weft.ops.triton import fused, matmul

    x, weight = random(9, 96, dtype=dtype), random(50, 96, dtype=dtype, seed=1)
    _each_row_alone(lambda rows: matmul.linear(rows, weight), x)
    _each_row_alone(lambda rows: fused.rms_norm(rows, weight[0].contiguous(), 1e-6), x)
    _each_row_alone(lambda rows: fused.add_rms_norm(rows, rows * 2, weight[0].contiguous(), 1e-6)[1], x)
    _each_row_alone(lambda rows: fused.gated(rows, "silu"), x)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_invariant_product_in_real_sizes_on_a_gpu(dtype: torch.dtype) -> None:
    """Close to cuBLAS, and bitwise the same for a row alone, in a batch and in a prompt."""
    from weft.ops.triton import matmul

    weight = random(3072, 4096, dtype=dtype, seed=1) / 64
    x = random(2048, 4096, dtype=dtype)
    whole = matmul.linear(x, weight)
    assert (whole.float() - (x.float() @ weight.float().T)).abs().max() < 5e-2
    for rows in (1, 3, 64, 65, 700):
        assert torch.equal(matmul.linear(x[:rows].clone(), weight), whole[:rows])


def test_what_is_chosen_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are the default, the invariant product on demand, and float64 uses torch."""
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "takes_words", lambda: False)
    kernels.available.cache_clear()
    try:
        fused = ("rms_norm", "add_rms_norm", "qkv_rope_cache", "gated", "gated_linear", "linear")
        installed = importlib.util.find_spec("triton") is not None
        assert all((choose(op, half, cuda).name == "triton") == installed for op in fused)
        assert choose("add_rms_norm", torch.float64, cuda).name.startswith("torch")
        if installed:
            assert choose("linear", half, cuda, invariant=True).name == "triton-invariant"
            assert choose("gated_linear", half, cuda, invariant=True).name == "triton-invariant"
        with pytest.raises(ConfigError, match="invariant"):
            choose("linear", torch.float64, cuda, invariant=True)
    finally:
        kernels.available.cache_clear()
    assert choose("add_rms_norm", half, torch.device("cpu")).name != "triton"


def test_without_triton_or_a_device_nothing_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: None)
    kernels.available.cache_clear()
    kernels.interpreting.cache_clear()
    try:
        assert not kernels.available()
        assert not kernels.interpreting()
        assert choose("add_rms_norm", torch.bfloat16, torch.device("cuda")).name.startswith("torch")
    finally:
        kernels.available.cache_clear()
        kernels.interpreting.cache_clear()
