"""Rows of the comparison: names, flags and missing peers."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import compare, converted, rows
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


def test_an_argument_that_is_no_flag_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        rows.keywords(["int8"])


def test_weft_rows_by_name_and_without() -> None:
    given = ["weft-int8=--quantization int8", "--block-size 32"]
    assert compare.weft_rows(given) == {"weft-int8": "--quantization int8", "weft": "--block-size 32"}


def test_a_peers_name_is_no_weft_row() -> None:
    with pytest.raises(SystemExit, match="vllm"):
        compare.weft_rows(["vllm=--block-size 32"])


def test_missing_peers_are_reported_and_not_fatal(tmp_path: Path) -> None:
    built = rows.build(["weft", "vllm", "nobody"], {}, setting(tmp_path))
    assert isinstance(built["weft"], rows.Row)
    assert "setup.sh vllm" in str(built["vllm"])
    assert "no engine of this name" in str(built["nobody"])


def test_weft_row_carries_its_flags_to_driver_and_server(tmp_path: Path) -> None:
    row = rows.build(["weft-int8"], {"weft-int8": "--quantization int8"}, setting(tmp_path))["weft-int8"]
    assert isinstance(row, rows.Row)
    assert row.load_message(setting(tmp_path))["load"]["args"] == {"quantization": "int8"}
    assert row.server is not None
    assert row.server[row.server.index("--port") + 1] == "{port}"
    assert row.server[-2:] == ("--quantization", "int8")


def test_vllm_row_preloads_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "vllm/lib").mkdir(parents=True)
    (tmp_path / "vllm/.ready").write_text("x")
    (tmp_path / "vllm/lib/libiomp5.so").write_text("x")
    row = rows.build(["vllm"], {}, setting(tmp_path))["vllm"]
    assert isinstance(row, rows.Row)
    assert row.environment["LD_PRELOAD"] == str(tmp_path / "vllm/lib/libiomp5.so")
    assert row.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert "VLLM_MLA_DISABLE" not in row.environment


def test_names_encode_the_bits() -> None:
    assert rows.parted("llamacpp-int8") == ("llamacpp", "int8")
    assert rows.parted("vllm-zen-int4") == ("vllm-zen", "int4")
    assert rows.parted("vllm-zen") == ("vllm-zen", "")
    assert rows.parted("transformers-int8") == ("transformers-int8", "")
    assert rows.parted("weft-w8a8") == ("weft", "w8a8")
    assert rows.parted("vllm-w8a8") == ("vllm-w8a8", "")
    given = {"weft-int8": "--quantization int8 --deterministic"}
    assert rows.own(["weft", "weft-int8", "weft-w8a8", "weft-int4", "vllm-int8"], given) == {
        "weft-w8a8": "--quantization w8a8",
        "weft-int4": "--quantization int4",
        **given,
    }


def test_a_peers_row_of_fewer_bits_is_no_weft_row() -> None:
    with pytest.raises(SystemExit, match="openvino-int8"):
        compare.weft_rows(["openvino-int8=--quantization int8"])


def test_amds_kernels_are_a_default_on_amds_cpus() -> None:
    assert "vllm-zen" in rows.default("vendor_id\t: AuthenticAMD\nflags\t: avx512f")
    assert "vllm-zen" not in rows.default("vendor_id\t: AuthenticAMD\nflags\t: avx2")
    assert "vllm-zen" not in rows.default("vendor_id\t: GenuineIntel\nflags\t: avx512f")


def test_openvino_row_has_the_exported_model_and_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino/.ready").write_text("x")
    monkeypatch.setattr(converted, "openvino", lambda source, bits: source.folder / f"exported-{bits}")
    row = rows.build(["openvino-int8"], {}, setting(tmp_path))["openvino-int8"]
    assert isinstance(row, rows.Row)
    assert row.server is None
    assert row.args["folder"] == str(tmp_path / "exported-int8")
    assert row.args["properties"]["KV_CACHE_PRECISION"] == "bf16"


def test_vllm_row_of_fewer_bits_reads_a_checkpoint_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/.ready").write_text("x")
    monkeypatch.setattr(converted, "compressed", lambda source, bits, python: source.folder / f"c-{bits}")
    row = rows.build(["vllm-int4"], {}, setting(tmp_path))["vllm-int4"]
    assert isinstance(row, rows.Row)
    assert row.name == "vllm-int4"
    assert row.load_message(setting(tmp_path))["load"]["model"] == str(tmp_path / "c-int4")
    assert row.server is not None
    assert str(tmp_path / "c-int4") in row.server


def test_sizes_hold_every_workload() -> None:
    assert compare.sizes(list(WORKLOADS.values()), same_tokens=False) == (2304, 32)
    assert compare.sizes([WORKLOADS["W2"]], same_tokens=False) == (512, 1)
    assert compare.sizes([WORKLOADS["W2"]], same_tokens=True) == (768, 32)
