"""The text part of vision models, as ``weft verify`` requests it from the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.vision_models import save_tiny
from weft.cli.reference import Reference
from weft.config.flags import from_keywords


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    torch.manual_seed(0)
    for weight in model.parameters():
        weight.normal_(0.0, 0.25)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe", "qwen3-5-vision", "kimi-k25"])
def test_logits_of_text(name: str, tmp_path: Path) -> None:
    model: Any = save_tiny(name, tmp_path, _randomize)
    config = from_keywords({"device": "cpu"})
    ids = [3, 5, 7, 11, 13, 17]
    with torch.no_grad():
        expected = model(torch.tensor([ids]), use_cache=False).logits[0]
    found = Reference(config, str(tmp_path))
    assert torch.allclose(found.logits(ids), expected, rtol=1e-4, atol=1e-5)
    assert found.spec.vision is None
    assert found.greedy(ids, 1) == [int(expected[-1].argmax())]


def test_fewer_layers(tmp_path: Path) -> None:
    save_tiny("qwen3-vl", tmp_path, _randomize)
    found = Reference(from_keywords({"device": "cpu", "num_hidden_layers_override": 2}), str(tmp_path))
    assert len(found.model.model.language_model.layers) == found.spec.layers == 2
