"""The page that summarizes comparisons: pairs, valid results, and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import summary

W1_SECONDS = 4.0


def engine(factor: float, *, weft: bool = False, flags: str = "", **more: Any) -> dict[str, Any]:
    """Return an engine that takes ``factor`` times as long as the fastest."""
    samples = {"W1": [W1_SECONDS * factor, 8.0 * factor], "W2": [1.0 * factor, 1.0 * factor]}
    return {"weft": weft, "flags": flags, "samples": samples, **more}


def result(name: str, date: str, engines: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "date": date,
        "model": "m",
        "rounds": 2,
        "threads": 2,
        "workloads": {"W1": "", "W2": "", "W3": "", "W4": ""},
        "missing": {},
        "engines": engines,
        "machine": {"cpu": {"model": "Fast", "family": "1", "model_number": "2"}},
        **more,
    }


WEFT = engine(1.0, weft=True)
INT8 = engine(1.0, weft=True, flags="--quantization int8")


def found(one: dict[str, Any]) -> dict[tuple[str, str, str], float]:
    return {(pair.bits, pair.peer, pair.workload): pair.ratio.median for pair in summary.pairs(one)}


def test_equal_bits_are_compared_and_every_ratio_points_the_same_way() -> None:
    engines = {
        "weft": WEFT,
        "weft-int8": INT8,
        "vllm": engine(2.0),
        "llamacpp-int8": engine(0.5),
        "transformers-continuous": engine(4.0),
        "openvino-int4": engine(1.0),
    }
    assert found(result("a", "1", engines)) == {
        ("16 bits", "vllm", "W1"): 2.0,
        ("16 bits", "vllm", "W2"): 2.0,
        ("16 bits", "transformers-continuous", "W1"): 4.0,
        ("16 bits", "transformers-continuous", "W2"): 4.0,
        ("int8", "llamacpp", "W1"): 0.5,
        ("int8", "llamacpp", "W2"): 0.5,
    }


def test_rows_of_8_bits_stand_beside_peers_with_8_bits() -> None:
    rounded = engine(0.5, weft=True, flags="--quantization w8a8")
    one = result("a", "1", {"weft-int8": INT8, "weft-w8a8": rounded, "vllm-int8": engine(1.0)})
    assert {key: ratio for key, ratio in found(one).items() if key[2] == "W1"} == {
        ("int8", "vllm", "W1"): 1.0,
        ("w8a8", "vllm", "W1"): 2.0,
    }
    four = result(
        "b", "1", {"weft-w4a8": {**rounded, "flags": "--quantization w4a8"}, "vllm-int4": engine(1.0)}
    )
    lines = summary.headline(summary.newest([one, four]))
    assert [line.split(":")[0] for line in lines] == ["* int8", "* w8a8", "* w4a8"]


def test_a_weft_row_that_does_more_than_its_name_says_is_left_out() -> None:
    other = engine(1.0, weft=True, flags="--speculative-method ngram")
    assert found(result("a", "1", {"weft": other, "vllm": engine(2.0)})) == {}


def test_the_newest_result_of_a_pair_counts() -> None:
    old = result("old", "2026-01-01", {"weft": WEFT, "vllm": engine(2.0), "llamacpp": engine(3.0)})
    new = result("new", "2026-02-01", {"weft": WEFT, "vllm": engine(5.0)})
    kept = {(pair.peer, pair.workload): pair for pair in summary.newest([new, old])}
    assert kept["vllm", "W1"].ratio.median == 5.0
    assert kept["vllm", "W1"].source == "new"
    assert kept["llamacpp", "W1"].source == "old"


def test_the_headline_takes_the_fastest_peer_of_each_workload() -> None:
    one = result("a", "1", {"weft": WEFT, "vllm": engine(2.0), "llamacpp": engine(0.5)})
    (line,) = summary.headline(summary.newest([one]))
    assert "16 bits" in line
    assert "0.50 times better" in line
    assert "ahead in 0 of 2; least 0.50 (m, W1, llamacpp)" in line


def test_what_a_peer_cannot_is_said_until_a_newer_result_has_it() -> None:
    broken = {"weft": WEFT, "vllm": {"weft": False, "samples": {}, "error": "vllm: loading: no\nmore"}}
    old = result("old", "1", broken, missing={"llamacpp": "its converter refused"})
    assert summary.absent([old]) == ["* m, llamacpp: its converter refused", "* m, vllm: vllm: loading: no"]
    new = result("new", "2", {"weft": WEFT, "vllm": engine(1.0), "llamacpp": engine(1.0)})
    assert summary.absent([new, old]) == []


def test_the_page_and_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    one = result("m-here", "2026-01-01", {"weft": WEFT, "vllm": engine(2.0), "llamacpp": engine(0.5)})
    (tmp_path / "m-here.json").write_text(json.dumps(one))
    (tmp_path / "gemm-here.json").write_text('{"bench": "gemm"}')
    monkeypatch.setattr("sys.argv", ["summary", "--machine", "here", "--results", str(tmp_path)])
    summary.main()
    page = (tmp_path / "summary-here.md").read_text()
    assert "| m | 16 bits | vllm | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | - | - |" in page
    assert "(summary-here.svg)" in page
    assert "* [m-here](m-here.md): 2026-01-01, 2 rounds" in page
    picture = (tmp_path / "summary-here.svg").read_text()
    assert "llamacpp" in picture
    summary.main()
    assert (tmp_path / "summary-here.svg").read_text() == picture


def test_without_a_comparison_it_says_what_it_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["summary", "--machine", "here", "--results", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"\*-here\.json"):
        summary.main()
