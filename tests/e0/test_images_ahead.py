"""A lookahead module reads image embeddings in place of placeholder tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e0.rig import make_engine, run, submit
from tests.models.conftest import _randomize
from tests.support.delta_models import FULL
from tests.support.seen import Seen
from tests.support.vision_models import CASES, PLACEHOLDER, make_prompt, save_tiny
from weft.config.families import load_spec
from weft.config.sections.all import SpeculationSection
from weft.runner.images.image_store import MediaStore
from weft.types.plan import Segment
from weft.types.sampling import TokenParams

GREEDY = TokenParams(temperature=0.0, max_tokens=12, logit_bias=((PLACEHOLDER, -100.0),))
_DRAFTS = SpeculationSection(speculative_method="mtp", num_speculative_tokens=1, speculative_adaptive=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen3.5 of one attention layer, with a lookahead module that repeats the layer.

    The module reads the next token in place of the current token. Its drafts are often correct where the
    module reads the same input as the layer.
    """
    made = tmp_path_factory.mktemp("ahead")
    family, settings = CASES["qwen3-5-vision"]
    text = {**settings["text_config"], "num_hidden_layers": 1, "layer_types": [FULL]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CASES, "ahead", (family, {**settings, "text_config": text}))

        def randomize(model: Any) -> None:
            _randomize(model, 0)
            table = model.model.language_model.embed_tokens.weight.data
            table /= table.pow(2).mean(1, keepdim=True).sqrt()

        save_tiny("ahead", made, randomize)
    file = made / "model.safetensors"
    tensors = load_file(file)
    hidden = text["hidden_size"]
    for name, tensor in list(tensors.items()):
        if ".language_model.layers.0." in name:
            tensors[name.replace("model.language_model.layers.0.", "mtp.layers.0.")] = tensor.clone()
    tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], dim=1)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.zeros(hidden)
    tensors["mtp.norm.weight"] = tensors["model.language_model.norm.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (made / "config.json").write_text(json.dumps(config))
    return made


def _answers(folder: Path, chunk: int, speculation: SpeculationSection | None) -> tuple[list[Any], int, int]:
    """Return the tokens of each prompt, the number of drafts and the number of correct drafts."""
    spec = load_spec(str(folder))
    parts = [[5, (3, 4), 4], [(5, 5), 2], [2, (2, 2), 1, (3, 5), 6], [11]]
    prompts = [Seen(make_prompt(one, spec, 7 + i)) for i, one in enumerate(parts)]
    engine, _ = make_engine(folder, chunk=chunk, speculation=speculation, caching=False)
    batch = [submit(i, seen.ids, GREEDY, request=i, media=seen.media) for i, seen in enumerate(prompts)]
    answers = run(engine, [batch])
    stats = engine.stats()
    engine.close()
    return [answers[i].tokens for i in range(len(prompts))], sum(stats.drafts), sum(stats.drafts_accepted)


def test_drafts_of_a_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, *_ = _answers(folder, 0, None)
    tokens, drafts, right = _answers(folder, 0, _DRAFTS)
    assert tokens == expected
    assert right > 0.7 * drafts
    for chunk in (5, 7):
        tokens, _, found = _answers(folder, chunk, _DRAFTS)
        assert tokens == expected
        # A chunk that ends before an image cannot read the image: one entry uses the placeholder.
        assert found >= right - 2, "cut anywhere images are read"
    rows = MediaStore.rows

    def blind(store: MediaStore, prefill: Segment, shift: int = 0) -> Any:
        return None if shift else rows(store, prefill, shift)

    monkeypatch.setattr(MediaStore, "rows", blind)
    tokens, _, guessed = _answers(folder, 0, _DRAFTS)
    assert tokens == expected
    assert guessed < right / 2, "of placeholders other drafts are made"
