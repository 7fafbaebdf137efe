"""A batch on a server that is killed many times: nothing lost, nothing twice, no other text."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from bench.batch_drill import drill


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_no_output(tmp_path: Path) -> None:
    result = drill(tmp_path, 300, 5, 0, ["spool-text", "--threads", "1", "--max-num-seqs", "32"])
    assert result.clean, result


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_kills_change_no_output_of_several_models(tmp_path: Path) -> None:
    """Two models load on demand, with memory for one. Each needs the load of its own lines."""
    source = Path(__file__).parents[2] / "weft" / "checkpoints" / "spool-text"
    for name in ("a", "b"):
        shutil.copytree(source, tmp_path / "models" / name)
    size = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    flags = ["--threads", "1", "--max-num-seqs", "16", "--kv-cache-memory", "64M"]
    flags += ["--models-dir", str(tmp_path / "models"), "--models-memory", str(size + (128 << 20))]
    result = drill(tmp_path, 80, 3, 0, flags)
    assert result.clean, result
