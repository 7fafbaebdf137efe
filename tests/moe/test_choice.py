"""The form of a step: by measured cost, equal on all ranks, and never an impossible form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.moe import exchange_cost
from weft.moe.exchange_cost import KINDS, ExchangeShape, MeasuredExchange, exchanges, seconds
from weft.moe.expert_choice import MOST_PADDED, Chooser
from weft.types.exchange import UNAGREED, Exchange
from weft.types.layout import Layout

ALONE, WIDE = Layout(tensor=4, expert=True), Layout(tensor=2, data=2, expert=True)
SHAPE = ExchangeShape(1024, 8, 2)


def measured(latency: float, per_byte: float) -> MeasuredExchange:
    times = {kind: {0: latency, 1_000_000: latency + 1e6 * per_byte} for kind in KINDS}
    return MeasuredExchange("gloo", "a machine", 4, times)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path))
    exchange_cost.table.cache_clear()

    def write(*rows: MeasuredExchange) -> None:
        exchange_cost.MEASUREMENTS.user_file().write_text(
            json.dumps(exchange_cost.MEASUREMENTS.as_json(rows))
        )
        exchange_cost.table.cache_clear()

    yield write
    exchange_cost.table.cache_clear()


def test_the_packaged_table_is_there(table) -> None:  # type: ignore[no-untyped-def]
    assert {row.ranks for row in exchange_cost.table()} >= {2, 4}
    assert all(row.machine for row in exchange_cost.table())


@pytest.mark.requirement("A12")
def test_latency_decides_for_few_tokens_and_bytes_for_many(table) -> None:  # type: ignore[no-untyped-def]
    table(measured(100.0, 0.001))
    assert Chooser(ALONE, "auto", SHAPE).form(1) == "reduce"
    wide = Chooser(WIDE, "auto", ExchangeShape(1024, 1, 2))
    assert wide.form(1) in ("gather", "low-latency")
    assert wide.form(512) == "throughput"
    assert all(wide.form(tokens) != "reduce" for tokens in (1, 8, 64, 4096))


@pytest.mark.requirement("A12")
def test_dear_sums_are_left_alone(table) -> None:  # type: ignore[no-untyped-def]
    """The choice is data: other measurements, other forms."""
    row = measured(100.0, 0.001)
    table(row._replace(times={**row.times, "all_reduce": {0: 1e6, 1: 1e6}}))
    assert Chooser(ALONE, "auto", SHAPE).form(1) != "reduce"


@pytest.mark.requirement("C7")
def test_padding_ends_where_it_costs_more_than_it_saves() -> None:
    """C7: too many rows for fixed sizes fall back; none is dropped."""
    chooser = Chooser(WIDE, "low-latency", SHAPE)
    assert chooser.choose(5, Exchange(rows=MOST_PADDED)) == ("low-latency", MOST_PADDED // 2)
    assert chooser.choose(5, Exchange(rows=MOST_PADDED + 1)) == ("throughput", MOST_PADDED // 2 + 1)


def test_nothing_is_padded_that_nobody_agreed_on() -> None:
    assert Chooser(WIDE, "low-latency", SHAPE).choose(5, UNAGREED) == ("throughput", None)
    assert Chooser(WIDE, "auto", SHAPE).choose(5, UNAGREED) == ("throughput", None)
    assert Chooser(WIDE, "gather", SHAPE).choose(5, UNAGREED) == ("gather", None)
    assert Chooser(ALONE, "low-latency", SHAPE).choose(5, UNAGREED) == ("low-latency", 2)


def test_replicas_choose_alike_whatever_rows_they_have() -> None:
    chooser = Chooser(WIDE, "auto", SHAPE)
    assert len({chooser.choose(rows, Exchange(rows=64)) for rows in range(65)}) == 1


def test_costs_grow_with_tokens_and_without_a_table() -> None:
    for layout in (ALONE, WIDE):
        for form in ("gather", "low-latency", "throughput"):
            row = measured(10.0, 0.01)
            assert seconds(form, 2, SHAPE, layout, row) < seconds(form, 200, SHAPE, layout, row)
            assert all(size > 0 for _, size in exchanges(form, 3, SHAPE._replace(exact=True), layout))


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"version": 2, "measured": []}', "{", '{"version": 1, "measured": [1]}']
)
def test_files_that_are_no_table_are_left_out(text: str, table) -> None:  # type: ignore[no-untyped-def]
    exchange_cost.MEASUREMENTS.user_file().write_text(text)
    exchange_cost.table.cache_clear()
    assert {row.ranks for row in exchange_cost.table()} >= {2, 4}


def test_small_steps_of_gpus_have_forms_that_graphs_can_hold() -> None:
    """A form by name is kept."""
    assert all(Chooser(WIDE, "auto", SHAPE, True).form(count) != "throughput" for count in (1, 8, 64))
    assert Chooser(WIDE, "throughput", SHAPE, True).form(1) == "throughput"
