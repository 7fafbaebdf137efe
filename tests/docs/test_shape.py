"""The shape of the code: sizes, where the environment is read, and that every test file tests something."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from weft.common import env

ROOT = Path(__file__).parents[2]
MOST_MODULES, MAX_MODULE, MAX_FUNCTION = 400, 450, 60
"""Lines: of 95 of 100 modules, of every module, and of every function."""


def modules(*folders: str) -> Iterator[tuple[Path, str, ast.Module]]:
    for folder in folders:
        yield from _parsed(folder)


@functools.cache
def _parsed(folder: str) -> list[tuple[Path, str, ast.Module]]:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append((path.relative_to(ROOT), text, ast.parse(text)))
    return found


def _is_kernel(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("triton.jit" in ast.unparse(one) for one in function.decorator_list)


def test_modules_and_functions_stay_small() -> None:
    large, lengths = [], []
    for path, text, tree in modules("weft", "training", "bench"):
        lengths.append(text.count("\n"))
        if text.count("\n") > MAX_MODULE:
            large.append(f"{path}: {text.count(chr(10))} lines")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno
                if lines > MAX_FUNCTION and not _is_kernel(node):
                    large.append(f"{path}: {node.name} has {lines} lines")
    assert large == []
    assert sorted(lengths)[len(lengths) * 95 // 100] <= MOST_MODULES


def test_the_environment_is_read_in_one_place() -> None:
    places = []
    for path, _, tree in modules("weft"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
                places.append(str(path))
    assert set(places) == {"weft/common/env.py"}


def test_every_variable_that_is_read_is_declared() -> None:
    read = set()
    for _, _, tree in modules("weft"):
        for node in ast.walk(tree):
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
    empty = []
    for path, _, tree in modules("tests"):
        if path.name.startswith("test_"):
            names = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            machines = [
                t.id
                for n in tree.body
                if isinstance(n, ast.Assign)
                for t in n.targets
                if isinstance(t, ast.Name)
            ]
            if not any(name.startswith(("test_", "Test")) for name in names + machines):
                empty.append(str(path))
    assert empty == []


def test_every_package_says_what_it_is() -> None:
    silent = []
    for path, _, tree in modules("weft"):
        if not ast.get_docstring(tree) and path.name != "__main__.py":
            silent.append(str(path))
    assert silent == []
