"""A tower without its text model: the tensors it reads, and equal bits of its output."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.vision_models import CASES, random_image
from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.models.files import WeightFile
from weft.models.loader import load_model
from weft.models.tower import load_tower
from weft.models.vision import Tower

CPU = torch.device("cpu")


def _same(one: Tower, other: Tower) -> None:
    image = random_image(24, 40, seed=4)
    with torch.inference_mode():
        made, expected = one.embed(image), other.embed(image)
    assert torch.equal(made.main, expected.main)
    assert (made.levels is None) == (expected.levels is None)
    if made.levels is not None and expected.levels is not None:
        assert torch.equal(made.levels, expected.levels)


@pytest.mark.parametrize("name", list(CASES))
@pytest.mark.parametrize("form", ["auto", "dummy"])
def test_the_same_bits_as_beside_the_text(name: str, form: str, seeing: Any) -> None:
    folder = seeing(name).folder
    spec = load_spec(folder)
    alone = load_tower(folder, spec, torch.float32, CPU, form, 7, progress=False)
    whole = load_model(folder, spec, torch.float32, CPU, form, 7, progress=False)
    assert whole.vision is not None
    _same(alone.vision, whole.vision)
    assert {n for n, _ in alone.named_parameters()} == {
        n for n, _ in whole.named_parameters() if n.startswith("vision.")
    }


@pytest.mark.requirement("D1")
@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("qwen3-vl", ("model.visual.",)),
        ("qwen3-5-vision", ("model.visual.",)),
        ("kimi-k25", ("vision_tower.", "mm_projector.")),
    ],
)
def test_no_other_tensor_is_read(
    name: str, prefixes: tuple[str, ...], seeing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[str] = set()
    of_file = WeightFile.part

    def part(self: WeightFile, tensor: str, *more: Any) -> torch.Tensor:
        read.add(tensor)
        return of_file(self, tensor, *more)

    monkeypatch.setattr(WeightFile, "part", part)
    folder = seeing(name).folder
    load_tower(folder, load_spec(folder), torch.float32, CPU, progress=False)
    saved = load_file(Path(folder) / "model.safetensors")
    assert {tensor for tensor in read if not tensor.startswith(prefixes)} == set()
    wanted = {tensor for tensor in saved if tensor.startswith(prefixes) and "time_weight" not in tensor}
    assert read == wanted
    assert len(wanted) < len(saved)


@pytest.mark.requirement("D1")
def test_files_without_its_tensors_need_not_be_there(seeing: Any, tmp_path: Path) -> None:
    source = Path(seeing("qwen3-vl").folder)
    for file in ("config.json", "preprocessor_config.json"):
        shutil.copy(source / file, tmp_path / file)
    saved = load_file(source / "model.safetensors")
    tower = {name: tensor for name, tensor in saved.items() if name.startswith("model.visual.")}
    save_file(tower, tmp_path / "tower.safetensors", metadata={"format": "pt"})
    files = {name: "tower.safetensors" if name in tower else "text.safetensors" for name in saved}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    spec = load_spec(str(source))
    alone = load_tower(str(tmp_path), spec, torch.float32, CPU, progress=False)
    _same(alone.vision, load_tower(str(source), spec, torch.float32, CPU, progress=False).vision)
    with pytest.raises(ConfigError, match=r"text\.safetensors, which is missing"):
        load_model(str(tmp_path), spec, torch.float32, CPU, progress=False)


def test_a_tower_that_is_not_whole(seeing: Any, tmp_path: Path) -> None:
    source = Path(seeing("qwen3-vl").folder)
    saved = load_file(source / "model.safetensors")
    del saved["model.visual.merger.norm.weight"]
    save_file(saved, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"missing: model\.visual\.merger\.norm\.weight$"):
        load_tower(str(tmp_path), load_spec(str(source)), torch.float32, CPU, progress=False)
