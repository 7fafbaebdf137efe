"""The Triton kernel of latent attention against a plain reference, in the interpreter or on a GPU.

The interpreter rounds bfloat16 towards zero, so the tolerance is wider.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.latent import NAN, Scene, Shape, on_device
from tests.support.specs import model_spec
from weft.attention.base import CoreInput
from weft.attention.gqa import triton_backend
from weft.attention.mla import latent_triton
from weft.attention.mla.latent import LatentInput
from weft.attention.mla.latent_triton import TritonLatent
from weft.common.errors import ConfigError
from weft.config.spec import MLASpec
from weft.ops import triton as kernels

Tensor = torch.Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READY = importlib.util.find_spec("triton") is not None and (DEVICE == "cuda" or kernels.interpreting())
runs = pytest.mark.skipif(not READY, reason="needs Triton, and a CUDA GPU or TRITON_INTERPRET=1")
#: Decodes, and rows of few queries as with drafts.
ROWS = [[(0, 1)], [(70, 1), (0, 1), (290, 1)], [(64, 4), (3, 2), (0, 3)]]


def attend(scene: Scene) -> Tensor:
    segment = on_device(scene.segment()[0], DEVICE)
    q, up = scene.q.to(DEVICE), replace(scene.up, keys=scene.keys.to(DEVICE), values=scene.values.to(DEVICE))
    out = q.new_full((len(q), scene.shape.heads, scene.shape.v), NAN)
    angles = (scene.cos.to(DEVICE), scene.sin.to(DEVICE))
    core = CoreInput(segment, {0: (scene.cache.to(DEVICE),)}, scene.mla.scale)
    TritonLatent().attend(q, out, core, LatentInput(angles, 0, scene.spec, scene.mla, up, "absorbed"))
    return out.cpu()


@runs
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_attention_written_out(rows: Any, window: int) -> None:
    """The cache has NaN outside the positions of the row."""
    scene = Scene(rows, window=window, dtype=torch.float32)
    assert (attend(scene).double() - scene.expected()).abs().max() < 1e-5


@runs
@pytest.mark.parametrize("heads", [1, 20, 32])
def test_parts_of_the_heads(heads: int) -> None:
    scene = Scene([(5, 1), (20, 2)], Shape(heads=heads, block=16), dtype=torch.float32)
    assert (attend(scene).double() - scene.expected()).abs().max() < 1e-5


@runs
@pytest.mark.parametrize("window", [0, 100])
def test_splits_are_merged(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some splits contain nothing of a row; launches have few tokens each."""
    monkeypatch.setattr(latent_triton, "SHORT_SPLIT", 64)
    monkeypatch.setattr(triton_backend, "STATES", 1)
    scene = Scene([(250, 1), (3, 1), (130, 2)], Shape(block=16), window, torch.float32)
    assert (attend(scene).double() - scene.expected()).abs().max() < 1e-5


@runs
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.08), (torch.float16, 1e-2)])
def test_narrow_types(dtype: torch.dtype, tolerance: float) -> None:
    scene = Scene([(30, 1), (55, 2)], Shape(heads=4, nope=16, rope=16, v=16, lora=32, block=16), dtype=dtype)
    made = attend(scene)
    assert made.dtype == dtype
    assert (made.double() - scene.expected()).abs().max() < tolerance


@runs
def test_the_hosts_bound_does_not_show() -> None:
    scene = Scene([(6, 1), (9, 1)], dtype=torch.float32, bound=7)
    assert (attend(scene).double() - scene.expected()).abs().max() < 1e-5


@runs
@pytest.mark.parametrize(
    ("lora", "dtype", "lacking"), [(64, torch.float64, "float64"), (528, torch.float32, "528")]
)
def test_what_is_not_served_is_refused(lora: int, dtype: torch.dtype, lacking: str) -> None:
    scene = Scene([])
    mla = MLASpec(q_lora=None, kv_lora=lora, nope=16, rope=16, v=16, scale=1.0)
    with pytest.raises(ConfigError, match=lacking):
        TritonLatent().check(scene.spec, model_spec(3, scene.spec, mla=mla), 4, dtype, torch.device(DEVICE))
