"""The memory plan counts every matrix of models with state mixers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.support.mixer_models import CASES, DEFAULT
from tests.support.slow import mostly_slow
from weft.config.families import load_spec
from weft.config.sizing.memory import weight_bytes


@mostly_slow("name", list(CASES), list(DEFAULT))
def test_planned_weights_are_the_matrices_of_the_file(name: str, checkpoints: Any) -> None:
    checkpoint = checkpoints(name)
    (single,) = Path(checkpoint.folder).glob("*.safetensors")
    saved = sum(tensor.numel() for tensor in load_file(single).values() if tensor.dim() > 1)
    assert weight_bytes(load_spec(checkpoint.folder), "float32") == pytest.approx(4 * saved, abs=4)
