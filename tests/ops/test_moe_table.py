"""The table of measurements that chooses the form of a routed block in torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.routed import routed, tokens
from weft.ops import moe, moe_table
from weft.ops.moe_table import Measured, Size

SMALL, LARGE = Size(8, 2, 64, 32), Size(64, 8, 1024, 512)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Use an empty folder for the machine's table."""
    monkeypatch.setenv("WEFT_OPS_CACHE", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    moe_table.tables.cache_clear()
    moe_table.choose.cache_clear()


def measured(size: Size, times: dict[int, dict[str, float]], dtype: str = "float16") -> Measured:
    return Measured("cpu", "a machine", dtype, size, times)


def write(*rows: Measured) -> None:
    moe_table.MEASUREMENTS.user_file().write_text(json.dumps(moe_table.MEASUREMENTS.as_json(rows)))
    forget()


def test_the_packaged_table_is_whole() -> None:
    rows = moe_table.MEASUREMENTS.read(Path(moe_table.__file__).with_name("moe_table.json"))
    assert {row.device for row in rows} >= {"cpu"}
    assert {row.dtype for row in rows if row.device == "cpu"} >= {"bfloat16", "float32", "float64"}
    for row in rows:
        assert row.machine
        assert len(row.times) >= 5
        assert all(set(by) <= set(moe_table.FORMS) and "loop" in by for by in row.times.values())


@pytest.mark.requirement("A12")
def test_the_nearest_block_and_number_of_tokens_decide() -> None:
    write(
        measured(SMALL, {1: {"loop": 9.0, "gather": 1.0}, 64: {"loop": 1.0, "gather": 9.0}}),
        measured(LARGE, {1: {"loop": 1.0, "gather": 9.0}}),
    )

    def chosen(tokens: int, size: Size, usable: tuple[str, ...] = ("loop", "gather"), **more: Any) -> str:
        return moe_table.choose(more.get("device", "cpu"), "float16", tokens, size, usable)

    assert [chosen(t, SMALL) for t in (0, 1, 7, 9, 64, 4096)] == ["gather"] * 3 + ["loop"] * 3
    assert chosen(1, Size(16, 2, 64, 32)) == "gather"
    assert chosen(1, Size(128, 8, 1024, 512)) == "loop"
    # An unmeasured or unusable form is not chosen.
    assert chosen(1, SMALL, ("loop",)) == "loop"
    assert chosen(1, SMALL, ("grouped", "loop", "gather")) == "gather"
    # Nothing measured for such a device.
    assert chosen(1, SMALL, ("grouped", "loop"), device="cuda") == "grouped"


def test_this_machines_table_goes_before_the_packages() -> None:
    packaged = moe_table.tables()
    assert len(packaged) == 1
    row = packaged[0][0]
    for form in ("gather", "loop"):
        slow = dict.fromkeys(("gather", "loop", "grouped"), 9.0)
        write(measured(row.size, {1: {**slow, form: 1.0}}, row.dtype))
        assert moe_table.choose("cpu", row.dtype, 1, row.size, ("gather", "loop", "grouped")) == form


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '{"version": 9, "measured": []}', '{"version": 1, "measured": [{"device": "cpu"}]}'],
)
def test_a_damaged_table_is_left_out(text: str, caplog: pytest.LogCaptureFixture) -> None:
    moe_table.MEASUREMENTS.user_file().write_text(text)
    forget()
    assert len(moe_table.tables()) == 1
    assert "measurements of routed blocks are ignored" in caplog.text


def test_what_is_written_is_what_is_read() -> None:
    rows = (measured(SMALL, {1: {"loop": 9.5}, 64: {"loop": 1.25, "grouped": 9.0}}),)
    write(*rows)
    assert moe_table.MEASUREMENTS.read(moe_table.MEASUREMENTS.user_file()) == rows


@pytest.mark.requirement("A12")
def test_a_block_is_computed_in_the_form_that_the_table_has(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = routed("gated_shared", torch.float16)
    x, ids = tokens(3, torch.float16)
    used: list[str] = []

    def spy(form: str) -> Any:
        run = moe.FORMS[form]

        def spied(*given: Any) -> Any:
            used.append(form)
            return run(*given)

        return spied

    monkeypatch.setattr(moe, "FORMS", {form: spy(form) for form in moe.FORMS})
    for form in ("loop", "gather"):
        slow = dict.fromkeys(("gather", "loop"), 9.0)
        write(measured(moe.size_of(weights), {1: {**slow, form: 1.0}}))
        moe.moe(x, ids, weights)
    assert used == ["loop", "gather"]


def test_which_forms_can_be_used() -> None:
    assert moe.usable(routed("plain", torch.float32)) == ("loop", "gather")
    assert "grouped" in moe.usable(routed("plain", torch.bfloat16))
    assert "grouped" not in moe.usable(routed("plain", torch.bfloat16, inner=33))
