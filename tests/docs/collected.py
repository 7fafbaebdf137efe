"""A pytest plugin that writes the marks of all collected tests, to compare the marks with the source.

python -m pytest --collect-only -p tests.docs.collected --marks-to FILE
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.suites import suite_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--marks-to", type=Path, required=True, help="a JSON file")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    tests: dict[str, dict[str, Any]] = {}
    for item in session.items:
        test = tests.setdefault(item.nodeid.partition("[")[0], {"numbers": [], "suites": []})
        marks = list(item.iter_markers())
        test["numbers"] = [number for mark in marks if mark.name == "requirement" for number in mark.args]
        suite = suite_of(frozenset(mark.name for mark in marks))
        test["suites"] += [] if suite in test["suites"] else [suite]
    session.config.getoption("marks_to").write_text(json.dumps(tests), encoding="utf-8")
