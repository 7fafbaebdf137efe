"""Name the suites that run a test, from the source of the test alone.

A mark of a suite stands on a test, on its class, on its module, or on single cases of its parameters. The
cases are expressions, so ``Source.cases`` reads expressions: lists, comprehensions, ``pytest.param``, names
of the module and of modules that it imports, and the helpers of ``tests.support`` that mark cases.
``test_requirements.py`` compares the answers with the tests that pytest collects.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Iterator
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

Function = ast.FunctionDef | ast.AsyncFunctionDef


def suite_of(marks: Marks) -> str:
    """Return the suite that runs a case with ``marks``: a suite with its own target wins over ``slow``."""
    return next((suite for suite in (*ELSEWHERE, SLOW) if suite in marks), DEFAULT)


class Source:
    """One module of the tests, parsed, with the names that the module defines or imports from other tests."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self.values: dict[str, ast.expr] = {}
        self.functions: dict[str, Function] = {}
        self.imported: dict[str, tuple[Path, str]] = {}
        for node in self.tree.body:
            self._define(node)

    def _define(self, node: ast.stmt) -> None:
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("tests."):
                path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
                self.imported |= {alias.asname or alias.name: (path, alias.name) for alias in names}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.values[name] = value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.values[name] = value
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value) if name in self.values:
                self.values[name] = ast.BinOp(left=self.values[name], op=op, right=value)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[node.name] = node

    def suites(self, test: Function | ast.ClassDef | None, outer: Iterable[ast.ClassDef] = ()) -> set[str]:
        """Return the suites with at least one case of ``test``, which stands in the classes ``outer``."""
        parts = [self.marks(self.values.get("pytestmark"))]
        for node in (*outer, test) if test else outer:
            parts += [self.cases(decorator) for decorator in node.decorator_list]
        if isinstance(test, Function):
            parts += self._fixtures(test)
        return {suite_of(marks) for marks in _product(parts)}

    def _fixtures(self, function: Function) -> Iterator[Cases]:
        """Yield the marks of the parameters of each fixture that ``function`` requests."""
        folders = (folder for folder in self.path.parents if folder.is_relative_to(ROOT / "tests"))
        conftests = (folder / "conftest.py" for folder in folders)
        places = [self, *(source(path) for path in conftests if path.is_file())]
        for argument in (*function.args.args, *function.args.kwonlyargs):
            # The nearest definition wins, as in pytest. A fixture may extend the fixture of the same name.
            for place in places:
                fixture = place.functions.get(argument.arg)
                if fixture and fixture is not function:
                    yield from (place.cases(decorator) for decorator in fixture.decorator_list)
                    yield from place._fixtures(fixture)
                    break

    def cases(self, node: ast.expr | None) -> Cases:
        """Return the marks that the cases in an expression have. Each element of a list is a case."""
        return self._read(node, Source.cases, _union)

    def marks(self, node: ast.expr | None) -> Cases:
        """Return the marks that one case may have by ``marks=``. A case has all marks in a list."""
        return self._read(node, Source.marks, _product)

    def _read(self, node: ast.expr | None, read: Reader, join: Callable[[Iterable[Cases]], Cases]) -> Cases:
        match node:
            case ast.Attribute(attr=suite) if suite in SUITES:
                return frozenset([Marks([suite])])
            case ast.Name(id=name):
                return self._named(name, read)
            case ast.Call():
                return self._called(node, read)
            case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
                return join(read(self, element) for element in elements)
            case ast.Dict(values=values):
                return _union(read(self, value) for value in values)
        return _union(read(self, part) for part in _branches(node))

    def _named(self, name: str, read: Reader) -> Cases:
        if name in self.imported:
            path, original = self.imported[name]
            return source(path)._named(original, read) if path.is_file() else PLAIN
        if name in self.functions:
            returned = (node for node in ast.walk(self.functions[name]) if isinstance(node, ast.Return))
            return _union(read(self, node.value) for node in returned)
        value = self.values.pop(name, None)  # absent while it is read: a value may contain its own name
        if value is None:
            return PLAIN
        try:
            return read(self, value)
        finally:
            self.values[name] = value

    def _called(self, node: ast.Call, read: Reader) -> Cases:
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        match ast.unparse(node.func).rpartition(".")[2]:
            case "param":
                return self.marks(keywords.get("marks"))
            case "parametrize":
                return self.cases(node.args[1])
            case "fixture":
                return self.cases(keywords.get("params"))
            case "mostly_slow":
                own = self.cases(node.args[1])
                return frozenset(mark for case in own for mark in ([case] if case else KEPT_AND_SLOW))
            case "sampled":
                slow = KEPT_AND_SLOW if "slow" in keywords else PLAIN
                return slow | {Marks([GRID])}
            case "seeds":
                default, slow, grid = map(ast.literal_eval, node.args)
                most = default if isinstance(default, int) else len(default)
                return (KEPT_AND_SLOW if most < slow else PLAIN) | ({Marks([GRID])} if slow < grid else set())
            case "each_value" | "numbers_of":
                return KEPT_AND_SLOW
            case "get":
                return _union(read(self, part) for part in (node.func.value, *node.args[1:]))  # type: ignore
        return self._named(node.func.id, read) if isinstance(node.func, ast.Name) else PLAIN


Reader = Callable[[Source, ast.expr | None], Cases]


def _branches(node: ast.expr | None) -> Iterator[ast.expr]:
    """Yield the parts of an expression of which each may give cases."""
    match node:
        case ast.BinOp(left=left, right=right):
            yield from (left, right)
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case (
            ast.ListComp(elt=one) | ast.GeneratorExp(elt=one) | ast.SetComp(elt=one) | ast.DictComp(value=one)
        ):
            yield one
        case ast.Starred(value=value) | ast.Subscript(value=value):
            yield value


def _union(parts: Iterable[Cases]) -> Cases:
    return frozenset[Marks]().union(*parts) or PLAIN


def _product(parts: Iterable[Cases]) -> Cases:
    """Return the marks of all combinations of the cases of ``parts``."""
    combined = PLAIN
    for part in parts:
        combined = frozenset(left | right for left in combined for right in part)
    return combined


@functools.cache
def source(path: Path) -> Source:
    """Return the parsed module at ``path``. Each module is parsed once."""
    return Source(path)
