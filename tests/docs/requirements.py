"""Write docs/requirements.md from docs/requirements.yaml and from the markers of the tests.

    python -m tests.docs.requirements > docs/requirements.md

A test names the requirements that the test checks: ``@pytest.mark.requirement("B7", "D3")`` on a function,
on a class, or around the test case of a rule-based machine. Markers are read from the source: nothing is
imported, and pytest does not run.
"""

from __future__ import annotations

import ast
import gc
import itertools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import yaml

from tests.docs.suites import DEFAULT, ROOT, SLOW, SUITES, Function, Source, source

DATA = ROOT / "docs" / "requirements.yaml"
PAGE = ROOT / "docs" / "requirements.md"
IN_CI = {DEFAULT, SLOW}
"""The suites that ``.ci/run`` runs."""

INTRODUCTION = """\
# Requirements

This page lists the promises of Weft. Each promise has a number, the modules that keep the promise, and
the tests that notice when the promise is broken. [The last sections](#not-met-or-not-shown) list the
promises that Weft does not keep, and checked properties without a number.
[composition.md](composition.md) shows which features were seen to work together. The levels E0, E1 and
E2 of [determinism.md](determinism.md) are not numbers of this page.

A command writes this page: do not edit the page.

* Edit a promise or its modules in [requirements.yaml](requirements.yaml).
* Mark a test with `@pytest.mark.requirement("B7")`.
* Then run `python -m tests.docs.requirements > docs/requirements.md`.

The first column of a requirement's table has the suites that run at least one case of a test. CI runs
the default suite and the slow suite. [tests.md](tests.md) describes the suites.

| suite | command | in CI |
|---|---|---|
| default | `make test` | yes |
| slow | `make test-slow` | yes |
| grid | `make test-grid` | no |
| clients, agents | `make test-clients` | no |
| gpu | `make test-gpu` | no |
"""


class Requirement(NamedTuple):
    id: str
    promise: str
    modules: list[str]


class NotMet(NamedTuple):
    id: str
    promise: str
    state: str


class Unnumbered(NamedTuple):
    property: str
    checked_by: str


class Data(NamedTuple):
    """The content of requirements.yaml."""

    areas: dict[str, str]
    requirements: list[Requirement]
    not_met: list[NotMet]
    unnumbered: list[Unnumbered]


class Marked(NamedTuple):
    """A test with a marker."""

    name: str
    """As pytest names the test, without parameters."""
    numbers: tuple[str, ...]
    suites: tuple[str, ...]
    """In the order of ``SUITES``."""


def read_data(path: Path = DATA) -> Data:
    """Return the content of requirements.yaml. An unknown or missing key is a TypeError."""
    content = yaml.load(path.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return Data(
        content["areas"],
        [Requirement(**one) for one in content["requirements"]],
        [NotMet(**one) for one in content["not_met"]],
        [Unnumbered(**one) for one in content["unnumbered"]],
    )


def marked_tests() -> list[Marked]:
    """Return all tests with a marker, in the order of files and lines."""
    found: list[Marked] = []
    collecting = gc.isenabled()
    gc.disable()  # a million nodes of syntax trees, which all stay
    try:
        for path in sorted((ROOT / "tests").rglob("test_*.py")):
            if "mark.requirement(" in path.read_text(encoding="utf-8"):
                module = source(path)
                found += _marked(module, module.tree.body, str(path.relative_to(ROOT)), [])
    finally:
        if collecting:
            gc.enable()
    return found


def _marked(module: Source, body: list[ast.stmt], name: str, outer: list[ast.ClassDef]) -> Iterator[Marked]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            own = [one for one in node.body if isinstance(one, Function) and one.name.startswith("test")]
            suites = [module.suites(one, [*outer, node]) for one in own]
            yield from _if_marked(f"{name}::{node.name}", node.decorator_list, set().union(*suites))
            yield from _marked(module, node.body, f"{name}::{node.name}", [*outer, node])
        elif isinstance(node, Function) and node.name.startswith("test"):
            yield from _if_marked(f"{name}::{node.name}", node.decorator_list, module.suites(node, outer))
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            test_case = f"{name}::{ast.unparse(node.targets[0])}"
            yield from _if_marked(test_case, [node.value.func], module.suites(None, outer))


def _if_marked(name: str, decorators: list[ast.expr], suites: set[str]) -> Iterator[Marked]:
    numbers = [number for decorator in decorators for number in _numbers(decorator)]
    if numbers:
        yield Marked(name, tuple(numbers), tuple(sorted(suites, key=SUITES.index)))


def _numbers(decorator: ast.expr) -> Iterator[str]:
    match decorator:
        case ast.Call(func=ast.Attribute(attr="requirement"), args=arguments):
            for argument in arguments:
                yield ast.literal_eval(argument)


def written(data: Data, tests: list[Marked]) -> str:
    """Return the page."""
    by_number: dict[str, list[Marked]] = {}
    for test in tests:
        for number in test.numbers:
            by_number.setdefault(number, []).append(test)
    parts = [INTRODUCTION, _areas(data)]
    for area, requirements in itertools.groupby(data.requirements, key=lambda one: one.id[0]):
        parts.append(f"## {area}: {data.areas[area]}\n")
        parts += [_section(one, by_number.get(one.id, [])) for one in requirements]
    numbers = {one.id for one in data.requirements}
    rows = [
        [one.id, one.promise, one.state + _checked_by([] if one.id in numbers else by_number.get(one.id, []))]
        for one in data.not_met
    ]
    parts += ["## Not met, or not shown\n", _table(["id", "promise", "state"], rows)]
    others = [[one.property, one.checked_by] for one in data.unnumbered]
    parts += ["## Checked properties without a number\n", _table(["property", "checked by"], others)]
    return "\n".join(parts)


def _areas(data: Data) -> str:
    rows = []
    for area, title in data.areas.items():
        anchor = re.sub(r"[^\w -]", "", f"{area}: {title}".lower()).replace(" ", "-")
        count = sum(one.id.startswith(area) for one in data.requirements)
        rows.append([area, f"[{title}](#{anchor})", str(count)])
    return _table(["area", "subject", "requirements"], rows)


def _section(requirement: Requirement, tests: list[Marked]) -> str:
    modules = ", ".join(f"`{module}`" for module in requirement.modules)
    rows = sorted(([SUITES.index(one) for one in test.suites], test.name) for test in tests)
    lines = [[", ".join(SUITES[one] for one in suites), f"`{name}`"] for suites, name in rows]
    text = textwrap.fill(requirement.promise, 100, break_long_words=False, break_on_hyphens=False)
    return f"### {requirement.id}\n\n{text}\n\n{_table(['modules', modules], lines)}"


def _checked_by(tests: list[Marked]) -> str:
    return " Test: " + ", ".join(f"`{test.name}`" for test in tests) + "." if tests else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    first, *others = ("| " + " | ".join(cells) + " |\n" for cells in (head, *rows))
    return first + "|" + "---|" * len(head) + "\n" + "".join(others)


if __name__ == "__main__":
    sys.stdout.write(written(read_data(), marked_tests()))
