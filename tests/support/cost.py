"""Print the CPU seconds of tests by folder and file: ``python -m pytest -n 0 -p tests.support.cost ...``.

CPU seconds cover this process and its reaped children, so the seconds of a module's server count in the test
that ended the server. Other load raises the figures: compare runs of the same hour.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator

import pytest

LISTED = 40
"""Number of printed files, the most expensive first."""
_files: dict[str, float] = defaultdict(float)
_collection = 0.0


def _cpu() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    global _collection
    try:
        return (yield)
    finally:
        _collection = _cpu()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    before = _cpu()
    try:
        return (yield)
    finally:
        _files[item.nodeid.partition("::")[0]] += _cpu() - before


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: dict[str, float] = defaultdict(float)
    for file, seconds in _files.items():
        folders["/".join(file.split("/")[:2])] += seconds
    tests = sum(_files.values())
    terminalreporter.section("CPU seconds")
    terminalreporter.line(f"{tests:8.1f} of tests, {_collection:.1f} before them, to import and to collect")
    for title, costs, most in (("folders", folders, len(folders)), ("files", _files, LISTED)):
        terminalreporter.line(title)
        for name, seconds in sorted(costs.items(), key=lambda entry: -entry[1])[:most]:
            terminalreporter.line(f"{seconds:8.1f} {name}")
