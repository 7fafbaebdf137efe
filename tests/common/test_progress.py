"""Progress in lines of the log, where bars of several processes would write over each other."""

from __future__ import annotations

import logging

import pytest

from weft.common import progress
from weft.common.progress import progress_bar


@pytest.fixture(autouse=True)
def _lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_shown_in", None)
    progress.use_lines()


def lines(caplog: pytest.LogCaptureFixture, *, shown: bool = True) -> list[str]:
    caplog.clear()
    with (
        caplog.at_level(logging.INFO, progress.log.name),
        progress_bar(total=4, title="Loading weights", unit="tensor", shown=shown) as bar,
    ):
        for _ in range(4):
            bar.update()
    return [record.getMessage() for record in caplog.records]


def test_lines_tell_how_far_it_is(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINES_S", 0.0)
    found = lines(caplog)
    assert any(line.startswith("Loading weights: 50 % (2 of 4 tensors, ") for line in found), found
    assert not any("\r" in line or "\n" in line for line in found)
    assert lines(caplog, shown=False) == []
    assert "\r" not in capfd.readouterr().err  # lines of the log at most, where another test sends them there


def test_what_is_quick_has_no_line(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(caplog) == []
