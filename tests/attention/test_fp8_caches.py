"""Attention over an 8-bit cache equals attention over the dequantized cache, bit for bit."""

from __future__ import annotations

import importlib.util
import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from tests.support import latent
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.base import AttentionBackend, CoreInput, SegmentInput
from weft.attention.gqa import triton_backend
from weft.attention.gqa.cpu_backend import CpuAttention
from weft.attention.gqa.invariant_backend import InvariantAttention
from weft.attention.gqa.torch_backend import TorchAttention
from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
from weft.attention.mla import latent_triton
from weft.attention.mla.latent import Form, LatentBackend, LatentInput
from weft.attention.mla.latent_cpu import CpuLatent
from weft.attention.mla.latent_invariant import InvariantLatent
from weft.attention.mla.latent_torch import TorchLatent
from weft.attention.mla.latent_triton import TritonLatent
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec
from weft.ops import kv_fp8
from weft.ops import triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READY = importlib.util.find_spec("triton") is not None and (DEVICE == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
CPU = torch.device("cpu")
ROWS = [(0, 1), (0, 37), (70, 3), (5, 20), (63, 1), (64, 64), (129, 1), (140, 2)]
BACKENDS: dict[str, type[AttentionBackend]] = {"torch": TorchAttention, "invariant": InvariantAttention}


class Scene:
    """A cache of random entries in shuffled blocks, NaN in all other entries, and queries."""

    def __init__(
        self,
        dtype: torch.dtype,
        block: int,
        window: int,
        dim: int = 32,
        rows: list[tuple[int, int]] = ROWS,
        device: str = "cpu",
    ) -> None:
        rng, kv_heads, heads = random.Random(0), 2, 6
        torch.manual_seed(0)
        widths = [-(-(start + count) // block) for start, count in rows]
        ids = rng.sample(range(1, sum(widths) + 1), sum(widths))
        plain = torch.full((sum(widths) + 1, 2, kv_heads, block, dim), math.nan, dtype=dtype)
        table = torch.zeros(len(rows), max(widths), dtype=torch.int64)
        for row, (start, count) in enumerate(rows):
            table[row, : widths[row]] = torch.tensor([ids.pop() for _ in range(widths[row])])
            low = max(0, start - window + 1) if window else 0
            for p in range(low, start + count):
                entries = torch.randn(2, kv_heads, dim, dtype=torch.float64) * 10.0 ** rng.uniform(-1, 1)
                plain[table[row, p // block], :, :, p % block] = entries.to(dtype)
        self.values, self.scales = kv_fp8.quantize(plain)
        self.plain = kv_fp8.dequantize(self.values, self.scales, dtype)
        unwritten = plain.isnan().any(-1)
        assert self.scales[unwritten].isnan().all()
        self.values.view(torch.uint8)[unwritten] = 0x7F  # NaN
        counts = np.array([count for _, count in rows], np.int32)
        starts = np.array([start for start, _ in rows], np.int32)
        self.q = torch.randn(int(counts.sum()), heads, dim, dtype=torch.float64).to(dtype)
        self.values, self.scales, self.plain, self.q = (
            one.to(device) for one in (self.values, self.scales, self.plain, self.q)
        )
        self.segment = SegmentInput(
            begin=0,
            rows=len(rows),
            tokens=int(counts.sum()),
            host_counts=counts,
            host_starts=starts,
            q_offsets=torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32, device=device),
            starts=torch.tensor(starts.tolist(), dtype=torch.int64, device=device),
            slots=torch.arange(len(rows), device=device),
            live=torch.zeros(len(rows), dtype=torch.int64, device=device),
            tables=(table.to(device),),
        )
        self.block = block
        self._facts: dict[str, Any] = {
            "kind": "window" if window else "full",
            "layers": (0,),
            "window": window,
            "kv_heads": kv_heads,
            "head_dim": dim,
        }

    def spec(self, fp8: bool) -> CacheSpec:
        return CacheSpec(fp8=fp8, **self._facts)

    def run(self, backend: AttentionBackend, fp8: bool) -> torch.Tensor:
        """Run with and without the shared preparation of layers. Return the output."""
        outs = []
        spec = self.spec(fp8)
        backend.check(spec, model_spec(6, spec), self.block, self.q.dtype, self.q.device)
        for prepared in (backend.prepare(self.segment, 0, spec, self.block, self.q.dtype), None):
            out = torch.full_like(self.q, math.nan)
            cache = (self.values, self.scales) if fp8 else (self.plain,)
            backend.attend(self.q, out, CoreInput(self.segment, {0: cache}, 0.2, prepared), 0, spec)
            outs.append(out)
        assert torch.equal(outs[0], outs[1])
        return outs[0]


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("block", [1, 16, 48])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", list(BACKENDS))
def test_torch(name: str, dtype: torch.dtype, block: int, window: int) -> None:
    scene, backend = Scene(dtype, block, window), BACKENDS[name]()
    made = scene.run(backend, fp8=True)
    assert torch.isfinite(made).all()
    assert torch.equal(made, scene.run(backend, fp8=False))


#: Decodes in one piece and in splits, a chunk, and rows of several queries in narrow tiles
TRITON_ROWS = [
    [(70, 1), (3, 1)],
    [(70, 1), (3, 1), (300, 1)],
    [(5, 20), (70, 3)],
    [(61, 3), (0, 2)],
]


@runs
@mostly_slow("rows", TRITON_ROWS, [TRITON_ROWS[0]])
@mostly_slow("window", [0, 50], [0])
@mostly_slow(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16, torch.float16], ids=str
)
@mostly_slow("backend", [TritonAttention, TritonInvariant], 1)
def test_triton(
    backend: type[TritonAttention], dtype: torch.dtype, window: int, rows: Any, monkeypatch: Any
) -> None:
    """Bit for bit as over the dequantized cache, and as near to the torch reference as over a plain cache."""
    for name in ("SHORT_SPLIT", "LONG_SPLIT"):
        monkeypatch.setattr(triton_backend, name, 64)
    scene = Scene(dtype, 16, window, rows=rows, device=DEVICE)
    made = scene.run(backend(), fp8=True)
    assert torch.isfinite(made).all()
    assert torch.equal(made, scene.run(backend(), fp8=False))
    expected = scene.run(TorchAttention(), fp8=True)
    tolerance = {torch.float32: 1e-4, torch.float16: 3e-2}.get(dtype, 2e-1)
    assert (made.double() - expected.double()).abs().max() < tolerance


def test_who_cannot_read_them_says_so() -> None:
    shape = latent.Shape()
    scene = latent.Scene([(0, 1)], shape, 0, torch.float32)
    cache = msgspec.structs.replace(scene.spec, fp8=True, exact=shape.rope)
    with pytest.raises(ConfigError) as raised:
        InvariantLatent().check(cache, model_spec(4, cache, mla=scene.mla), 16, torch.float32, CPU)
    assert "'invariant'" in raised.value.message
    assert "--kv-cache-dtype" in raised.value.message
    assert "--attention-backend" in raised.value.message


def test_auto_takes_one_that_can() -> None:
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=64, fp8=True)
    for dtype in (torch.float64, torch.bfloat16):
        for invariant in (False, True):
            (chosen,) = choose("auto", model_spec(4, cache), dtype, CPU, 16, invariant=invariant)
            chosen.check(cache, model_spec(4, cache), 16, dtype, CPU)
            assert chosen.invariant or not invariant


@pytest.mark.parametrize("window", [0, 50, 600])
@pytest.mark.parametrize("block", [1, 16, 48])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("extension")
def test_cpu(dtype: torch.dtype, block: int, window: int) -> None:
    for dim in (32, 80, 128):
        scene = Scene(dtype, block, window, dim)
        made = scene.run(CpuAttention(), fp8=True)
        assert torch.isfinite(made).all()
        assert torch.equal(made, scene.run(CpuAttention(), fp8=False))


# --- latent ---

LATENT_ROWS = [(0, 1), (0, 37), (700, 3), (5, 20), (63, 1), (64, 64), (513, 2)]


def _run_latent(scene: latent.Scene, backend: LatentBackend, form: Form, fp8: bool) -> torch.Tensor:
    """Run over the scene's 8-bit cache, or over the dequantized cache."""
    segment, tokens = scene.segment()
    latents, keys = scene.cache.split((scene.shape.lora, scene.shape.rope), dim=-1)
    values, scales = kv_fp8.quantize(latents)
    cache: tuple[torch.Tensor, ...] = (values, scales, keys.contiguous())
    if fp8:
        values.view(torch.uint8)[scales.isnan()] = 0x7F
    else:
        cache = (torch.cat((kv_fp8.dequantize(values, scales, scene.dtype), keys), dim=-1),)
    spec = msgspec.structs.replace(scene.spec, fp8=fp8, exact=scene.shape.rope if fp8 else 0)
    backend.check(
        spec, model_spec(scene.shape.heads, spec, mla=scene.mla), scene.shape.block, scene.dtype, CPU
    )
    q, angles = scene.q[tokens], (scene.cos[tokens], scene.sin[tokens])
    out = q.new_full((len(q), scene.shape.heads, scene.shape.v), math.nan)
    core = CoreInput(segment, {0: cache}, scene.mla.scale)
    backend.attend(q, out, core, LatentInput(angles, 0, spec, scene.mla, scene.up, form))
    assert torch.isfinite(out).all()
    return out


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_latent_torch(form: Form, dtype: torch.dtype, window: int) -> None:
    scene, backend = latent.Scene(LATENT_ROWS, latent.Shape(), window, dtype), TorchLatent()
    assert torch.equal(_run_latent(scene, backend, form, True), _run_latent(scene, backend, form, False))


@runs
@pytest.mark.skipif(DEVICE == "cuda", reason="the scene is on the CPU")
@mostly_slow("window", [0, 50], [0])
@mostly_slow("dtype", [torch.float32, torch.bfloat16, torch.float16], [torch.bfloat16], ids=str)
def test_latent_triton(dtype: torch.dtype, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys in splits of a few steps. Bit for bit as over the dequantized cache, and near torch's result."""
    monkeypatch.setattr(latent_triton, "SHORT_SPLIT", 64)
    scene, backend = latent.Scene([(3, 1), (150, 2)], latent.Shape(), window, dtype), TritonLatent()
    made = _run_latent(scene, backend, "absorbed", True)
    assert torch.equal(made, _run_latent(scene, backend, "absorbed", False))
    wanted = _run_latent(scene, TorchLatent(), "absorbed", True)
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2}.get(dtype, 1e-1)
    assert (made.double() - wanted.double()).abs().max() < tolerance * wanted.abs().max()


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["expanded", "absorbed"])
@pytest.mark.usefixtures("extension")
def test_latent_cpu(form: Form, dtype: torch.dtype, window: int) -> None:
    for shape in (latent.SMALL, latent.WIDE):
        scene, backend = latent.Scene(LATENT_ROWS, shape, window, dtype), CpuLatent()
        assert torch.equal(_run_latent(scene, backend, form, True), _run_latent(scene, backend, form, False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("extension")
def test_cpu_reads_every_code_under_every_scale(dtype: torch.dtype) -> None:
    """A row with one key returns the value: all codes except NaN, in two entries of 128."""
    powers = [-126, -120, -111, -110, -30, 0, 9, 110, 111, 118]
    codes = torch.arange(256, dtype=torch.uint8)
    codes[[0x7F, 0xFF]] = 0  # NaN
    values = torch.zeros(2 * len(powers) + 2, 2, 1, 1, 128, dtype=torch.uint8)
    scales = torch.ones(values.shape[:-1])
    for i, power in enumerate(powers):
        for half in range(2):
            values[1 + 2 * i + half, 1, 0, 0] = codes[128 * half : 128 * half + 128]
            scales[1 + 2 * i + half, 1] = 2.0**power
    scales[-1, 1] = math.nan
    rows = len(values) - 1
    q, out = torch.zeros(rows, 1, 128, dtype=dtype), torch.empty(rows, 1, 128, dtype=dtype)
    offsets, starts = torch.arange(rows + 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    table, cache = torch.arange(1, rows + 1).view(rows, 1), values.view(kv_fp8.VALUES)
    torch.ops.weft_cpu.attend.default(q, out, cache, offsets, starts, table, 0, 1.0, 0, None, scales)
    made, exact = out[:-1, 0].double(), (cache.double() * scales.double()[..., None])[1:-1, 1, 0, 0]
    whole = exact.abs() >= 2.0**-126  # smaller numbers may become zero
    assert torch.equal(made[whole], exact[whole])
    assert ((made[~whole] == 0) | (made[~whole] == exact[~whole])).all()
    assert out[-1].isnan().all()


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("power", [-126, -111, -110, -3, 0, 60, 110, 111, 119])
def test_the_cpu_reads_every_code_exactly(power: int) -> None:
    """A query with one key returns the value of the key: here all codes of numbers, at one scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    cache = codes.view(torch.float8_e4m3fn).expand(1, 2, 1, 1, 256).contiguous()
    scales = torch.full((1, 2, 1, 1), 2.0**power)
    out = torch.empty(1, 1, 256, dtype=torch.bfloat16)
    q, table, starts = torch.zeros(1, 1, 256).bfloat16(), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    torch.ops.weft_cpu.attend.default(q, out, cache, offsets, starts.long(), table, 0, 1.0, 0, None, scales)
    expected = cache[0, 1, 0].float() * scales[0, 1, 0]
    expected[expected.abs() < 2.0**-126] = 0.0  # outputs have no smaller numbers
    assert torch.equal(out[0].float(), expected)
