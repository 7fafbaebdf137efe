"""The table of requirements names tests that exist, and leaves none of its requirements out."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "requirements.md"
BUILT = (
    [f"A{i}" for i in range(1, 20)]
    + [f"B{i}" for i in range(1, 22)]
    + [f"C{i}" for i in range(1, 15)]
    + [f"D{i}" for i in range(1, 32)]
    + [f"E{i}" for i in range(1, 36)]
    + [f"F{i}" for i in (*range(1, 36), *range(40, 49), *range(60, 68))]
    + [f"G{i}" for i in (*range(1, 16), 20, 21)]
)  # fmt: skip


def rows() -> dict[str, tuple[str, str]]:
    """id -> (where, tests), both as written."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and re.fullmatch(r"[A-G]\d+", cells[1]):
            assert cells[1] not in found, f"{cells[1]} stands twice"
            found[cells[1]] = (cells[3], cells[4])
    return found


def unmet() -> set[str]:
    """What the second table says is not met, or not shown."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return {line.split("|")[1].strip() for line in lines if re.match(r"\| [A-G]\d+ \|", line)} - rows().keys()


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_requirement_built_so_far_is_listed() -> None:
    assert sorted([*rows(), *unmet()]) == sorted(BUILT)


def test_every_named_test_exists() -> None:
    missing = []
    for number, (_, tests) in rows().items():
        names = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", tests)
        assert names, f"{number} names no test"
        for file, function in names:
            path = ROOT / file
            if not path.is_file() or function not in functions_of(path):
                missing.append(f"{number}: {file}::{function}")
    assert missing == []


def test_every_named_place_exists() -> None:
    missing = []
    for number, (where, _) in rows().items():
        for place in re.findall(r"`([\w/.]+)`", where):
            if not (ROOT / "weft" / place).exists():
                missing.append(f"{number}: weft/{place}")
    assert missing == []


def test_links_in_the_docs_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "training").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []
