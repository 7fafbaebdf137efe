"""``weft bench dispatch`` measures, writes the table of ``--moe-dispatch auto``, and reports the file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.bench import dispatch_bench as run
from weft.cli.bench.bench import bench
from weft.moe import exchange_cost
from weft.types.layout import Layout


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path / "cache"))
    exchange_cost.table.cache_clear()
    yield
    exchange_cost.table.cache_clear()


@pytest.mark.requirement("A12")
@pytest.mark.slow
def test_measurements_are_used() -> None:
    made = CliRunner().invoke(bench, ["dispatch", "--ranks", "2"], standalone_mode=False)
    assert made.exit_code == 0, made.exception
    assert "2 ranks, all_to_all" in made.output
    assert str(exchange_cost.MEASUREMENTS.user_file()) in made.output
    (row,) = exchange_cost.table()
    assert row.link in ("gloo", "shared memory")
    assert row.ranks == 2
    assert set(row.times) == set(exchange_cost.KINDS)
    assert all(tuple(by) == run.BYTES for by in row.times.values())


def test_other_numbers_of_ranks_stay_in_the_table() -> None:
    times = {kind: {1024: 1.0} for kind in exchange_cost.KINDS}
    exchange_cost.MEASUREMENTS.save([exchange_cost.MeasuredExchange("gloo", "a machine", 4, times)])
    exchange_cost.MEASUREMENTS.save([exchange_cost.MeasuredExchange("gloo", "a machine", 2, times)])
    assert {row.ranks for row in exchange_cost.table()} == {2, 4}


@pytest.mark.grid
def test_a_layer_is_measured_in_every_form() -> None:
    (found,) = run.layers(Layout(tensor=2, expert=True), (8, 2, 32, 16), (3,), calls=1)
    assert set(found) == {"reduce", "gather", "low-latency", "throughput"}
    assert min(found.values()) > 0
