"""Exact tokens under LoRA adapters in every declared family: equal to the merged checkpoint in float64.

The adapter has every matrix that the family takes. A matrix that a layer reads in another way, without the
adapter, would change tokens here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e0.rig import CPU, make_engine, run, spec_of, submit
from tests.e0.test_loras import load
from tests.models.conftest import make_checkpoint
from tests.support.declared_models import CASES
from tests.support.loras import make_adapter, merge
from weft.config.adapter_files.tensors import AdapterModule
from weft.config.adapters import read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.layers.build import AdapterOptions
from weft.models.decoder import Decoder
from weft.models.loader import load_model
from weft.types.sampling import TokenParams

pytestmark = pytest.mark.slow

GREEDY = TokenParams(temperature=0.0, max_tokens=7)
LENGTHS = (19, 7)


def adapted(base: Path) -> Decoder:
    options = AdapterOptions(places=1, rank=4, experts=True)
    model = load_model(str(base), spec_of(base), torch.float64, CPU, progress=False, adapters=options)
    assert isinstance(model, Decoder)
    return model


def one(module: str) -> AdapterModule:
    return AdapterModule(module=module, rank=1, inputs=1, outputs=1, rows=1, scale=1.0, a="", b="")


def all_modules(base: Path, model: Decoder) -> str:
    """Return a pattern of the modules of ``base`` that take adapters: at least attention."""
    assert model.adapters is not None
    found = [
        module
        for name, tensor in load_file(base / "model.safetensors").items()
        if tensor.dim() == 2
        and model.adapters._target(one(module := name.removesuffix(".weight"))) is not None
    ]
    assert any(part in module for module in found for part in ("attn", "mixer", "attention"))
    assert not any("dt_proj" in module for module in found)  # transformers reads the matrix alone
    assert any("kv_b_proj" in module for module in found) == (model.spec.mla is not None)
    return "^(" + "|".join(map(re.escape, found)) + ")$"


LATENT = [
    "deepseek-v2-greedy",
    "deepseek-v3-full-queries-bias",
    "deepseek-v32",
    "deepseek-v32-yarn",
    "glm-dsa",
]
LATENT += ["nemotron-h-latent", "mamba2-bias", "olmo-hybrid", "bailing-hybrid", "mamba-odd", "jamba"]


@pytest.mark.parametrize("family", [*CASES, *LATENT])
def test_tokens_of_the_merged_checkpoint(family: str, tmp_path: Path) -> None:
    base = Path(make_checkpoint(family, tmp_path / "base").folder)
    model = adapted(base)
    folder = make_adapter(tmp_path / "adapter", base, all_modules(base, model))
    digest = read_adapter(folder).digest
    prompts = [[(5 + 3 * i) % (model.spec.vocab_size - 3) + 1 for i in range(length)] for length in LENGTHS]
    submits = [submit(i, prompt, GREEDY, request=i, adapter=digest) for i, prompt in enumerate(prompts)]
    engine, _ = make_engine(base, model=model, lora=LoraSection(max_loras=1), chunk=6)
    load(engine, folder, digest)
    answers = run(engine, [[*submits, submit(9, prompts[0], GREEDY, request=9)]])
    engine.close()
    merged, _ = make_engine(merge(tmp_path / "merged", base, folder), caching=False)
    due = [
        run(merged, [[submit(i, prompt, GREEDY, request=i)]])[i].tokens for i, prompt in enumerate(prompts)
    ]
    merged.close()
    assert [answers[i].tokens for i in range(len(prompts))] == due
    assert answers[9].tokens != due[0]
