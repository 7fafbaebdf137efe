"""Checkpoints in formats of peers are made once, again for a newer model, and never partially."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench import converted
from bench.converted import Missing, Source


@pytest.fixture
def source(tmp_path: Path) -> Source:
    model = tmp_path / "models/m"
    model.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": torch.randn(96, 64),
        "model.layers.0.self_attn.q_proj.weight": torch.randn(32, 64),
        "model.layers.0.mlp.gate.weight": torch.randn(4, 64),
        "model.norm.weight": torch.ones(64),
    }
    save_file({name: one.bfloat16() for name, one in tensors.items()}, model / "model.safetensors")
    (model / "config.json").write_text('{"vocab_size": 96}')
    (model / "tokenizer.json").write_text("{}")
    return Source(model, "bfloat16", tmp_path)


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_a_file_is_made_once_and_again_for_a_newer_model(source: Source) -> None:
    program(source.folder / "transformers/bin/python", 'echo made >>"$0.log"; echo x >"$4"')
    log = source.folder / "transformers/bin/python.log"
    made = converted.gguf(source, "")
    assert made.name == "m-bf16.gguf"
    assert converted.gguf(source, "") == made
    assert log.read_text() == "made\n"
    later = made.stat().st_mtime + 10
    os.utime(source.model / "model.safetensors", (later, later))
    converted.gguf(source, "")
    assert log.read_text() == "made\nmade\n"


def test_fewer_bits_are_made_by_llama_cpps_own_tool(source: Source) -> None:
    program(source.folder / "transformers/bin/python", 'echo "$5" >"$4"')
    assert converted.gguf(source, "int8").read_text() == "q8_0\n"
    with pytest.raises(Missing, match=r"setup\.sh llamacpp"):
        converted.gguf(source, "int4")
    program(source.folder / "llamacpp/bin/llama-quantize", 'cat "$1" >"$2"; echo "$3" >>"$2"')
    made = converted.gguf(source, "int4")
    assert (made.name, made.read_text()) == ("m-q4_k_m.gguf", "bf16\nq4_k_m\n")


def test_openvino_is_told_the_form(source: Source) -> None:
    program(source.folder / "openvino/bin/optimum-cli", 'mkdir "$9"; echo "$8" >"$9/form"')
    for weights, form in (("", "fp16"), ("int8", "int8")):
        assert (converted.openvino(source, weights) / "form").read_text() == f"{form}\n"


def test_a_refusal_is_reported_and_leaves_no_state(source: Source) -> None:
    program(source.folder / "openvino/bin/optimum-cli", 'mkdir "$9"; echo "it is no model" >&2; exit 1')
    with pytest.raises(Missing, match="its exporter refused the model: it is no model"):
        converted.openvino(source, "")
    assert sorted(path.name for path in source.folder.iterdir()) == ["models", "openvino"]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "bits"), [("int8", 8), ("int4", 4)])
def test_compressed_tensors_are_near_the_model(source: Source, kind: str, bits: int) -> None:
    made = converted.compressed(source, kind, Path(sys.executable))
    stored = load_file(made / "model.safetensors")
    plain = load_file(source.model / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    assert {key for key in stored if name not in key} == {key for key in plain if name not in key}
    exact = plain[f"{name}.weight"].float()
    if kind == "int8":
        back = stored[f"{name}.weight"].float() * stored[f"{name}.weight_scale"].float()
    else:
        words = stored[f"{name}.weight_packed"]
        codes = (words.unsqueeze(-1) >> torch.arange(0, 32, 4)).bitwise_and(15).flatten(1) - 8
        assert stored[f"{name}.weight_shape"].tolist() == [32, 64]
        back = codes.float() * stored[f"{name}.weight_scale"].float().repeat_interleave(64, 1)
    step = exact.abs().amax() / (2 ** (bits - 1) - 1)
    # Half a step, plus the rounding of the scale for the largest value.
    assert (back - exact).abs().max() < 0.8 * step
    about = json.loads((made / "config.json").read_text())["quantization_config"]
    assert about["ignore"] == ["model.layers.0.mlp.gate"]
    assert (made / "tokenizer.json").exists()


@pytest.mark.slow
def test_a_quantized_checkpoint_is_not_quantized_again(source: Source) -> None:
    (source.model / "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    with pytest.raises(Missing, match="quantized already"):
        converted.compressed(source, "int8", Path(sys.executable))
