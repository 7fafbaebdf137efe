"""The bundled model's weights in published formats, through the whole engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support import quantized as make
from weft.cli.evaluate.text_answers import chat_of, from_engine
from weft.config.flags import from_keywords
from weft.config.hub import BUNDLED
from weft.eval.gsm_mini import score, test_set

Tensors = dict[str, torch.Tensor]
FORMATS: dict[str, tuple[dict[str, object], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        lambda w: make.fp8(w, "block", block=(64, 64)),
    ),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, make.nvfp4),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "least"), [("fp8", 39), ("nvfp4", 34)])
def test_problems_are_solved(name: str, least: int, tmp_path: Path) -> None:
    """At least ``least`` of 40 problems are solved; wrongly read weights solve none."""
    config, quantize = FORMATS[name]
    folder = tmp_path / "packed"
    shutil.copytree(Path(BUNDLED) / "spool-text", folder)
    saved: Tensors = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if "_proj." not in key:
            saved[key] = weight
            continue
        parts, _ = quantize(weight.float())
        saved.update({key.replace("weight", end): part.contiguous() for end, part in parts.items()})
    save_file(saved, folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, "quantization_config": config}))
    problems = test_set(40)
    settings = from_keywords({"model": str(folder), "device": "cpu", "dtype": "bfloat16"})
    _, answers = from_engine(settings, [chat_of(problem.question) for problem in problems], 40, 128)
    solved = score(answers, problems)
    print(f"{name}: {solved} of 40")
    assert solved >= least
