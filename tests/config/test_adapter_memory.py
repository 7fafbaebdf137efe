"""Memory of LoRA adapters in the plan: equal to the places of real models, and taken from the caches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e0.rig import CPU, spec_of
from tests.support.checkpoints import make_checkpoint
from tests.support.slow import mostly_slow
from weft.common.errors import ConfigError
from weft.config import devices
from weft.config.resolve import resolve
from weft.config.sections.all import Config, ModelSection, RunnerSection
from weft.config.sections.lora_section import LoraSection
from weft.config.sizing.adapter_memory import adapter_bytes
from weft.layers.build import AdapterOptions
from weft.models.loader import load_model
from weft.types.layout import Layout

SHAPES = ["llama", "qwen3_moe", "deepseek_v3", "qwen3_next", "lfm2", "nemotron_h", "falcon_h1"]
SHAPES += ["mamba2", "olmo_hybrid", "bailing_hybrid", "kimi_linear", "falcon_mamba", "jamba"]
ALL = LoraSection(max_loras=2, max_lora_rank=8, lora_experts=True, lora_saved_modules=True)


@mostly_slow("shape", SHAPES, 2)
def test_the_plan_has_the_bytes_of_the_places_of_a_model(shape: str, tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path, shape)
    options = AdapterOptions(places=2, rank=8, experts=True, saved=True)
    model = load_model(str(base), spec_of(base), torch.float32, CPU, progress=False, adapters=options)
    planned = adapter_bytes(spec_of(base), "float32", ALL, Layout())
    assert model.adapters.nbytes == planned
    loaded = LoraSection(max_loras=2, max_lora_rank=8, lora_modules=("a=b", "c=d"))
    without = LoraSection(max_loras=2, max_lora_rank=8)
    numbers = [adapter_bytes(spec_of(base), "float32", one, Layout()) for one in (without, loaded)]
    assert numbers[1] == 2 * numbers[0] > 0
    assert adapter_bytes(spec_of(base), "float32", LoraSection(), Layout()) == 0


def test_places_leave_less_for_the_caches_of_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(devices, "available_memory", lambda: 5 << 20)

    def blocks(lora: LoraSection) -> int:
        section = ModelSection(model=str(base), dtype="float32")
        config = Config(model=section, runner=RunnerSection(device="cpu"), lora=lora)
        return resolve(config).kv.pools[0].num_blocks

    assert blocks(LoraSection()) > 0
    with pytest.raises(ConfigError, match="0 are available"):
        blocks(LoraSection(max_loras=16, max_lora_rank=64))
