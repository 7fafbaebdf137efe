"""Rows of the comparison: names, flags and what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import compare, rows
from weft.bench.workloads import WORKLOADS


def setting(folder: Path) -> rows.Setting:
    model = folder / "models" / "m"
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text("{}")
    return rows.Setting(model=model, dtype="bfloat16", threads=2, max_len=512, max_seqs=32, folder=folder)


def test_flags_become_keywords() -> None:
    flags = ["--quantization", "int8", "--no-enable-x", "--fast", "--block-size=32"]
    assert rows.keywords(flags) == {
        "quantization": "int8",
        "enable_x": False,
        "fast": True,
        "block_size": "32",
    }


def test_a_word_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        rows.keywords(["int8"])


def test_weft_rows_by_name_and_without() -> None:
    given = ["weft-int8=--quantization int8", "--block-size 32"]
    assert compare.weft_rows(given) == {"weft-int8": "--quantization int8", "weft": "--block-size 32"}


def test_a_peers_name_is_no_weft_row() -> None:
    with pytest.raises(SystemExit, match="vllm"):
        compare.weft_rows(["vllm=--block-size 32"])


def test_missing_peers_are_said_and_not_fatal(tmp_path: Path) -> None:
    built = rows.build(["weft", "vllm", "nobody"], {}, setting(tmp_path))
    assert isinstance(built["weft"], rows.Row)
    assert "setup.sh vllm" in str(built["vllm"])
    assert "no engine of this name" in str(built["nobody"])


def test_weft_row_carries_its_flags_to_driver_and_server(tmp_path: Path) -> None:
    row = rows.build(["weft-int8"], {"weft-int8": "--quantization int8"}, setting(tmp_path))["weft-int8"]
    assert isinstance(row, rows.Row)
    assert row.load_message(setting(tmp_path))["load"]["args"] == {"quantization": "int8"}
    command = row.server_command(8123)
    assert command[command.index("--port") + 1] == "8123"
    assert command[-2:] == ["--quantization", "int8"]


def test_vllm_row_preloads_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "vllm/lib").mkdir(parents=True)
    (tmp_path / "vllm/.ready").write_text("x")
    (tmp_path / "vllm/lib/libiomp5.so").write_text("x")
    row = rows.build(["vllm"], {}, setting(tmp_path))["vllm"]
    assert isinstance(row, rows.Row)
    assert row.environment["LD_PRELOAD"] == str(tmp_path / "vllm/lib/libiomp5.so")
    assert row.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "VLLM_MLA_DISABLE" not in row.environment


def test_sizes_hold_every_workload() -> None:
    assert compare.sizes(list(WORKLOADS.values()), same_tokens=False) == (2304, 32)
    assert compare.sizes([WORKLOADS["W2"]], same_tokens=False) == (512, 1)
    assert compare.sizes([WORKLOADS["W2"]], same_tokens=True) == (768, 32)
