"""Attention sinks in every backend, against a plain reference for one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.attention.test_torch_backend import Scene
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.base import AttentionBackend
from weft.attention.gqa.cpu_backend import CpuAttention
from weft.attention.gqa.flashinfer_backend import FlashInferAttention
from weft.attention.gqa.invariant_backend import InvariantAttention
from weft.attention.gqa.torch_backend import TorchAttention
from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
from weft.common.errors import ConfigError

Tensor = torch.Tensor
SCALE = 0.3
ROWS = [[(0, 1)], [(7, 1), (0, 1), (29, 1), (3, 1)], [(5, 9), (0, 4), (17, 1), (8, 4)], [(90, 70), (0, 33)]]
#: Backend, dtype, error allowed.
FORMS: list[tuple[type[AttentionBackend], torch.dtype, float]] = [
    (TorchAttention, torch.float64, 1e-12),
    (TorchAttention, torch.bfloat16, 2e-2),
    (InvariantAttention, torch.float64, 1e-12),
    (InvariantAttention, torch.float32, 1e-5),
    (CpuAttention, torch.float32, 1e-5),
    (CpuAttention, torch.bfloat16, 2e-2),
    (TritonAttention, torch.float32, 1e-5),
    (TritonInvariant, torch.float32, 1e-5),
]


def sinks_for(scene: Scene, values: list[float]) -> Tensor:
    return torch.tensor(values).repeat(scene.heads)[: scene.heads].to(scene.q.dtype)


def expected(scene: Scene, sinks: Tensor) -> Tensor:
    out, token = torch.empty(scene.q.shape, dtype=torch.float64), 0
    shared = scene.heads // scene.spec.kv_heads
    for (start, count), keys, values in zip(scene.rows, scene.keys, scene.values, strict=True):
        for p in range(start, start + count):
            low = max(0, p - scene.window + 1) if scene.window else 0
            for head in range(scene.heads):
                k = keys[low : p + 1, head // shared].double()
                scores = k @ scene.q[token, head].double() * SCALE
                weights = torch.softmax(torch.cat((scores, sinks[head].double().view(1))), 0)[:-1]
                out[token, head] = weights @ values[low : p + 1, head // shared].double()
            token += 1
    return out


def attend(backend: AttentionBackend, scene: Scene, sinks: Tensor | None) -> Tensor:
    out = torch.full_like(scene.q, float("nan"))
    backend.attend(scene.q, out, scene.core(SCALE, sinks=sinks), 0, scene.spec)
    return out


@pytest.fixture(autouse=True)
def _runs(request: pytest.FixtureRequest) -> None:
    form = request.node.callspec.params.get("form") if hasattr(request.node, "callspec") else None
    if form is not None and form[0] is CpuAttention:
        request.getfixturevalue("extension")
    if form is not None and issubclass(form[0], TritonAttention):
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("kernels are compiled, not interpreted: tests/models/test_gpu.py")


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0].__name__}-{f[1]}")
@mostly_slow("window", [0, 6], [6])
@pytest.mark.parametrize("rows", ROWS[:3])
def test_equals_attention_written_out(rows: Any, window: int, form: Any) -> None:
    backend, dtype, tolerance = form
    scene = Scene(rows, window=window, dim=16, heads=6, kv_heads=2, dtype=dtype)
    sinks = sinks_for(scene, [0.5, -1.5, 3.0, 0.0, 40.0, -40.0])
    made, wanted = attend(backend(), scene, sinks), expected(scene, sinks)
    assert (made.double() - wanted).abs().max() <= tolerance * max(1, wanted.abs().max().item())


@pytest.mark.parametrize("form", FORMS[:6], ids=lambda f: f"{f[0].__name__}-{f[1]}")
def test_long_rows(form: Any) -> None:
    backend, dtype, tolerance = form
    scene = Scene(ROWS[3], window=40, dim=16, heads=4, kv_heads=4, block=16, dtype=dtype)
    sinks = sinks_for(scene, [0.5, -1.5, 3.0])
    assert (attend(backend(), scene, sinks).double() - expected(scene, sinks)).abs().max() <= tolerance * 3


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f[0].__name__}-{f[1]}")
def test_a_sink_far_below_changes_nothing_and_one_far_above_takes_all(form: Any) -> None:
    backend, dtype, tolerance = form
    scene = Scene([(5, 3), (0, 2)], dim=16, dtype=dtype)
    plain = attend(backend(), scene, None).double()
    below = attend(backend(), scene, sinks_for(scene, [-1e4])).double()
    assert (below - plain).abs().max() <= tolerance
    above = attend(backend(), scene, sinks_for(scene, [1e4]))
    assert torch.isfinite(above).all()
    assert above.abs().max() <= 1e-20


def test_splits_are_merged_before_the_sink_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs without a GPU")
    from weft.attention.gqa import triton_backend

    monkeypatch.setattr(triton_backend, "SHORT_SPLIT", 32)
    scene = Scene([(120, 1), (3, 1), (64, 1)], dim=16, dtype=torch.float32)
    sinks = sinks_for(scene, [0.5, 2.0])
    made = attend(TritonAttention(), scene, sinks)
    assert (made.double() - expected(scene, sinks)).abs().max() <= 1e-5


@pytest.mark.parametrize("form", FORMS[2:6], ids=lambda f: f"{f[0].__name__}-{f[1]}")
def test_bits_of_a_row_are_its_own(form: Any) -> None:
    backend, dtype, _ = form
    rows = [(90, 70), (0, 33), (700, 1), (5, 1)]
    scene = Scene(rows, dim=16, block=16, dtype=dtype)
    sinks = sinks_for(scene, [0.5, -1.5])
    whole = attend(backend(), scene, sinks)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(attend(backend(), scene, sinks), whole)
    torch.set_num_threads(1)
    alone = Scene([rows[0]], dim=16, block=16, dtype=dtype)
    # The scene's random numbers begin alike: the first row has the same keys, and gets the same queries.
    alone.q = scene.q[:70].clone()
    assert torch.equal(attend(backend(), alone, sinks), whole[:70])


@pytest.mark.requirement("B19")
def test_flashinfer_refuses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    spec = model_spec(heads=8, sinks=True)
    with pytest.raises(ConfigError, match="flashinfer' has no attention sinks"):
        FlashInferAttention().check(spec.caches[0], spec, 16, torch.bfloat16, torch.device("cuda"))
