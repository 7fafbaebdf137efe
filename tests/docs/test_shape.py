"""The shape of the code: sizes, reads of the environment, and test files with tests."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from weft.common import env

ROOT = Path(__file__).parents[2]
MOST_MODULES, MAX_MODULE, MAX_FUNCTION = 400, 800, 60
"""Lines: of 95 of 100 modules, of every module, and of every function."""
MOST_IN_A_FOLDER = 26
A_TEST = re.compile(r"^ *(?:async )?def test_|^Test\w* = ", re.MULTILINE)


class Module(NamedTuple):
    path: Path
    text: str
    tree: ast.Module
    nodes: list[ast.AST]
    """Nodes of the types that the tests need."""


ASKED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Attribute, ast.Call, ast.ImportFrom)


def texts(folder: str) -> Iterator[tuple[Path, str]]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def modules() -> Iterator[Callable[..., Iterator[Module]]]:
    """Yield a function that parses the modules of folders once.

    A million nodes make garbage collection slow, so the collector is off until the last test.
    """
    known: dict[str, list[Module]] = {}

    def of(*folders: str) -> Iterator[Module]:
        for folder in folders:
            if folder not in known:
                known[folder] = [_parsed(*one) for one in texts(folder)]
            yield from known[folder]

    gc.disable()
    try:
        yield of
    finally:
        known.clear()
        gc.enable()


def _parsed(path: Path, text: str) -> Module:
    tree = ast.parse(text)
    return Module(path, text, tree, [node for node in ast.walk(tree) if isinstance(node, ASKED)])


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(one) for one in function.decorator_list)


def test_modules_and_functions_stay_small(modules: Any) -> None:
    large, lengths = [], []
    for path, text, _, nodes in modules("weft", "testing", "training", "bench"):
        lengths.append(text.count("\n"))
        if text.count("\n") > MAX_MODULE:
            large.append(f"{path}: {text.count(chr(10))} lines")
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno
                if lines > MAX_FUNCTION and not _is_kernel(node):
                    large.append(f"{path}: {node.name} has {lines} lines")
    assert large == []
    assert sorted(lengths)[len(lengths) * 95 // 100] <= MOST_MODULES


def test_imported_names_exist(modules: Any) -> None:
    """Also in functions and in slow tests, which no default test imports."""
    folders = ("weft", "testing", "tests", "bench", "training", "scripts")
    names = {path.with_suffix(""): _names_of(tree.body) for path, _, tree, _ in modules(*folders)}
    missing = []
    for path, _, _, nodes in modules(*folders):
        for node in nodes:
            if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
                continue
            place = Path(*node.module.split("."))
            defined = names.get(place, names.get(place / "__init__"))
            if defined is None or "__getattr__" in defined:
                continue  # of another package, or made on demand
            for alias in node.names:
                known = alias.name in defined or place / alias.name in names
                if not known and not (ROOT / place / alias.name).is_dir():
                    missing.append(f"{path}:{node.lineno}: {node.module} has no {alias.name}")
    assert missing == []


def _names_of(body: list[ast.stmt]) -> set[str]:
    """Return the names that statements of a module define, blocks included."""
    found = set[str]()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
            found |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        else:
            for field in ("body", "orelse", "finalbody"):
                found |= _names_of(getattr(node, field, []))
            for handler in getattr(node, "handlers", []):
                found |= _names_of(handler.body)
            if isinstance(node, ast.For):
                found |= {part.id for part in ast.walk(node.target) if isinstance(part, ast.Name)}
    return found


def test_folders_stay_small() -> None:
    """Modules directly inside a folder."""
    counts = {
        str(folder.relative_to(ROOT)): len(list(folder.glob("*.py")))
        for top in ("weft", "testing")
        for folder in (ROOT / top).rglob("*")
        if folder.is_dir()
    }
    assert {folder: count for folder, count in counts.items() if count > MOST_IN_A_FOLDER} == {}


def test_the_environment_is_read_in_one_place(modules: Any) -> None:
    places = []
    for path, _, _, nodes in modules("weft", "testing"):
        for node in nodes:
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                places.append(str(path))
    assert set(places) == {"weft/common/env.py"}


def test_every_variable_that_is_read_is_declared(modules: Any) -> None:
    read = set()
    for _, _, _, nodes in modules("weft"):
        for node in nodes:
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "get"
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "env"
            ):
                argument = node.args[0]
                assert isinstance(argument, ast.Constant)
                read.add(argument.value)
    assert read
    assert read <= env.VARIABLES.keys()


def test_every_test_file_holds_a_test() -> None:
    """A function, or the machine of a rule-based test."""
    empty = [
        str(path)
        for path, text in texts("tests")
        if path.name.startswith("test_") and not A_TEST.search(text)
    ]
    assert empty == []


def test_every_package_says_what_it_is(modules: Any) -> None:
    silent = []
    for path, _, tree, _ in modules("weft", "testing"):
        if not ast.get_docstring(tree) and path.name != "__main__.py":
            silent.append(str(path))
    assert silent == []
