"""Small random models that read images, and their prompts for composition tests."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.seen import Seen
from tests.support.vision_models import CASES, Clip, make_prompt, processor_of, publish
from weft.config.families import load_spec

VOCAB = 300
#: The token ids in ``write_tokenizer``.
_START, _END, _IMAGE, _VIDEO = range(VOCAB - 7, VOCAB - 3)
_IDS = {
    "image_token_id": _IMAGE,
    "video_token_id": _VIDEO,
    "vision_start_token_id": _START,
    "vision_end_token_id": _END,
}
_SMALL_STATE = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
}
"""Small states, as in the family without images: caches are mostly entries, which run short."""
#: Form of attention -> (case of ``tests.support.vision_models``, changes of the text model).
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "images, deepstack": ("qwen3-vl", {}),
    "images, delta": ("qwen3-5-moe-vision", _SMALL_STATE),
}
LARGEST = 50
"""Tokens of the largest image of the processors of these models."""


def make_seeing(folder: Path, family: str) -> None:
    """Save a random checkpoint with a processor, and with a lookahead module if the family has one."""
    import transformers

    from tests.models.conftest import _randomize

    case, changes = FAMILIES[family]
    name, settings = CASES[case]
    text = {**settings["text_config"], **changes, "vocab_size": VOCAB, "max_position_embeddings": 192}
    config = getattr(transformers, f"{name}Config")(**{**settings, **_IDS, "text_config": text})
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config)
    _randomize(model, 3)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor_of(name)))
    if name == "Kimi_K25":
        publish(folder)
    if name == "Qwen3_5Moe":
        _look_ahead(folder, text["hidden_size"])


def _look_ahead(folder: Path, hidden: int) -> None:
    """Add a lookahead module that does the work of the last layer, with the next token beside the hidden
    state."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last = max(
        int(name.split(".layers.")[1].split(".")[0]) for name in tensors if "language_model.layers" in name
    )
    for name, tensor in list(tensors.items()):
        if f"language_model.layers.{last}." in name:
            tensors[f"mtp.layers.0.{name.split(f'.layers.{last}.')[1]}"] = tensor.clone()
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.eye(hidden)], dim=1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden)
    tensors["mtp.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))


@cache
def prompts(folder: Path) -> list[dict[str, Any]]:
    """Return prompts of text, one image and several images of odd sizes.

    Some share an image behind other text, some share text before other images, some have images in several
    turns. The last three share their first blocks.
    """
    spec = load_spec(str(folder))

    def seen(parts: list[int | tuple[int, int] | Clip], seed: int) -> Seen:
        return Seen(make_prompt(parts, spec, seed))

    first = seen([21, (2, 3), 14], 1)
    other = first.with_images_of(seen([21, (2, 3), 14], 11))
    turn = seen([30, (3, 3), 8, (1, 5), 6], 2)
    second = turn.then([7, 8, 9], seen([2, (2, 3), 3], 1))
    rng = random.Random(7)
    words = [[rng.randrange(256) for _ in range(3)], [4, 4, 8] * 7]
    made: list[dict[str, Any]] = [{"prompt_token_ids": ids} for ids in words]
    shown = [
        first,
        other,
        seen([(5, 7), 33], 3),
        seen([1, (1, 1), 31, (4, 1), (1, 7), 12], 6),
        seen([9, (2, 3), 1], 1),
        turn,
        second,
        second.then([1, 2], seen([4, (3, 2), 4], 8)),
    ]
    assert all(len(one.ids) <= 96 for one in shown), [len(one.ids) for one in shown]
    return made + [{"prompt_token_ids": one.ids, "media": list(one.media)} for one in shown]
