"""The arithmetic and the page of a comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench import machine, record, rounds, tables
from weft.bench.workloads import WORKLOADS


def result() -> dict[str, Any]:
    served = {
        "seconds": 1.0,
        "output_token_throughput": 400.0,
        "latency_ms": {"ttft": {"p50": 10.0, "p99": 20.0}, "tpot": {"p50": 5.0, "p99": 6.0}},
    }
    return {
        "name": "t",
        "model": "m",
        "dtype": "bfloat16",
        "threads": 2,
        "date": "today",
        "commit": "",
        "command": "python -m bench.compare",
        "machine": {
            "cpu": machine.cpu("model name\t: Fast\nflags\t\t: avx2 avx512f\n"),
            "cores": 2,
            "memory_bytes": 8 << 30,
            "system": "Linux",
            "load_average": [0.5, 0.4, 0.3],
        },
        "load_average_after": [2.0, 1.0, 1.0],
        "rounds": 2,
        "order": "interleaved",
        "workloads": {name: one.about for name, one in WORKLOADS.items()},
        "missing": {"llamacpp": "not set up"},
        "engines": {
            "weft": {
                "weft": True,
                "samples": {"W1": [4.0, 8.0], "W2": [1.0, 2.0], "W3": [2.0, 2.0]},
                "peak_rss": 1.5e9,
                "load_s": 3.0,
                "differing_requests": {"two_runs": [0, 32], "batch_against_single": [0, 16]},
                "server": {"samples": [served, served], "start_s": 4.0, "peak_memory": 2e9},
            },
            "peer": {
                "weft": False,
                "version": "1.0",
                "samples": {"W1": [8.0, 16.0], "W2": [2.0, 4.0]},
                "error": "round 1: W3: the driver ended\nlast line",
            },
        },
    }


def test_measures() -> None:
    assert rounds.value_of(WORKLOADS["W1"], 4.0) == 32 * 128 / 4
    assert rounds.value_of(WORKLOADS["W2"], 2.56) == pytest.approx(10.0)
    assert rounds.value_of(WORKLOADS["W3"], 2.0) == 8 * 2048 / 2


def test_ratios_are_taken_round_by_round() -> None:
    # A slow second round was slow for both: the ratio has no spread.
    assert tables.ratios([1024.0, 512.0], [512.0, 256.0], True) == tables.Spread(2.0, 2.0, 2.0, 2)
    assert tables.ratios([5.0, 10.0], [10.0, 20.0], False) == tables.Spread(2.0, 2.0, 2.0, 2)
    assert tables.ratios([1.0], [], True) is None


def test_page_has_every_table_and_every_trouble() -> None:
    text = tables.page(result())
    assert (
        "| weft | 768 (512 to 1,024) | 5.86 (3.91 to 7.81) | 8,192 (8,192 to 8,192) | 1.50 | 3.00 |" in text
    )
    assert "| weft / peer | 2.00 (2.00 to 2.00) | 2.00 (2.00 to 2.00) | - | - |" in text
    assert "| weft | 400 (400 to 400) | 10.0" in text
    assert "| weft | 0 of 32 | 0 of 16 |" in text
    assert "* llamacpp is missing: not set up" in text
    assert "* peer failed: round 1: W3: the driver ended\n" in text
    assert "Has avx2, avx512f; lacks avx512_vnni" in text


def test_every_round_begins_with_another_engine() -> None:
    assert [rounds.turns(["a", "b", "c"], n)[0] for n in range(4)] == ["a", "b", "c", "a"]
    assert rounds.turns([], 3) == []


def test_differing_counts_requests() -> None:
    assert rounds.differing([[1, 2], [3]], [[1, 2], [4]]) == 1


def test_a_result_names_no_folder_of_the_machine() -> None:
    said = f"{Path.home()}/.cache/x.py failed, as did {record.ROOT}/bench/y.py"
    assert record.of_any_machine(said) == "~/.cache/x.py failed, as did bench/y.py"


def test_machine_of_this_test() -> None:
    found = machine.describe()
    assert found["memory_bytes"] > 0
    assert found["cores"] > 0
    assert machine.memory_bytes("MemTotal:       1024 kB\n") == 1 << 20
