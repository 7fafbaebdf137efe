"""The Triton backends against a plain reference, in the interpreter on the CPU or on a GPU.

The interpreter rounds bfloat16 towards zero, so the tolerance is wider.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.attention.test_torch_backend import Scene
from tests.support.slow import mostly_slow
from tests.support.specs import model_spec
from weft.attention.gqa import triton_backend
from weft.attention.gqa.torch_backend import TorchAttention
from weft.attention.gqa.triton_backend import TritonAttention, TritonInvariant
from weft.attention.registry import choose
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec
from weft.ops import triton as kernels

Tensor = torch.Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READY = importlib.util.find_spec("triton") is not None and (DEVICE == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
BOTH = [TritonAttention, TritonInvariant]
#: Decodes, chunks, both. The interpreter takes some 10 ms for a program, so rows are as short as possible.
ROWS = [
    [(0, 1)],
    [(70, 1), (0, 1), (290, 1), (3, 1)],
    [(5, 9), (0, 4), (64, 30)],
    [(130, 20), (0, 3)],
]


def moved(scene: Scene, device: str) -> Scene:
    """Return the scene with its tensors on ``device``. The expected output stays on its device."""
    segment = scene.segment
    scene.q, scene.cache = scene.q.to(device), scene.cache.to(device)
    scene.segment = replace(
        segment,
        q_offsets=segment.q_offsets.to(device),
        starts=segment.starts.to(device),
        tables=tuple(table.to(device) for table in segment.tables),
    )
    return scene


def attend(backend: TritonAttention, scene: Scene, prepared: object = None) -> Tensor:
    moved(scene, DEVICE)
    out = torch.full_like(scene.q, float("nan"))
    backend.attend(scene.q, out, scene.core(prepared=prepared), 0, scene.spec)
    return out.cpu()


def expected(scene: Scene) -> Tensor:
    scene.q = scene.q.cpu()
    return scene.expected()


def check(backend: TritonAttention, scene: Scene, tolerance: float) -> None:
    made = attend(backend, scene)
    assert (made.double() - expected(scene)).abs().max() < tolerance


@runs
@pytest.mark.parametrize("backend", BOTH)
@mostly_slow("window", [0, 7, 100, -40], [0, -40])
@mostly_slow("block", [4, 64], [4])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_attention_written_out(rows: Any, block: int, window: int, backend: Any) -> None:
    """The cache has NaN outside the positions of the row. No NaN may reach an output."""
    scene = Scene(rows, window=window, block=block, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    check(backend(), scene, 1e-5)


@runs
@pytest.mark.parametrize("backend", BOTH)
def test_capped_scores(backend: Any) -> None:
    rows = [(5, 9), (70, 1)]
    scene = Scene(rows, window=-30, heads=2, kv_heads=1, dim=16, dtype=torch.float32, softcap=0.5)
    check(backend(), scene, 1e-5)


@runs
@pytest.mark.parametrize("backend", BOTH)
@mostly_slow(("heads", "kv_heads", "dim"), [(6, 1, 20), (1, 1, 16), (6, 2, 48), (3, 3, 32)], 1)
def test_head_groups_and_sizes(heads: int, kv_heads: int, dim: int, backend: Any) -> None:
    rows = [(5, 3), (0, 9), (71, 1)]
    check(
        backend(), Scene(rows, block=16, heads=heads, kv_heads=kv_heads, dim=dim, dtype=torch.float32), 1e-5
    )


@runs
@pytest.mark.parametrize("backend", BOTH)
@mostly_slow(("dtype", "tolerance"), [(torch.bfloat16, 4e-2), (torch.float16, 4e-3)], 1)
def test_narrow_types(dtype: torch.dtype, tolerance: float, backend: Any) -> None:
    for rows in ([(70, 1), (110, 1)], [(5, 9), (84, 12)]):
        scene = Scene(rows, window=90, block=16, heads=2, kv_heads=1, dim=32, dtype=dtype)
        check(backend(), scene, tolerance)


@pytest.mark.slow
@runs
@pytest.mark.parametrize("rows", [[(300, 1), (2, 1)], [(100, 17), (0, 5), (40, 3)]])
@pytest.mark.parametrize("window", [0, 80, -80])
def test_splits_of_every_kind_give_the_same(rows: Any, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short splits, many groups of splits in the merge, and launches in parts."""
    for name in ("SHORT_SPLIT", "LONG_SPLIT"):
        monkeypatch.setattr(triton_backend, name, 32)  # a step of float32
    monkeypatch.setattr(triton_backend, "MOST_SPLITS", 1000)
    monkeypatch.setattr(triton_backend, "FEW_TILES", 1000)
    monkeypatch.setattr(triton_backend, "NARROW", 8)
    scene = Scene(rows, window=window, block=16, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
    check(TritonAttention(), scene, 1e-5)
    monkeypatch.setattr(triton_backend, "STATES", 1500)
    for backend in BOTH:
        check(backend(), scene, 1e-5)


@runs
@pytest.mark.parametrize("backend", BOTH)
def test_upper_bounds_of_the_context_do_not_show(backend: Any) -> None:
    scene = Scene([(6, 1), (9, 1), (3, 1)], window=5, bound=77, dim=16, dtype=torch.float32)
    check(backend(), scene, 1e-5)


@pytest.mark.slow
@runs
@pytest.mark.usefixtures("ordered_products")
def test_a_querys_bits_depend_on_its_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant form: a prompt whole, in chunks, token by token, beside others; splits and windows."""
    monkeypatch.setattr(triton_backend, "LONG_SPLIT", 32)
    for window in (0, 50):
        whole, part = (
            Scene([(0, 90)], window=window, block=16, heads=2, kv_heads=1, dim=16, dtype=torch.float32)
            for _ in range(2)
        )
        made = attend(TritonInvariant(), whole)
        segment, table, q = moved(part, DEVICE).segment, part.segment.tables[0], part.q
        for begin, count in ((0, 1), (31, 2), (64, 20), (89, 1)):
            other = 40  # a shorter row beside it, over the same blocks
            columns: dict[str, Any] = {
                "rows": 2,
                "tokens": 1 + count,
                "host_counts": np.array([1, count], np.int32),
                "host_starts": np.array([other, begin], np.int32),
                "q_offsets": torch.tensor([0, 1, 1 + count], dtype=torch.int32, device=DEVICE),
                "starts": torch.tensor([other, begin], device=DEVICE),
                "tables": (table.expand(2, -1),),
            }
            part.q = torch.cat([q[other : other + 1], q[begin : begin + count]])
            part.segment = replace(segment, **columns)
            chunk = attend(TritonInvariant(), part)
            assert torch.equal(chunk[1:], made[begin : begin + count])
            assert torch.equal(chunk[0], made[other])


@pytest.mark.requirement("B13")
@runs
def test_merging_empty_states_gives_zero_and_minus_infinity() -> None:
    """The merge has the guard; an empty state may hold anything."""
    from weft.ops.triton.attention import merge

    inf = float("inf")
    part = torch.full((2, 3, 9, 16), float("nan"), device=DEVICE)
    lse = torch.full((2, 3, 9), -inf, device=DEVICE)
    part[1, 2, 4], lse[1, 2, 4] = 2.5, -900.0
    part[1, 0, 8], lse[1, 0, 8] = 1.0, 3.0
    part[1, 0, 2], lse[1, 0, 2] = 4.0, 4.0
    out = torch.full((2, 3, 16), float("nan"), device=DEVICE)
    out_lse = torch.full((2, 3), float("nan"), device=DEVICE)
    merge(part, lse, out, out_lse)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert out_lse[0].tolist() == [-inf] * 3
    assert (out[1, 1].tolist(), out_lse[1, 1].item()) == ([0.0] * 16, -inf)
    assert (out[1, 2].tolist(), out_lse[1, 2].item()) == ([2.5] * 16, -900.0)
    assert torch.allclose(out[1, 0], torch.full_like(out[1, 0], 3.0))  # (8 * 1 + 16 * 4) / 24
    assert out_lse[1, 0].item() == pytest.approx(np.log2(24))


@runs
@mostly_slow("sinks", [False, True], [True])
def test_the_last_program_of_a_row_merges_with_the_same_bits(
    sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel per layer in place of two; the next layer finds the counters at zero."""
    from weft.ops.triton import attention

    monkeypatch.setattr(triton_backend, "SHORT_SPLIT", 32)
    rows = [(70, 1), (3, 1)]
    scene = moved(Scene(rows, block=16, heads=6, kv_heads=2, dim=20, dtype=torch.float32), DEVICE)
    more = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0, -2.0], device=DEVICE) if sinks else None
    made = []
    for most in (0, 8):
        monkeypatch.setattr(attention, "MOST_MERGED_HEADS", most)
        merge = mock.Mock(wraps=attention.merge)
        with monkeypatch.context() as patch:
            patch.setattr(attention, "merge", merge)
            prepared = TritonAttention().prepare(scene.segment, 0, scene.spec, 16, torch.float32)
            for _ in range(2):  # layers
                out = torch.full_like(scene.q, float("nan"))
                core = scene.core(prepared=prepared)._replace(sinks=more)
                TritonAttention().attend(scene.q, out, core, 0, scene.spec)
                made.append(out)
        assert merge.call_count == (0 if most else 2)
        counters = prepared.cut.counters
        assert counters is None if not most else not counters.any()
    assert all(torch.equal(made[0], one) for one in made)


@runs
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "merges"),
    [
        ([(99_999, 1), (0, 1)], 16, 2, True),
        ([(99_999, 1)], 18, 2, False),  # 9 heads per KV head
        ([(131_072, 1)], 16, 2, False),  # 129 splits of 8 heads
        ([(131_072, 1)], 8, 2, True),
        ([(99_999, 2), (0, 1)], 16, 2, False),
    ],
)
def test_who_merges(rows: Any, heads: int, kv_heads: int, merges: bool) -> None:
    """The last program merges few states of rows of one query."""
    scene = Scene([(0, count) for _, count in rows], heads=heads, kv_heads=kv_heads, dtype=torch.float32)
    starts = np.array([start for start, _ in rows], np.int32)
    segment = replace(scene.segment, host_starts=starts)
    cut = TritonInvariant()._cut(segment, heads, scene.spec, torch.float32)
    counters = triton_backend._counters(segment, cut, heads, scene.spec)
    assert (counters is not None) == merges
    assert counters is None or (counters.shape == (len(rows), kv_heads) and not counters.any())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
def test_states_are_merged_once_all_are_there_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many launches over the same counters, with programs of many rows and splits in any order."""
    from weft.ops.triton import attention

    scene = _large([1] * 64, [900 + 97 * i for i in range(64)], 0)
    monkeypatch.setattr(attention, "MOST_MERGED_HEADS", 0)
    expected = torch.empty_like(scene.q)
    TritonAttention().attend(scene.q, expected, scene.core(0.1), 0, scene.spec)
    monkeypatch.undo()
    prepared = TritonAttention().prepare(scene.segment, 0, scene.spec, 64, torch.bfloat16)
    for _ in range(200):
        out = torch.full_like(scene.q, float("nan"))
        TritonAttention().attend(scene.q, out, scene.core(0.1, prepared=prepared), 0, scene.spec)
        assert torch.equal(out, expected)


@runs
@pytest.mark.parametrize("backend", BOTH)
def test_no_rows_and_prepared_once(backend: Any) -> None:
    assert attend(backend(), Scene([], dim=16, dtype=torch.float32)).shape == (0, 4, 16)
    scene = moved(Scene([(5, 3), (2, 1)], dim=16, dtype=torch.float32), DEVICE)
    prepared = backend().prepare(scene.segment, 0, scene.spec, 4, torch.float32)
    assert torch.equal(attend(backend(), scene, prepared), attend(backend(), scene, prepared))
    assert torch.equal(attend(backend(), scene, prepared), attend(backend(), scene))


@runs
def test_an_output_that_is_not_contiguous_is_written() -> None:
    scene = moved(Scene([(5, 3), (2, 1)], dim=16, dtype=torch.float32), DEVICE)
    out = torch.full((4, 16, 4), float("nan"), device=DEVICE).transpose(1, 2)
    TritonAttention().attend(scene.q, out, scene.core(), 0, scene.spec)
    assert torch.equal(out.cpu(), attend(TritonAttention(), scene))


def _large(counts: list[int], starts: list[int], window: int) -> Scene:
    """Return a bfloat16 scene in real sizes on the GPU. ``_reference`` computes the expected output."""
    rows = list(zip(starts, counts, strict=True))
    scene = Scene(rows, window=window, block=64, heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16)
    return moved(scene, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", BOTH)
@pytest.mark.parametrize("window", [0, 1000])
@pytest.mark.parametrize(
    ("counts", "starts"), [([1] * 5, [3000, 0, 63, 64, 9000]), ([700, 3, 129], [1500, 0, 64]), ([9], [5000])]
)
def test_real_sizes_on_a_gpu(counts: list[int], starts: list[int], window: int, backend: Any) -> None:
    """The reference is torch's backend in float32, with the same rounded values."""
    scene = _large(counts, starts, window)
    exact = torch.empty(scene.q.shape, device="cuda")
    core = scene.core(128**-0.5)
    plain = core._replace(caches={0: (scene.cache.float(),)})
    TorchAttention().attend(scene.q.float(), exact, plain, 0, scene.spec)
    out = torch.full_like(scene.q, float("nan"))
    backend().attend(scene.q, out, core, 0, scene.spec)
    assert (out.float() - exact).abs().max() < 2e-2


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA GPU")
@pytest.mark.parametrize("window", [0, 1000])
def test_bits_of_real_sizes_on_a_gpu(window: int) -> None:
    """The invariant form over 2,500 positions: chunks of every size have the bits of the whole."""
    scene = _large([2500], [0], window)
    whole = torch.empty_like(scene.q)
    backend = TritonInvariant()
    backend.attend(scene.q, whole, scene.core(0.1), 0, scene.spec)
    for begin, count in ((0, 1), (1023, 1), (1024, 1), (2499, 1), (500, 17), (1000, 64), (100, 1500)):
        q = scene.q[begin : begin + count].contiguous()
        chunk = torch.empty_like(q)
        segment = replace(
            scene.segment,
            tokens=count,
            host_counts=np.array([count], np.int32),
            host_starts=np.array([begin], np.int32),
            q_offsets=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            starts=torch.tensor([begin], device="cuda"),
        )
        backend.attend(q, chunk, scene.core(0.1)._replace(segment=segment), 0, scene.spec)
        assert torch.equal(chunk, whole[begin : begin + count])


def _cache(**more: Any) -> CacheSpec:
    return CacheSpec(**{"kind": "full", "layers": (0,), "kv_heads": 2, "head_dim": 64, **more})


@pytest.mark.parametrize("backend", BOTH)
def test_what_it_lacks(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "interpreting", lambda: False)
    monkeypatch.setattr(kernels, "available", lambda: True)
    cuda = torch.device("cuda")
    backend().check(_cache(), model_spec(8), 64, torch.bfloat16, cuda)
    for cache, heads, dtype, device, what in (
        (_cache(), 8, torch.bfloat16, torch.device("cpu"), "does not run on cpu"),
        (_cache(), 8, torch.float64, cuda, "float64"),
        (_cache(), 3, torch.bfloat16, cuda, "cannot share"),
        (_cache(head_dim=512), 8, torch.bfloat16, cuda, "256"),
    ):
        with pytest.raises(ConfigError, match=what):
            backend().check(cache, model_spec(heads), 64, dtype, device)
    monkeypatch.setattr(kernels, "available", lambda: False)
    with pytest.raises(ConfigError, match=r"weft\[cuda\]"):
        backend().check(_cache(), model_spec(8), 64, torch.bfloat16, cuda)


def test_it_is_preferred_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The invariant form is chosen on request, torch where Triton is not supported."""
    cuda = torch.device("cuda")
    monkeypatch.setattr(kernels, "available", lambda: True)
    assert type(choose("auto", model_spec(), torch.bfloat16, cuda, 64)["gqa"]) is TritonAttention
    assert (
        type(choose("auto", model_spec(), torch.bfloat16, cuda, 64, invariant=True)["gqa"]) is TritonInvariant
    )
    assert "torch" in type(choose("auto", model_spec(), torch.float64, cuda, 64)["gqa"]).__module__
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert "torch" in type(choose("auto", model_spec(), torch.bfloat16, cuda, 64)["gqa"]).__module__
