"""The page of requirements follows from the data and the markers of tests, and all named parts exist."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs import requirements, suites
from tests.docs.requirements import IN_CI, PAGE, ROOT, Data, Marked

LEFT_OUT = {f"F{n}" for n in (*range(36, 40), *range(49, 60))} | {f"G{n}" for n in range(16, 20)}
"""Numbers that no requirement has."""
COMMAND = "run: python -m tests.docs.requirements > docs/requirements.md"


@pytest.fixture(scope="module")
def data() -> Data:
    return requirements.read_data()


@pytest.fixture(scope="module")
def tests() -> list[Marked]:
    return requirements.marked_tests()


def numbers_of(data: Data) -> set[str]:
    return {one.id for one in (*data.requirements, *data.not_met)}


def test_the_page_is_up_to_date(data: Data, tests: list[Marked]) -> None:
    assert PAGE.read_text(encoding="utf-8") == requirements.written(data, tests), COMMAND


def test_every_number_stands_once_and_in_order(data: Data) -> None:
    """A number within an area is absent only where ``LEFT_OUT`` has the number."""
    listed = [one.id for one in data.requirements]
    assert listed == sorted(set(listed), key=lambda number: (number[0], int(number[1:])))
    for area in data.areas:
        last = max(int(number[1:]) for number in listed if number[0] == area)
        absent = {f"{area}{n}" for n in range(1, last + 1)} - LEFT_OUT - numbers_of(data)
        assert sorted(absent) == []
    assert {number[0] for number in listed} == data.areas.keys()


def test_every_requirement_has_a_test_in_ci(data: Data, tests: list[Marked]) -> None:
    checked = {number for test in tests for number in test.numbers if IN_CI & set(test.suites)}
    assert [one.id for one in data.requirements if one.id not in checked] == []


def test_every_marker_names_requirements(data: Data, tests: list[Marked]) -> None:
    unknown = [f"{test.name}: {n}" for test in tests for n in test.numbers if n not in numbers_of(data)]
    assert unknown == []
    repeated = [test.name for test in tests if len(test.numbers) > len(set(test.numbers))]
    assert repeated == []


def test_every_module_exists(data: Data) -> None:
    missing = []
    for one in data.requirements:
        assert one.modules, one.id
        for module in one.modules:
            path = ROOT / module
            if not (path.is_dir() if module.endswith("/") else path.is_file()):
                missing.append(f"{one.id}: {module}")
    assert missing == []


def test_every_file_that_a_text_names_exists(data: Data) -> None:
    texts = [f"{one.id}: {one.promise}" for one in (*data.requirements, *data.not_met)]
    texts += [f"{one.id}: {one.state}" for one in data.not_met] + [one.checked_by for one in data.unnumbered]
    named = [(path, text[:60]) for text in texts for path in re.findall(r"`([\w.-]+/[\w./-]+)`", text)]
    assert len(named) > 10
    assert [(path, text) for path, text in named if not (ROOT / path).exists()] == []


def test_every_requirement_that_prose_cites_exists(data: Data) -> None:
    unknown = []
    pages = itertools.chain(*((ROOT / folder).rglob("*.md") for folder in ("docs", "bench")))
    code = itertools.chain(*((ROOT / folder).rglob("*.py") for folder in ("weft", "tests", "bench")))
    for path in itertools.chain(pages, code):
        cited = re.findall(r"\brequirements? ([A-G]\d+)\b", path.read_text(encoding="utf-8"), re.IGNORECASE)
        unknown += [
            f"{path.relative_to(ROOT)}: {number}" for number in cited if number not in numbers_of(data)
        ]
    assert unknown == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_pytest_collects_the_same_markers_and_suites(tests: list[Marked], tmp_path: Path) -> None:
    files, found = sorted({test.name.partition("::")[0] for test in tests}), tmp_path / "marks"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-n", "0", "-m", ""]
    command += ["-p", "tests.docs.collected", "--marks-to", str(found), *files]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    collected = json.loads(found.read_text(encoding="utf-8"))
    numbers: dict[str, set[str]] = {name: set() for name in collected}
    for test in tests:
        own = [name for name in collected if f"{name}::".startswith(f"{test.name}::")]
        assert {suite for name in own for suite in collected[name]["suites"]} == set(test.suites), test.name
        for name in own:
            numbers[name].update(test.numbers)
    assert {name: set(one["numbers"]) for name, one in collected.items()} == numbers


SUITES_OF = {
    "def test_a(): ...": {"default"},
    "@pytest.mark.slow\ndef test_a(): ...": {"slow"},
    "pytestmark = [pytest.mark.gpu, pytest.mark.slow]\ndef test_a(): ...": {"gpu"},
    "@mostly_slow('x', [1, 2], [1])\ndef test_a(x): ...": {"default", "slow"},
    "@sampled(FEATURES)\ndef test_a(x): ...": {"default", "grid"},
    "@seeds((1, 3), 9, 9)\ndef test_a(seeds): ...": {"default", "slow"},
    "@seeds(6, 6, 80)\ndef test_a(seeds): ...": {"default", "grid"},
    "@pytest.mark.parametrize('x', [1, pytest.param(2, marks=pytest.mark.grid)])\ndef test_a(x): ...": {
        "default",
        "grid",
    },
    "C = [pytest.param(1, marks=pytest.mark.grid)]\n"
    "C += [pytest.param(n, marks=[] if n else [pytest.mark.slow]) for n in range(2)]\n"
    "@pytest.mark.slow\n@pytest.mark.parametrize('x', C)\ndef test_a(x): ...": {"slow", "grid"},
    "@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.slow)])\ndef x(): ...\ndef test_a(x): ...": {
        "slow"
    },
}


@pytest.mark.parametrize("text", SUITES_OF)
def test_suites_are_read_from_the_source(tmp_path: Path, text: str) -> None:
    path = tmp_path / "test_it.py"
    path.write_text(text)
    module = suites.Source(path)
    assert module.suites(module.functions["test_a"]) == SUITES_OF[text]


@pytest.fixture
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Marked]]:
    def of(text: str) -> list[Marked]:
        (tmp_path / "tests").mkdir()
        (tmp_path / "tests" / "test_it.py").write_text(text)
        return requirements.marked_tests()

    monkeypatch.setattr(requirements, "ROOT", tmp_path)
    return of


def test_markers_are_found_wherever_they_may_stand(marked: Callable[[str], list[Marked]]) -> None:
    text = """
@pytest.mark.requirement("A1", "B2")
@pytest.mark.slow
def test_a(): ...

@pytest.mark.requirement("A2")
class TestB:
    @pytest.mark.requirement("A3")
    def test_c(self): ...

TestD = pytest.mark.requirement("A4")(Machine.TestCase)
"""
    assert marked(text) == [
        Marked("tests/test_it.py::test_a", ("A1", "B2"), ("slow",)),
        Marked("tests/test_it.py::TestB", ("A2",), ("default",)),
        Marked("tests/test_it.py::TestB::test_c", ("A3",), ("default",)),
        Marked("tests/test_it.py::TestD", ("A4",), ("default",)),
    ]


@pytest.mark.requirement("A21")
def test_the_record_of_sequences_over_ranks_says_both_sides() -> None:
    (record,) = (ROOT / "docs" / "adr").glob("0015-*.md")
    text = record.read_text(encoding="utf-8")
    parts = ("**Measured**", "**What it does not buy.**", "| part |", "| step |", "| of that, collectives |")
    assert [part for part in parts if part not in text] == []
    for burst in (4, 8):
        assert re.search(rf"^\| {burst} \|.*->.*->.*->", text, re.M), burst


def test_links_in_the_docs_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_the_titles_of_the_page_are_links_that_work() -> None:
    text = PAGE.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.+)$", text, re.M)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors
    assert [title for title, times in Counter(titles).items() if times > 1] == []
