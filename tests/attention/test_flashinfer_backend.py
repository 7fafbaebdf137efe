"""The FlashInfer backend: refusals and page tables. Its kernels need a GPU and the library."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.attention.test_torch_backend import Scene
from tests.attention.test_triton_backend import moved
from tests.support.specs import model_spec
from weft.attention.gqa import flashinfer_backend
from weft.attention.gqa.flashinfer_backend import FlashInferAttention, pages_of
from weft.attention.registry import BACKENDS
from weft.common.errors import ConfigError
from weft.config.spec import CacheSpec

INSTALLED = importlib.util.find_spec("flashinfer") is not None
CACHE = CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=64)


def test_it_is_known_by_name() -> None:
    assert BACKENDS.get("flashinfer") is FlashInferAttention


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(flashinfer_backend.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="pip install flashinfer-python"):
        FlashInferAttention().check(CACHE, model_spec(), 64, torch.bfloat16, torch.device("cuda"))


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "device", "what"),
    [
        (4, 64, torch.bfloat16, "cpu", "does not run on cpu"),
        (4, 64, torch.float32, "cuda", "float32"),
        (3, 64, torch.bfloat16, "cuda", "cannot share"),
        (4, 96, torch.bfloat16, "cuda", "not of 96"),
    ],
)
def test_what_it_lacks(
    heads: int, dim: int, dtype: torch.dtype, device: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_backend.importlib, "import_module", lambda name: None)
    cache = CacheSpec(kind="full", layers=(0,), kv_heads=2, head_dim=dim)
    with pytest.raises(ConfigError, match=what):
        FlashInferAttention().check(cache, model_spec(heads), 64, dtype, torch.device(device))


@pytest.mark.parametrize("window", [0, 5, 9])
def test_pages_hold_what_a_row_sees_and_nothing_else(window: int) -> None:
    rows = [(5, 3), (0, 4), (17, 1), (8, 4)]
    scene = Scene(rows, window=window, block=4)
    table = scene.segment.tables[0]
    pages = pages_of(scene.segment, table, window, 4)
    assert pages.queries.tolist() == [0, 3, 7, 8, 12]
    for row, (start, count) in enumerate(rows):
        low = max(0, start - window + 1) // 4 if window else 0
        high = (start + count - 1) // 4 + 1
        begin, end = int(pages.entries[row]), int(pages.entries[row + 1])
        assert pages.indices[begin:end].tolist() == table[row, low:high].tolist()
        # The queries are the last of the listed positions.
        assert (end - begin - 1) * 4 + int(pages.last[row]) == start + count - low * 4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.skipif(not INSTALLED, reason="needs flashinfer-python")
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("rows", [[(70, 1), (0, 1), (300, 1)], [(5, 90), (0, 4), (170, 1), (80, 300)]])
def test_equals_attention_written_out(rows: list[tuple[int, int]], window: int) -> None:
    """The cache has NaN in all other entries."""
    scene = moved(Scene(rows, window=window, block=16, dim=64, dtype=torch.bfloat16), "cuda")
    out = torch.full_like(scene.q, float("nan"))
    FlashInferAttention().attend(scene.q, out, scene.core(), 0, scene.spec)
    assert (out.cpu().double() - scene.expected()).abs().max() < 3e-2
