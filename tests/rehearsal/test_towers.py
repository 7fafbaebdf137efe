"""Vision towers on a simulated GPU: no operand is on the host, the host does not wait, and a shape that
repeats is one replay with the rows of a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.e0 import rig as e0
from tests.rehearsal import rig
from tests.rehearsal.device import Rehearsal, running
from tests.rehearsal.order import HOST
from tests.rehearsal.rig import rehearsed
from tests.rehearsal.test_launches import NO_LAUNCH
from tests.support.seen import SeeingModels
from tests.support.slow import mostly_slow
from tests.support.vision_models import CASES, processor_of, random_image
from weft.config.families import load_spec
from weft.config.sizing.memory import captured_buffer_bytes
from weft.engine.core import EngineCore
from weft.models.loader import build_model
from weft.models.tower import load_tower
from weft.models.vision import Tower
from weft.ops.triton import interpreting
from weft.ops.upload import upload
from weft.runner.graphs.graphs import CudaCapture
from weft.runner.graphs.towers import CapturedTower, captured_tower
from weft.types.sampling import TokenParams

CUDA = torch.device("cuda")
LIMITS: Any = SimpleNamespace(patch=4)
TOWERS = ["qwen3-vl", "qwen3-5-vision", "kimi-k25", "gemma3", "mistral3", "internvl", "llama4"]
SHAPES = dict.fromkeys(("gemma3", "internvl", "llama4"), ((24, 24), (24, 24)))
"""Sizes of images of towers that take one size."""


def loaded(folder: Path, device: torch.device) -> Tower:
    """Return the tower of the checkpoint in ``folder``, in float32."""
    spec = load_spec(str(folder))
    return load_tower(str(folder), spec, torch.float32, device, progress=False).vision


@pytest.fixture(scope="session")
def seen_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function from the name of a vision model to the folder of its checkpoint."""
    return SeeingModels(tmp_path_factory.mktemp("towers")).folder


@pytest.mark.parametrize("name", ["qwen3-vl", "kimi-k25"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_image_is_encoded(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, settings = CASES[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    config.architectures = [f"{family}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor_of(family)))
    spec = load_spec(str(tmp_path))
    with rehearsed(monkeypatch) as made:
        device = torch.device("cuda")
        model = build_model(spec, dtype, device)
        model.pack()
        assert model.vision is not None
        image = torch.zeros(2, 24, 40, 3, dtype=torch.uint8, device=device)
        made.waited.clear()
        with torch.inference_mode():
            found = model.vision.embed(image)
        assert (found.main.shape, found.main.dtype) == ((15, 48), dtype)
        assert found.main.device.type == "cuda"
        assert (found.levels is not None) == (name == "qwen3-vl")
        assert not made.waited


@mostly_slow("name", TOWERS, ["qwen3-vl"])
def test_a_shape_that_repeats_is_one_replay(
    name: str, seen_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of two shapes in turns: after the second image of a shape, a replay between the upload of the
    image and two copies. All rows equal those of the tower op by op, on the CPU."""
    folder = seen_folder(name)
    small, large = SHAPES.get(name, ((24, 40), (32, 16)))
    sizes = [small, large, small, large, small, small, large]
    images = [random_image(*size, seed=number) for number, size in enumerate(sizes)]
    here = loaded(folder, torch.device("cpu"))
    with torch.inference_mode():
        expected = [here.embed(image) for image in images]
    counts: list[int] = []
    use = Rehearsal.use

    def used(self: Rehearsal, label: str, *given: Any, actor: str | None = None) -> None:
        if self.capture is None and actor != HOST and not label.startswith(NO_LAUNCH):
            counts[-1] += 1
        use(self, label, *given, actor=actor)

    counts.append(0)
    monkeypatch.setattr(Rehearsal, "use", used)
    with rehearsed(monkeypatch, values=True) as made:
        tower = captured_tower(loaded(folder, CUDA), LIMITS, CudaCapture(CUDA))
        assert isinstance(tower, CapturedTower)
        for image, rows in zip(images, expected, strict=True):
            counts.append(0)
            on_device = upload(image.numpy(), CUDA)
            with torch.inference_mode(), running(made):
                found = tower.embed(on_device)
            torch.testing.assert_close(made.values_of(found.main), rows.main, rtol=0, atol=0)
            assert (found.levels is None) == (rows.levels is None)
            if found.levels is not None:
                torch.testing.assert_close(made.values_of(found.levels), rows.levels, rtol=0, atol=0)
        assert not made.waited
    assert tower._rows is not None
    vision = load_spec(str(folder)).vision
    assert vision is not None
    assert tower._pixels.nbytes + tower._rows.nbytes == captured_buffer_bytes(vision, "float32")
    repeats = len(images) - 2 * len(set(sizes))
    assert tower.replayed == repeats
    assert max(counts[-repeats:]) == 3 < min(counts[1:3]), counts


@pytest.mark.parametrize("name", ["qwen2-5-vl", "gemma4"])
def test_towers_that_need_the_host_are_not_captured(
    name: str, seen_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with rehearsed(monkeypatch):
        tower = loaded(seen_folder(name), CUDA)
        assert captured_tower(tower, LIMITS, CudaCapture(CUDA)) is tower


@pytest.mark.slow
def test_an_engine_replays_its_tower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run in Triton's interpreter. The tokens behind images of one shape are those of a CPU."""
    if not interpreting():
        pytest.skip("needs Triton's interpreter: TRITON_INTERPRET=1")
    models = SeeingModels(tmp_path)
    prompts = [models.seen("qwen3-vl", [3, (2, 3), 4], seed) for seed in range(4)]
    params = TokenParams(temperature=0.0, max_tokens=2)
    turns = [[e0.submit(n, one.ids, params, request=n, media=one.media)] for n, one in enumerate(prompts)]
    folder, settings = models.folder("qwen3-vl"), {"dtype": "float32", "max_model_len": 64}
    with monkeypatch.context() as patch:
        _, there, core = rig.rehearse(patch, folder, turns, values=True, **settings)
    tower = core.runner._runner._media._tower
    assert isinstance(tower, CapturedTower)
    assert tower.replayed == 2
    here = EngineCore(rig.config_of(folder, **{**settings, "device": "cpu"}), progress=False)
    expected = e0.run(here, turns)
    here.close()
    assert {n: a.tokens for n, a in there.items()} == {n: a.tokens for n, a in expected.items()}
