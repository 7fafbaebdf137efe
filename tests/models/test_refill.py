"""A refilled model computes like a fresh one, in every declared family, with and without adapter places."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e0.rig import CPU, Answer, make_engine, run, spec_of, submit
from tests.models.conftest import make_checkpoint
from tests.support.declared_models import CASES
from weft.layers.build import AdapterOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.models.refill import check_refill, refill, weights_of
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.slow

GREEDY = TokenParams(temperature=0.0, max_tokens=6, logprobs=0)


def model_of(folder: Path, places: int = 0) -> Decoder:
    options = AdapterOptions(places=places, rank=4, experts=bool(places))
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
    model, due = model_of(old, places), answer(new, model_of(new))
    assert answer(old, model).tokens != due.tokens
    held, fresh = weights_of(model), weights_of(model_of(new))
    assert held.keys() == fresh.keys()
    check_refill(held, fresh)
    refill(held, fresh)
    made = answer(new, model)
    assert made.tokens == due.tokens
    assert made.logprobs == due.logprobs
