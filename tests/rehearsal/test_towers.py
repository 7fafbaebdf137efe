"""Vision towers on a simulated GPU: no operand is on the host, and the host does not wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from tests.rehearsal.rig import rehearsed
from tests.support.vision_models import CASES, processor_of
from weft.config.families import load_spec
from weft.models.loader import build_model


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
