"""A refilled model computes like a fresh one, in every declared family, with and without adapter places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.e0.rig import CPU, Answer, make_engine, run, spec_of, submit
from tests.models.conftest import make_checkpoint
from tests.support.declared_models import CASES
from tests.support.new_weights import read_tensors
from weft.config.resolve import resolve
from weft.config.sections.all import CacheSection, Config, ModelSection, RunnerSection
from weft.config.sections.lora_section import LoraSection
from weft.engine.build import build_runner
from weft.layers.build import AdapterOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.models.refill import check_refill, refill, weights_of
from weft.types.sampling import TokenParams
from weft.types.weights import WeightsUpdate

pytestmark = pytest.mark.slow

GREEDY = TokenParams(temperature=0.0, max_tokens=6, logprobs=0)
PAIRS = {
    "deepseek-v32": "blocks.0.attention.down",
    "glm-dsa": "blocks.0.attention.down",
    "qwen3-next": "blocks.0.attention.qkvz",
    "kimi-linear": "blocks.0.attention.qkv",
}
"""Families with pairs of linear layers: the first layer of a pair."""


def model_of(folder: Path, options: AdapterOptions = AdapterOptions()) -> Decoder:
    model = load_model(str(folder), spec_of(folder), torch.float64, CPU, progress=False, adapters=options)
    assert isinstance(model, Decoder)
    return model


def answer(folder: Path, model: Decoder) -> Answer:
    engine, _ = make_engine(folder, model=model, caching=False)
    prompt = [(5 + 3 * i) % (model.spec.vocab_size - 3) + 1 for i in range(19)]
    made = run(engine, [[submit(0, prompt, GREEDY, request=0)]])[0]
    engine.close()
    return made


@pytest.mark.parametrize("places", [0, 1])
@pytest.mark.parametrize("family", CASES)
def test_a_refilled_model_equals_a_fresh_model(family: str, places: int, tmp_path: Path) -> None:
    """The second model has no places for adapters, as in an update of a server with ``--max-loras``."""
    old = Path(make_checkpoint(family, tmp_path / "old", 0).folder)
    new = Path(make_checkpoint(family, tmp_path / "new", 1).folder)
    options = AdapterOptions(places=places, rank=4, experts=bool(places))
    model, due = model_of(old, options), answer(new, model_of(new))
    assert answer(old, model).tokens != due.tokens
    second = model_of(new, AdapterOptions(like_places=bool(places)))
    held, fresh = weights_of(model), weights_of(second)
    assert held.keys() == fresh.keys()
    check_refill(held, fresh)
    refill(held, fresh)
    made = answer(new, model)
    assert made.tokens == due.tokens
    assert made.logprobs == due.logprobs


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("places", [0, 1])
@pytest.mark.parametrize("family", PAIRS)
def test_an_update_has_the_layouts_of_the_model(
    family: str, places: int, partial: bool, tmp_path: Path
) -> None:
    """Pairs have one product without places for adapters, and two with places, also in an update.

    With places, gate and up are packed for another op.
    """
    old = Path(make_checkpoint(family, tmp_path / "old", 0).folder)
    new = Path(make_checkpoint(family, tmp_path / "new", 1).folder)
    config = Config(
        model=ModelSection(model=str(old), dtype="float32", max_model_len=64),
        cache=CacheSection(kv_cache_memory="8M", enable_prefix_caching=False),
        runner=RunnerSection(device="cpu", threads=1),
        lora=LoraSection(max_loras=places, max_lora_rank=4) if places else LoraSection(),
    )
    runner = build_runner(resolve(config), progress=False)
    assert runner._model.get_submodule(PAIRS[family]).joined == (not places)
    tensors = {
        name: tensor
        for name, tensor in read_tensors(new).items()
        if not partial or (".layers.0." in name and "attn." in name)
    }
    file = tmp_path / "update.safetensors"
    save_file(tensors, file)
    weights = runner.weights
    weights.stage(WeightsUpdate(version=1, files=(str(file),), partial=partial))
    assert weights.wait().error is None
    weights.swap(1)
    held = weights_of(runner._model)
    options = AdapterOptions(places=places, rank=4)
    spec = runner._model.spec
    fresh = load_model(str(new), spec, torch.float32, CPU, progress=False, adapters=options)
    inside = "blocks.0.attention." if partial else ""
    other = [
        place
        for place, tensor in weights_of(fresh).items()
        if place.startswith(inside) and not torch.equal(held[place], tensor)
    ]
    assert not other
    runner.close()
