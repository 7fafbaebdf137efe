"""The kernels around sparse attention against torch, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.support.slow import mostly_slow
from weft.ops import latent_ops, sparse_ops
from weft.ops.latent_ops import IndexParts
from weft.ops.triton import interpreting

Tensor = torch.Tensor

THERE = torch.cuda.is_available()
DEVICE = "cuda" if THERE else "cpu"
READY = importlib.util.find_spec("triton") is not None and (THERE or interpreting())
pytestmark = [
    pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1"),
    *([pytest.mark.gpu] if THERE else []),
]
#: The interpreter rounds to bfloat16 towards zero.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def angles(tokens: int, rope: int) -> tuple[Tensor, Tensor]:
    turned = torch.randn(tokens, rope // 2)
    return turned.cos().to(DEVICE), turned.sin().to(DEVICE)


def near(made: Tensor, exact: Tensor, dtype: torch.dtype) -> bool:
    away = (made.double() - exact.double()).abs().max()
    return bool(away <= CLOSE[dtype] * exact.double().abs().max().clamp(min=1))


@mostly_slow("dtype", DTYPES, [torch.float32])
@pytest.mark.parametrize(("first", "second"), [(False, True), (True, False)])
def test_entries_with_the_key_of_an_indexer(dtype: torch.dtype, first: bool, second: bool) -> None:
    """All inputs are parts of wider rows. Other lines stay as they are, and a row alone has the same bits."""
    from weft.ops.triton.latent import latent_rope_cache

    q_lora, lora, rope, index_heads, dim = 20, 12, 8, 5, 14
    size = q_lora + lora + rope
    rows, (cos, sin) = normal(4, size + dim + index_heads + 3, dtype=dtype), angles(4, rope)
    rows[2, size : size + dim] += 8  # a mean far above the deviation
    q_norm, norm, key_norm, key_bias = (normal(n, dtype=dtype) for n in (q_lora, lora, dim, dim))
    index = IndexParts(rows[:, size : size + dim + index_heads], key_norm, key_bias, 1e-6, second)
    cache, writes = normal(3, 4, lora + rope + dim, dtype=dtype), torch.tensor([2, 11, 5, 7], device=DEVICE)
    before, alone = cache.clone(), torch.zeros_like(cache)
    low = latent_rope_cache(rows[:, :size], q_norm, norm, 1e-6, cos, sin, first, cache, writes, index)
    expected = latent_ops.latent_rope_cache(
        rows[:, :size], q_norm, norm, 1e-6, cos, sin, first, before, writes
    )
    before.view(-1, cache.shape[2])[writes, lora + rope :] = index.key(cos, sin)
    assert near(low, expected, dtype)
    assert near(cache, before, dtype)
    exact = index._replace(joined=index.joined.double(), norm=index.norm.double(), bias=index.bias.double())
    of_float64 = exact.key(cos.double(), sin.double())
    assert near(cache.view(-1, cache.shape[2])[writes, lora + rope :], of_float64, dtype)
    one = slice(2, 3)
    mine = index._replace(joined=index.joined[one])
    latent_rope_cache(
        rows[one, :size], q_norm, norm, 1e-6, cos[one], sin[one], first, alone, writes[one], mine
    )
    assert torch.equal(alone.view(-1, cache.shape[2])[5], cache.view(-1, cache.shape[2])[5])


def test_entries_in_8_bits_with_the_key_of_an_indexer() -> None:
    """Exact elements are those of a plain cache. Codes and scales are those of a cache without an indexer."""
    from weft.ops.triton.latent import latent_rope_cache, latent_rope_cache_fp8

    q_lora, lora, rope, dim = 20, 12, 8, 14
    rows, (cos, sin) = normal(4, q_lora + lora + rope + dim + 5), angles(4, rope)
    norms = (normal(q_lora), normal(lora), 1e-6, cos, sin, True)
    index = IndexParts(rows[:, q_lora + lora + rope :], normal(dim), normal(dim), 1e-6, False)
    writes, joined = torch.tensor([2, 11, 5, 7], device=DEVICE), rows[:, : q_lora + lora + rope]
    plain = torch.zeros(3, 4, lora + rope + dim, device=DEVICE)
    low = latent_rope_cache(joined, *norms, plain, writes, index)
    made = []
    for width, one in ((rope + dim, index), (rope, None)):
        codes = torch.zeros(3, 4, lora, device=DEVICE).to(torch.float8_e4m3fn)
        caches = codes, torch.zeros(3, 4, device=DEVICE), torch.zeros(3, 4, width, device=DEVICE)
        assert torch.equal(latent_rope_cache_fp8(joined, *norms, *caches, writes, one), low)
        made.append(caches)
    (codes, scales, exact), (others, more, keys) = made
    assert torch.equal(exact, plain[..., lora:])
    assert torch.equal(exact[..., :rope], keys)
    assert torch.equal(codes.view(torch.uint8), others.view(torch.uint8))
    assert torch.equal(scales, more)
    assert scales.count_nonzero() == 4


@mostly_slow("dtype", DTYPES, [torch.float32])
def test_products_of_heads(dtype: torch.dtype, ordered_products: Any) -> None:
    """Into a part of wider rows, with matrices of either order, with equal bits for any number of rows."""
    from weft.ops.triton.indexed import head_product_into

    x, matrices = normal(37, 3, 50, dtype=dtype), normal(3, 50, 70, dtype=dtype)
    rows = normal(37, 3, 90, dtype=dtype)
    head_product_into(x, matrices.transpose(1, 2), rows[..., :70])
    exact = torch.einsum("thn,hnm->thm", x.double(), matrices.double())
    assert near(rows[..., :70], exact, dtype)
    for first, last in ((0, 1), (5, 30), (36, 37)):
        alone = torch.empty_like(rows[first:last, :, :70])
        head_product_into(x[first:last].clone(), matrices.transpose(1, 2), alone)
        assert torch.equal(alone, rows[first:last, :, :70])
    latent_ops.head_product_into(x, matrices.transpose(1, 2), rows[..., :70])
    assert near(rows[..., :70], exact, dtype)


@mostly_slow("dtype", DTYPES, [torch.float32])
@mostly_slow("streams", [3, 4], [3])
def test_streams(dtype: torch.dtype, streams: int) -> None:
    """Weights of extreme size, and columns of several programs."""
    from weft.ops.triton import streams as kernels

    hidden, outputs = 1100, (2 + streams) * streams
    x, made = normal(3, streams, hidden, dtype=dtype), normal(3, hidden, dtype=dtype)
    mixed = normal(3, outputs) * torch.tensor([1.0, 10.0, 80.0], device=DEVICE).unsqueeze(1)
    given = (mixed, normal(3), normal(outputs), x, 20, 1e-6)
    expected, found = sparse_ops.mix_streams(*given), kernels.mix_streams(*given)
    for mine, theirs, kind in zip(found, expected, (dtype, torch.float32, torch.float32), strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine.double() - theirs.double()).abs().max() < max(CLOSE[kind], 1e-5) * 4
    added, exact = (run(x, made, *expected[1:]) for run in (kernels.add_streams, sparse_ops.add_streams))
    assert near(added, exact, dtype)
    alone = kernels.mix_streams(mixed[1:2], *given[1:3], x[1:2], 20, 1e-6)
    assert all(torch.equal(one[0], whole[1]) for one, whole in zip(alone, found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_of_neighbours(dtype: torch.dtype) -> None:
    """In place, of heads in wider rows; elements in front stay as they are."""
    from weft.ops.triton.streams import rotate_neighbours

    rows = normal(3, 5 * 14 + 2, dtype=dtype)
    theirs, cos_sin = rows.clone(), angles(3, 6)
    exact = sparse_ops.rotate_pairs_(theirs[:, : 5 * 14].unflatten(1, (5, 14)), *cos_sin)
    made = rotate_neighbours(rows[:, : 5 * 14].unflatten(1, (5, 14)), *cos_sin)
    assert made.data_ptr() == rows.data_ptr()
    assert near(rows, theirs, dtype)
    assert near(made, exact, dtype)
