"""Exact tokens under LoRA adapters of embedding and output head: low-rank parts and whole matrices."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch

from tests.e0.rig import CPU, make_engine, spec_of
from tests.e0.test_loras import World, together
from tests.e0.test_loras_ranks import on_two_ranks
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import EXPERTS, TABLES, make_adapter
from tests.support.slowness import until
from weft.config.adapters import read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.layers.build import AdapterOptions
from weft.models.loader import load_model
from weft.types.adapters import AdapterChanged, LoadAdapter

SAVED = ["model.embed_tokens", "lm_head"]


@pytest.mark.parametrize("shape", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_one_batch_of_base_and_adapters(shape: str, tmp_path: Path) -> None:
    world = World(tmp_path, shape, TABLES, modules_to_save=SAVED)
    together(world, chunk=8, depth=2)
    world.check(on_two_ranks(world, depth=1))
    together(world, places=1)


def test_refusals_name_the_flag(tmp_path: Path) -> None:
    """Experts and whole matrices take much memory, so a server without the flag names the flag."""
    for shape, targets, flag, more in (
        ("qwen3_moe", EXPERTS, "--lora-experts", {}),
        ("llama", TABLES, "--lora-saved-modules", {"modules_to_save": SAVED}),
    ):
        base = make_checkpoint(tmp_path, shape)
        options = AdapterOptions(places=1, rank=4)
        model = load_model(str(base), spec_of(base), torch.float64, CPU, progress=False, adapters=options)
        engine, _ = make_engine(base, model=model, lora=LoraSection(max_loras=1))
        folder = make_adapter(tmp_path / f"adapter {shape}", base, targets, **more)
        message = LoadAdapter(name="a", digest=read_adapter(folder).digest, folder=str(folder))
        answer = engine.adapters.apply(message)
        engine.close()
        assert answer.error is not None
        assert flag in answer.error.message


@pytest.mark.parametrize("metadata", [{"a": 5}, "x"])
def test_a_header_that_safetensors_refuses(metadata: object, tmp_path: Path) -> None:
    """The front reads the header alone, so the engine is the first to read such a file."""
    base = make_checkpoint(tmp_path, "llama")
    options = AdapterOptions(places=1, rank=4)
    model = load_model(str(base), spec_of(base), torch.float64, CPU, progress=False, adapters=options)
    engine, _ = make_engine(base, model=model, lora=LoraSection(max_loras=1))
    path = make_adapter(tmp_path / "adapter", base) / "adapter_model.safetensors"
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps({**json.loads(data[8 : 8 + size]), "__metadata__": metadata}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + size :])
    digest = read_adapter(path.parent).digest
    assert engine.adapters.begin(LoadAdapter(name="a", digest=digest, folder=str(path.parent))) is None
    answers: list[AdapterChanged] = []
    until(lambda: answers.extend(engine.adapters.finished()) or answers, every=0.005)
    engine.close()
    assert answers[0].error is not None
    assert "adapter_model.safetensors is not readable" in answers[0].error.message
