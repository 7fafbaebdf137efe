"""Sparse attention over caches in 8 bits equals sparse attention over the dequantized caches, bit for bit.

``expected`` of a scene is attention written out in float64 over the dequantized entries.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import pytest
import torch

from tests.attention.sparse_scene import Scene, Sizes
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.sparse import sparse_triton
from weft.attention.sparse.sparse import SparseBackend
from weft.attention.sparse.sparse_cpu import CpuSparse
from weft.attention.sparse.sparse_torch import TorchSparse
from weft.attention.sparse.sparse_triton import TritonInvariantSparse, TritonSparse
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec
from weft.ops import kv_fp8, latent_ops
from weft.ops import triton as kernels
from weft.ops.cpu import latent as cpu_latent
from weft.ops.triton import forms

Tensor = torch.Tensor
READY = importlib.util.find_spec("triton") is not None and kernels.interpreting()
SIZES = Sizes(heads=12, dim=48, index_heads=8, index_dim=32)
ROWS = [(5, 3), (0, 2), (141, 1), (8, 2), (340, 1)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Form(NamedTuple):
    """Entries of 48 elements: a window, groups (positions, chosen), values, and codes of an entry."""

    window: int
    groups: tuple[int, int]
    values: int
    coded: int


FORMS = {
    "latents": Form(0, (1, 60), 32, 32),
    "chosen groups": Form(37, (4, 7), 48, 32),
    "all groups": Form(5, (16, 0), 48, 32),
    "window": Form(20, (0, 0), 48, 32),
}


def scene(form: Form, dtype: torch.dtype, backend: SparseBackend, rows: Any = ROWS) -> Scene:
    made = Scene(
        rows,
        window=form.window,
        ratio=form.groups[0],
        top=form.groups[1],
        values=form.values,
        coded=form.coded,
        sinks=form.window > 0,
        dtype=dtype,
        sizes=SIZES,
        backend=backend,
    )
    if dtype != torch.float64:
        made.weights = made.weights.float()
        made.sinks = None if made.sinks is None else made.sinks.float()
    return made


def compare(found: Scene, tolerance: float) -> None:
    """Check the output of a scene over its caches, over the dequantized caches, and in float64."""
    made = found.run()
    assert torch.isfinite(made).all()
    assert (made.double() - found.expected()).abs().max() < tolerance
    found.caches = found.dequantized()
    assert torch.equal(made, found.run())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_torch(dtype: torch.dtype, name: str) -> None:
    compare(scene(FORMS[name], dtype, TorchSparse()), TOLERANCE[dtype])


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("extension")
def test_cpu(dtype: torch.dtype, name: str) -> None:
    compare(scene(FORMS[name], dtype, CpuSparse()), TOLERANCE[dtype])


@pytest.mark.skipif(not READY, reason="needs Triton and TRITON_INTERPRET=1")
@mostly_slow("name", FORMS, ["latents", "chosen groups"])
@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16], ids=str)
@mostly_slow("backend", [TritonSparse, TritonInvariantSparse], 1)
def test_triton(
    backend: type[TritonSparse], dtype: torch.dtype, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists in splits of a few steps. Tiles of both caches have one size, so that sums have one order."""
    form = forms.sparse(SIZES.heads, dtype, fp8=True)
    monkeypatch.setattr(forms, "sparse", lambda *_: form)
    monkeypatch.setattr(sparse_triton, "SHORT_SPLIT", 32)
    rows = [(5, 3), (141, 1)]
    # The interpreter rounds bfloat16 towards zero.
    compare(scene(FORMS[name], dtype, backend(), rows), 0.1 if dtype == torch.bfloat16 else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_lines_are_read_as_written(dtype: torch.dtype) -> None:
    """Other lines stay. The codes are those of the line in the dtype of the cache."""
    torch.manual_seed(0)
    caches = (torch.zeros(3, 4, 16).to(kv_fp8.VALUES), torch.zeros(3, 4), torch.zeros(3, 4, 9, dtype=dtype))
    rows, lines = torch.tensor([5, 11, 2]), torch.randn(3, 25, dtype=torch.float64) * 100
    kv_fp8.write_lines(caches, rows, lines)
    narrow = lines.to(dtype)
    front = kv_fp8.dequantize(*kv_fp8.quantize(narrow[:, :16]), dtype)
    for dim in (16, 20, 25):
        assert torch.equal(kv_fp8.take_lines(caches, rows, dim), torch.cat((front, narrow[:, 16:dim]), dim=1))
    others = torch.tensor([i for i in range(12) if i not in rows.tolist()])
    assert not kv_fp8.take_lines(caches, others, 25).any()
    plain = (torch.zeros(3, 4, 25, dtype=dtype),)
    kv_fp8.write_lines(plain, rows, lines)
    assert torch.equal(kv_fp8.take_lines(plain, rows, 20), narrow[:, :20])


def test_codes_that_cpus_cannot_read_are_named() -> None:
    cache = CacheSpec(kind="latent", layers=(0,), window=9, width=48, form="sparse", fp8=True, exact=8)
    spec = model_spec(4, cache, kv_heads=1, head_dim=48)
    with pytest.raises(ConfigError, match="codes of an entry in 8 bits of 40"):
        CpuSparse().check(cache, spec, 16, torch.bfloat16, torch.device("cpu"))


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("behind", [0, 12])
def test_the_cpu_writes_latents_before_other_elements(dtype: torch.dtype, behind: int) -> None:
    """A line of exact elements may be longer than a rotated key; the elements behind the key stay."""
    torch.manual_seed(0)
    first, lora, rope = 20, 32, 8
    joined, turned = torch.randn(4, first + lora + rope).to(dtype), torch.randn(4, rope // 2)
    norms = (torch.randn(first).to(dtype), torch.randn(lora).to(dtype), 1e-6)
    given = (*norms, turned.cos(), turned.sin(), True)
    writes, found = torch.tensor([2, 11, 5, 7]), []
    for op in (latent_ops, cpu_latent):
        exact = torch.full((3, 4, rope + behind), 7.0, dtype=dtype)
        caches = torch.zeros(3, 4, lora).to(kv_fp8.VALUES), torch.zeros(3, 4), exact
        low = op.latent_rope_cache_fp8(joined, *given, *caches, writes)
        plain = torch.full((3, 4, lora + rope + behind), 7.0, dtype=dtype)
        assert torch.equal(op.latent_rope_cache(joined, *given, plain, writes), low)
        assert (exact[..., rope:] == 7).all()
        assert (plain[..., lora + rope :] == 7).all()
        assert torch.equal(exact, torch.where(caches[1].unsqueeze(2) > 0, plain[..., lora:], exact))
        found.append(kv_fp8.take_lines(caches, writes, lora + rope).double())
    # Codes differ by at most one step, where another order of sums moves a value over a tie.
    assert (found[0] - found[1]).abs().max() <= 0.0725 * found[0].abs().max()
    assert (found[0] - found[1]).abs().mean() < 1e-3
