"""``weft bench machine`` reports the facts of the machine and what products reach of its limits."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from weft.bench import machine_bench
from weft.cli.bench.bench import bench
from weft.ops import cpu


def test_facts_come_from_the_system_files(tmp_path: Path) -> None:
    for name, text in {
        "devices/system/node/node0/cpulist": "0-7\n",
        "devices/system/node/node1/cpulist": "8-15\n",
        "devices/cpu_core/cpus": "0-7\n",
        "devices/cpu_atom/cpus": "8-15\n",
        "kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = machine_bench.facts(tmp_path)
    assert found["numa_nodes"] == {"node0": "0-7", "node1": "8-15"}
    assert found["core_kinds"] == {"cpu_core": "0-7", "cpu_atom": "8-15"}
    assert found["huge_pages"] == "madvise"
    assert machine_bench.facts(tmp_path / "none")["numa_nodes"] == {}


def test_products_of_every_format_are_measured() -> None:
    report = machine_bench.measure(turns=1, outputs=64, megabytes=1)
    assert all(value > 0 for value in report["limits"].values())
    lines = machine_bench.summary(report)
    if not cpu.load():
        assert report["products"] == []
        assert "weft build-ops" in lines[-1]
        return
    measured = [(one["format"], one["rows"]) for one in report["products"]]
    assert measured == [(name, rows) for name in machine_bench.FORMATS for rows in machine_bench.ROWS]
    assert all(one["weight_gb_s"] > 0 and one["gflop_s"] > 0 for one in report["products"])
    assert len(lines) == 4 + len(measured)


def test_the_command_prints_and_writes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(machine_bench.measure, turns=1, outputs=64, megabytes=1)
    monkeypatch.setattr(machine_bench, "measure", small)
    file, before = tmp_path / "machine.json", torch.get_num_threads()
    try:
        made = CliRunner().invoke(bench, ["machine", "--threads", "1", "--json", str(file)])
    finally:
        torch.set_num_threads(before)
    assert made.exit_code == 0, made.output
    report = json.loads(file.read_text())
    assert report["threads"] == 1
    assert made.stdout.splitlines() == machine_bench.summary(report)
