"""``weft bench moe-table`` measures, writes the table for later runs, and reports the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from weft.bench import moe_table as run
from weft.cli.bench.bench import bench
from weft.ops import moe_table as table
from weft.ops.moe_table import Measured, Size

TINY = Size(4, 2, 16, 8)


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "SIZES", {"cpu": (TINY,)})
    monkeypatch.setattr(run, "TOKENS", (1, 64))
    monkeypatch.setattr(run, "SECONDS", 0.0)
    threads = torch.get_num_threads()
    table.tables.cache_clear()
    yield
    table.tables.cache_clear()
    torch.set_num_threads(threads)


def test_measurements_are_used(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    made = CliRunner().invoke(
        bench,
        ["moe-table", "--device", "cpu", "--threads", "1", "--json", str(report)],
        standalone_mode=False,
    )
    assert made.exit_code == 0, made.exception
    assert "4 x 8 of 16, top 2" in made.output
    assert str(table.MEASUREMENTS.user_file()) in made.output
    rows = table.MEASUREMENTS.read(table.MEASUREMENTS.user_file())
    assert [(row.device, row.dtype, row.size) for row in rows] == [
        ("cpu", dtype, TINY) for dtype in ("bfloat16", "float32", "float64")
    ]
    assert set(rows[0].times[1]) == {"loop", "gather", "grouped"}
    assert set(rows[1].times[1]) == {"loop", "gather"}
    assert set(rows[1].times[64]) == {"loop"}, "so many copies are larger than all weights"
    assert "1 threads" in rows[0].machine
    assert json.loads(report.read_text()) == json.loads(table.MEASUREMENTS.user_file().read_text())
    assert table.tables()[0] == rows


def test_other_devices_stay_in_the_table() -> None:
    other = Measured("cuda", "a GPU", "bfloat16", TINY, {1: {"triton": 1.0}})
    table.MEASUREMENTS.save([other])
    mine = Measured("cpu", "a CPU", "bfloat16", TINY, {1: {"loop": 1.0}})
    table.MEASUREMENTS.save([mine])
    assert table.MEASUREMENTS.read(table.MEASUREMENTS.user_file()) == (other, mine)
    table.MEASUREMENTS.save([other])
    assert table.MEASUREMENTS.read(table.MEASUREMENTS.user_file()) == (mine, other)
    assert [path.name for path in table.MEASUREMENTS.user_file().parent.iterdir()] == ["moe_table.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    made = CliRunner().invoke(bench, ["moe-table", "--device", "cuda"], standalone_mode=False)
    assert "no CUDA device" in str(made.exception)
