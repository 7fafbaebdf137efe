"""The mean of checkpoints."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from training.average import mean_of


def test_each_weight_is_the_mean_in_its_own_dtype() -> None:
    parts = [
        {"a": torch.tensor([x], dtype=torch.bfloat16), "b": torch.tensor([x * 2])} for x in (1.0, 2.0, 6.0)
    ]
    made = mean_of(parts)
    assert made["a"].dtype == torch.bfloat16
    assert made["a"].item() == 3.0
    assert made["b"].item() == 6.0


@pytest.mark.parametrize("other", [{"b": torch.zeros(2)}, {"a": torch.zeros(3)}])
def test_other_models_are_refused(other: dict[str, torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="a: the checkpoints are not of one model"):
        mean_of([other, {"a": torch.zeros(2)}])


def test_the_command_takes_all_else_from_the_last(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        save_file({"a": torch.tensor([float(number)])}, folder / "model.safetensors")
        (folder / "config.json").write_text(f'{{"of": {number}}}')
    command = [sys.executable, "-m", "training.average", str(tmp_path / "out")]
    subprocess.run([*command, str(tmp_path / "1"), str(tmp_path / "2")], check=True)
    assert load_file(tmp_path / "out" / "model.safetensors")["a"].item() == 1.5
    assert (tmp_path / "out" / "config.json").read_text() == '{"of": 2}'
    ran = subprocess.run([*command, str(tmp_path / "1")], capture_output=True, text=True, check=False)
    assert ran.returncode == 2
    assert "give at least two" in ran.stderr
