"""Names of declared architectures: spellings are found, fused and separate forms load, doubts are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.common.errors import ConfigError
from weft.config.families import load_spec
from weft.models.loader import load_model

Tensors = dict[str, torch.Tensor]


def _logits(folder: Path, paged: Any) -> torch.Tensor:
    model = load_model(
        str(folder), load_spec(str(folder)), torch.float32, torch.device("cpu"), progress=False
    )
    harness = paged(model)
    sequence = harness.sequence([3, 1, 4, 1, 5, 9, 2, 6])
    harness.step([(sequence, 8)])
    return torch.stack(sequence.logits)


def _changed(source: str, folder: Path, change: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return folder


def _apart(tensors: Tensors) -> None:
    """Divide the fused matrices of Phi-3: 4 and 2 heads of 12 dims."""
    for name in [one for one in tensors if "qkv_proj" in one]:
        parts = zip("qkv", tensors.pop(name).split((48, 24, 24)), strict=True)
        tensors |= {name.replace("qkv", part): tensor.clone() for part, tensor in parts}
    for name in [one for one in tensors if "gate_up_proj" in one]:
        parts = zip(("gate", "up"), tensors.pop(name).chunk(2), strict=True)
        tensors |= {name.replace("gate_up", part): tensor.clone() for part, tensor in parts}


def _spelled(tensors: Tensors, old: str, new: str) -> None:
    for name in [one for one in tensors if old in one]:
        tensors[name.replace(old, new)] = tensors.pop(name)


def _in_names_of_mixtral(tensors: Tensors) -> None:
    _spelled(tensors, ".mlp.", ".block_sparse_moe.")
    experts = [one for one in tensors if ".experts." in one]
    for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        for name in [one for one in experts if ours in one and one in tensors]:
            tensors[name.replace(ours, theirs)] = tensors.pop(name)


def test_fused_and_separate_matrices_are_the_same_model(checkpoints: Any, paged: Any, tmp_path: Path) -> None:
    source = checkpoints("phi3").folder
    assert torch.equal(_logits(_changed(source, tmp_path / "b", _apart), paged), _logits(Path(source), paged))


def test_spellings_are_found(checkpoints: Any, paged: Any, tmp_path: Path) -> None:
    source = checkpoints("dots1").folder
    changed = _changed(source, tmp_path / "b", _in_names_of_mixtral)
    assert torch.equal(_logits(changed, paged), _logits(Path(source), paged))


def test_two_readings_are_refused(checkpoints: Any, paged: Any, tmp_path: Path) -> None:
    def fused_beside(tensors: Tensors) -> None:
        fused = dict(tensors)
        _apart(tensors)
        tensors |= {name: tensor.clone() for name, tensor in fused.items()}

    with pytest.raises(ConfigError, match=r"present twice: .*layers\.0"):
        _logits(_changed(checkpoints("phi3").folder, tmp_path / "a", fused_beside), paged)

    def two_spellings(tensors: Tensors) -> None:
        name = next(one for one in tensors if ".mlp.down_proj" in one)
        tensors[name.replace(".mlp.", ".block_sparse_moe.")] = tensors[name].clone()

    with pytest.raises(ConfigError, match="two spellings of the feed-forward block"):
        _logits(_changed(checkpoints("phi3").folder, tmp_path / "b", two_spellings), paged)


def _wrapped(source: str, folder: Path, architecture: str, kind: str) -> str:
    """Save a text model as the part of a model with a tower."""
    shutil.copytree(source, folder)
    text = json.loads((folder / "config.json").read_text())
    own = {name: text.pop(name) for name in ("architectures", "tie_word_embeddings") if name in text}
    config = {**own, "architectures": [architecture], "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps({**config, "text_config": {**text, "model_type": kind}}))
    tensors = load_file(folder / "model.safetensors")
    below = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    towers = {"vision_tower.patch.weight": torch.ones(2), "multi_modal_projector.norm.weight": torch.ones(2)}
    save_file({**below, **towers}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize(
    ("name", "architecture", "kind"),
    [
        ("mistral-window", "Mistral3ForConditionalGeneration", "mistral"),
        ("gemma3", "Gemma3ForConditionalGeneration", "gemma3_text"),
    ],
)
def test_the_text_model_of_a_model_with_a_tower(
    name: str, architecture: str, kind: str, checkpoints: Any, tmp_path: Path
) -> None:
    source = checkpoints(name)
    folder = _wrapped(source.folder, tmp_path / "wrapped", architecture, kind)
    spec = load_spec(folder, language_model_only=True)
    assert spec.architecture == architecture
    model = load_model(folder, spec, torch.float32, torch.device("cpu"), progress=False, pack=False)
    found, expected = dict(model.named_parameters()), dict(source.read().named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[one], expected[one]) for one in found)
    with pytest.raises(ConfigError, match=r"head_dim must be|mm_tokens_per_image 256 is no square"):
        load_spec(folder)
