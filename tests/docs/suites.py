"""Name the suites that run a test, from the source of the test alone.

A mark of a suite stands on a test, on its class, on its module, or on single cases of its parameters. The
cases are expressions, so ``Source.cases`` reads expressions: lists, comprehensions, ``pytest.param``, names
of the module and of modules that it imports, and the helpers of ``tests.support`` that mark cases.
``test_requirements.py`` compares the answers with the tests that pytest collects.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEFAULT, SLOW, GRID = "default", "slow", "grid"
ELSEWHERE = (GRID, "clients", "agents", "gpu")
SUITES = (DEFAULT, SLOW, *ELSEWHERE)
"""In the order of the page. ``default`` is the suite of a test without a mark of another suite."""

Marks = frozenset[str]
Cases = frozenset[Marks]
"""The different sets of suite marks that the cases of one expression have."""
PLAIN: Cases = frozenset([Marks()])
KEPT_AND_SLOW: Cases = frozenset([Marks(), Marks([SLOW])])

Test = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def suite_of(marks: Marks) -> str:
    """Return the suite that runs a case with ``marks``: a suite with a target of its own wins over ``slow``."""
    return next((suite for suite in (*ELSEWHERE, SLOW) if suite in marks), DEFAULT)


def product(parts: Iterable[Cases]) -> Cases:
    """Return the marks of all combinations of the cases of ``parts``."""
    combined = PLAIN
    for part in parts:
        combined = frozenset(left | right for left in combined for right in part)
    return combined


class Source:
    """One test module, parsed. Its methods answer questions about marks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.values: dict[str, ast.expr] = {}
        self.imported: dict[str, tuple[str, str]] = {}
        for node in self.tree.body:
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                for alias in node.names:
                    self.imported[alias.asname or alias.name] = (node.module, alias.name)
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.values[node.targets[0].id] = node.value
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.values[node.target.id] = node.value

    def suites(self, *nested: Test) -> set[str]:
        """Return the suites with at least one case of a test, given with the classes around the test."""
        parts = [self.cases(self.values["pytestmark"])] if "pytestmark" in self.values else []
        for node in nested:
            parts += [self.cases(decorator) for decorator in node.decorator_list]
        return {suite_of(marks) for marks in product(parts)}

    def cases(self, node: ast.expr | None) -> Cases:
        """Return the marks that the cases of an expression have, whatever kind of expression."""
        if isinstance(node, ast.Attribute):
            return frozenset([Marks([node.attr])]) if node.attr in SUITES else PLAIN
        if isinstance(node, ast.Name):
            return self._named(node.id)
        if isinstance(node, ast.Call):
            return self._called(node)
        return _union(self.cases(part) for part in _parts(node))

    def _named(self, name: str) -> Cases:
        if name in self.imported:
            module, original = self.imported[name]
            found = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            return source(found)._named(original) if found.is_file() else PLAIN
        value = self.values.pop(name, None)  # absent while it is read: a name may stand in its own value
        if value is None:
            return PLAIN
        try:
            return self.cases(value)
        finally:
            self.values[name] = value

    def _called(self, node: ast.Call) -> Cases:
        function = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        match function.rpartition(".")[2]:
            case "param":
                return self.marks(keywords.get("marks"))
            case "parametrize":
                return self.cases(node.args[1] if len(node.args) > 1 else keywords.get("argvalues"))
            case "mostly_slow":
                return frozenset(
                    mark for case in self.cases(node.args[1]) for mark in ([case] if case else KEPT_AND_SLOW)
                )
            case "sampled":
                slow = [Marks([SLOW])] if "slow" in keywords else []
                return frozenset([Marks(), *slow, Marks([GRID])])
            case "each_value" | "numbers_of":
                return KEPT_AND_SLOW
        return PLAIN

    def marks(self, node: ast.expr | None) -> Cases:
        """Return what ``marks=`` of one case may be: each branch of a condition is one possibility."""
        if isinstance(node, ast.List | ast.Tuple):
            return product(self.cases(element) for element in node.elts)
        return self.cases(node)


def _parts(node: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the parts of an expression that hold its cases."""
    match node:
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            yield from elements
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.ListComp(elt=element) | ast.GeneratorExp(elt=element) | ast.SetComp(elt=element):
            yield element
        case ast.Starred(value=value) | ast.Subscript(value=value):
            yield value


def _union(parts: Iterable[Cases]) -> Cases:
    return frozenset().union(*parts) or PLAIN


@functools.cache
def source(path: Path) -> Source:
    """Return the parsed module at ``path``. Each module is parsed once."""
    return Source(path)
