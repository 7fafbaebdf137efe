"""Both forms of latent attention on torch, against a plain reference."""

from __future__ import annotations

import pytest
import torch

from tests.support.latent import Scene, Shape
from tests.support.specs import model_spec
from weft.attention.mla import latent_torch
from weft.attention.mla.latent import Form
from weft.attention.mla.latent_torch import TorchLatent
from weft.common.errors import ConfigError

FORMS: tuple[Form, Form] = ("expanded", "absorbed")
ROWS = [
    [(0, 1)],
    [(0, 13)],
    [(7, 1), (0, 1), (29, 1), (3, 1)],
    [(5, 9), (0, 4), (17, 1), (8, 4), (2, 2)],
]


@pytest.fixture(autouse=True, params=[1024, 8])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Process few positions at a time: some queries see nothing of a chunk, and merges are many."""
    monkeypatch.setattr(latent_torch, "CHUNK", request.param)
    return int(request.param)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("rows", ROWS)
def test_equals_attention_written_out(rows: list[tuple[int, int]], window: int, form: Form) -> None:
    scene = Scene(rows, window=window)
    assert torch.allclose(scene.run(TorchLatent(), form), scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.requirement("B12")
@pytest.mark.parametrize("block", [1, 3, 16])
@pytest.mark.parametrize("interleaved", [True, False])
def test_forms_are_one_function(interleaved: bool, block: int) -> None:
    scene = Scene(ROWS[3], Shape(block=block), interleaved=interleaved)
    expanded, absorbed = (scene.run(TorchLatent(), form) for form in FORMS)
    assert torch.allclose(expanded, absorbed, rtol=1e-12, atol=1e-12)
    assert torch.allclose(expanded, scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [0, 5])
def test_upper_bounds_of_the_context_do_not_show(window: int, form: Form) -> None:
    scene = Scene([(6, 1), (9, 1), (3, 5)], window=window, bound=7)
    assert torch.allclose(scene.run(TorchLatent(), form), scene.expected(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_long_rows_are_cut(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latent_torch, "SCORES", 50)
    scene = Scene([(150, 140), (0, 3)], Shape(heads=2, nope=4, rope=4, v=4, lora=8))
    assert torch.allclose(scene.run(TorchLatent(), form), scene.expected(), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2), (torch.float16, 8e-3)]
)
def test_narrow_types(dtype: torch.dtype, tolerance: float, form: Form) -> None:
    scene = Scene([(30, 5), (0, 12), (55, 1)], dtype=dtype)
    made = scene.run(TorchLatent(), form)
    assert made.dtype == dtype
    assert (made.double() - scene.expected()).abs().max() < tolerance


@pytest.mark.parametrize("form", FORMS)
def test_no_rows_and_a_cache_that_is_only_read(form: Form) -> None:
    assert Scene([]).run(TorchLatent(), form).shape == (0, 3, 10)
    scene = Scene([(5, 3), (2, 1)])
    before = scene.cache.clone()
    scene.run(TorchLatent(), form)
    assert torch.equal(scene.cache.view(torch.int64), before.view(torch.int64))


@pytest.mark.requirement("B19")
@pytest.mark.parametrize(
    ("dtype", "device", "lacking"), [(torch.int8, "cpu", "int8"), (torch.float32, "meta", "meta")]
)
def test_what_is_not_served_is_refused(dtype: torch.dtype, device: str, lacking: str) -> None:
    scene = Scene([])
    spec = model_spec(3, scene.spec, mla=scene.mla)
    with pytest.raises(ConfigError, match=lacking):
        TorchLatent().check(scene.spec, spec, 4, dtype, torch.device(device))
