"""The memory plan counts every matrix of models with state mixers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file

from tests.support.mixer_models import CASES, DEFAULT
from tests.support.slow import mostly_slow
from weft.config.families import load_spec
from weft.config.sizing.memory import weight_bytes
from weft.types.layout import Layout


@mostly_slow(
    "name",
    [*CASES, "qwen3-next-sparse-step", "kimi-linear-odd-heads", "olmo-hybrid", "bailing-hybrid"],
    [*DEFAULT, "kimi-linear-odd-heads"],
)
def test_planned_weights_are_the_matrices_of_the_file(name: str, checkpoints: Any) -> None:
    checkpoint = checkpoints(name)
    (single,) = Path(checkpoint.folder).glob("*.safetensors")
    saved = sum(tensor.numel() for tensor in load_file(single).values() if tensor.squeeze().dim() > 1)
    assert weight_bytes(load_spec(checkpoint.folder), "float32") == pytest.approx(4 * saved, abs=4)


def test_the_table_of_layer_inputs_keeps_its_type(checkpoints: Any) -> None:
    """The table of a small Gemma 4 has half of all parameters. Quantization leaves the table alone."""
    spec = load_spec(checkpoints("gemma4-inputs").folder)
    without = msgspec.structs.replace(spec, layer=msgspec.structs.replace(spec.layer, inputs_vocab=0))
    table = spec.layer.inputs_vocab * spec.layers * spec.layer.inputs
    for quantization in ("none", "int4"):
        parts = [weight_bytes(each, "bfloat16", quantization) for each in (spec, without)]
        assert parts[0] - parts[1] == 2 * table
    layout = Layout(tensor=2)
    halves = [weight_bytes(each, "bfloat16", layout=layout) for each in (spec, without)]
    assert halves[0] - halves[1] == -(-spec.layer.inputs_vocab // 2) * 2 * spec.layers * spec.layer.inputs
