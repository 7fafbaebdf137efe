"""Claims of the docs about code: statuses of errors, files and names, and examples that compare."""

from __future__ import annotations

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.docs.test_commands import PAGES, ROOT, commands, words
from weft.cli.main import cli
from weft.common import errors
from weft.common.errors import DeadlineExceeded, Overloaded, Unavailable, WeftError
from weft.config.flags import SETTINGS
from weft.control.fleet.open_sequences import LATE, NO_ROLE
from weft.front.http.streaming import late
from weft.front.messages import messages_errors as messages_errors
from weft.front.requests.models.several_models import NotLoaded
from weft.front.requests.reading import Reader
from weft.text.model import TextModel
from weft.text.submit import ModelLimits
from weft.types.grammar import Grammar

CLASSES = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
PACKAGES = r"(?:weft|tests|testing|training|bench|docs|scripts|examples|requirements)"
A_PATH = re.compile(rf"`({PACKAGES}/[\w.*/-]+)(?:::(\w+))?`")
A_PATH_WITH_BRACES = re.compile(rf"`({PACKAGES}/[\w.*/-]*\{{[\w,]+\}}[\w.*/-]*)`")
A_DOTTED_NAME = re.compile(r"``(weft(?:\.\w+)+)``")
ENTRY_POINTS = "weft.transports"
A_NAME_IN_A_FILE = re.compile(rf"`([\w.]+)`\s+(?:in|of|from)\s+`({PACKAGES}/[\w/.-]+\.\w+)`")
A_STATUS = re.compile(r"\b([45]\d\d) `([a-z_]+)`")


def pages() -> Iterator[tuple[str, str]]:
    """Yield (path, text) of each page of the docs, and of the pages at the root."""
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        yield str(page.relative_to(ROOT)), page.read_text(encoding="utf-8")


# -- statuses


@pytest.fixture(scope="module")
def statuses() -> dict[str, set[int]]:
    """The HTTP statuses of each error code: of classes, and of calls such as `Unavailable(.., code="x")`."""
    found: dict[str, set[int]] = defaultdict(set)
    for one in CLASSES.values():
        if issubclass(one, WeftError):
            found[one.code].add(one.http_status)
    for path in (ROOT / "weft").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "code=" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            made = CLASSES.get(node.func.id) if isinstance(node, ast.Call) and _named(node.func) else None
            for keyword in node.keywords if made is not None else ():
                if keyword.arg == "code" and isinstance(keyword.value, ast.Constant):
                    found[keyword.value.value].add(made.http_status)
    for status, kind in messages_errors._TYPES.items():
        found[kind].add(status)
    return found


def _named(function: ast.expr) -> bool:
    return isinstance(function, ast.Name)


def test_a_code_has_the_status_that_the_pages_say(statuses: dict[str, set[int]]) -> None:
    said = [(page, int(status), code) for page, text in pages() for status, code in A_STATUS.findall(text)]
    known = [one for one in said if one[2] in statuses]
    assert len(known) > 15
    assert [one for one in known if one[1] not in statuses[one[2]]] == []


def _of_a_late_grammar() -> WeftError:
    """Return the error of a request with a grammar that is not compiled in time."""
    folder = ROOT / "weft/checkpoints/spool-text"
    grammar: list[Grammar] = []

    class Late:
        """A compile that has reached its deadline."""

        def submit(self, one: Grammar, client: int) -> Late:
            grammar.append(one)
            return self

        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise DeadlineExceeded("late")

    limits = ModelLimits(vocab_size=1024, max_model_len=2048, end_ids=(2,))
    reader = Reader(TextModel.load(folder), ("m",), limits, 1 << 20)
    reader = reader.knowing({}, grammars=Late())  # type: ignore[arg-type]
    body = {"model": "m", "prompt": "a", "guided_regex": "[a-c]"}
    with pytest.raises(WeftError) as raised:
        reader.completions(json.dumps(body).encode())
    assert grammar
    return raised.value


FLAGS: dict[str, Callable[[], WeftError]] = {
    "grammar_compile_timeout": _of_a_late_grammar,
    "max_queued_requests": lambda: Overloaded("full"),
    "media_memory": lambda: Overloaded("full"),
    "model_timeout": lambda: NotLoaded("late", 1.0),
    "prefill_fallback": lambda: Unavailable(NO_ROLE),
    "rate_limit_requests": lambda: Overloaded("full"),
    "rate_limit_tokens": lambda: Overloaded("full"),
    "recovery_timeout": lambda: Unavailable(LATE),
    "request_timeout": late,
}
"""Flags with a status in their help, and the error of a request beyond the flag's limit."""


def test_flags_have_the_status_of_their_help() -> None:
    said = {}
    for name, setting in SETTINGS.items():
        if found := re.search(r"\bgets? ([45]\d\d)\b", setting.description):
            said[name] = int(found[1])
    assert said == {name: make().info().http_status for name, make in FLAGS.items()}


def test_pages_give_a_late_grammar_the_status_that_clients_get() -> None:
    error = _of_a_late_grammar().info()
    claim = f"{error.http_status} `{error.code}`"
    for page in ("docs/http.md", "docs/structured-output.md"):
        lines = [line for line in (ROOT / page).read_text().splitlines() if f"`{error.code}`" in line]
        assert lines, page
        assert all(claim in line for line in lines), (page, lines)


# -- files and names


def test_files_that_the_pages_name_exist() -> None:
    """A path may be a pattern. `path::name` is a test."""
    missing, count = [], 0
    for page, text in pages():
        if page.startswith("docs/adr/"):
            continue  # a decision may name files of its time
        for path, test in A_PATH.findall(text):
            count += 1
            root = ROOT / "tests" if page == "docs/faults-seen.md" else ROOT
            found = [*root.glob(path.rstrip("/")), *ROOT.glob(path.rstrip("/"))]
            if not found or (test and test not in found[0].read_text(encoding="utf-8")):
                missing.append((page, path, test))
    assert count > 500
    assert missing == []


def test_files_in_braces_exist() -> None:
    """`{a,b}` in a path stands for several files."""
    missing, count = [], 0
    for page, text in pages():
        for path in A_PATH_WITH_BRACES.findall(text):
            before, inside, behind = re.split(r"[{}]", path, maxsplit=2)
            for one in inside.split(","):
                count += 1
                if not list(ROOT.glob(f"{before}{one}{behind}".rstrip("/"))):
                    missing.append((page, f"{before}{one}{behind}"))
    assert count > 20
    assert missing == []


def test_the_map_has_every_package() -> None:
    """A reader who begins at the architecture page reaches each package."""
    shown = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    packages = [path.parent.name for path in (ROOT / "weft").glob("*/__init__.py")]
    assert len(packages) > 30
    assert [name for name in packages if f"`weft/{name}" not in shown] == []


def test_dotted_names_in_the_code_exist() -> None:
    """``weft.a.b.name``: the module exists, and has the name."""
    wrong, count = [], 0
    for file in (ROOT / "weft").rglob("*.py"):
        for name in A_DOTTED_NAME.findall(file.read_text(encoding="utf-8")):
            count += 1
            if name != ENTRY_POINTS and not _exists(name.split(".")):
                wrong.append((str(file.relative_to(ROOT)), name))
    assert count > 100
    assert wrong == []


def _exists(parts: list[str]) -> bool:
    """Return True if ``parts`` lead to a module or a package, or to a name in its text."""
    for depth in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:depth])
        module = place.with_suffix(".py") if not place.is_dir() else place / "__init__.py"
        if place.is_dir() or module.is_file():
            rest = parts[depth:]
            return not rest or re.search(rf"\b{rest[0]}\b", module.read_text(encoding="utf-8")) is not None
    return False


def test_names_stand_in_the_files_that_the_pages_name() -> None:
    wrong, count = [], 0
    for page, text in pages():
        for name, path in A_NAME_IN_A_FILE.findall(text):
            count += 1
            code = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).is_file() else ""
            if not all(re.search(rf"\b{re.escape(part)}\b", code) for part in name.split(".")):
                wrong.append((page, name, path))
    assert count > 5
    assert wrong == []


def test_the_steps_for_a_new_model_name_the_lists_to_extend() -> None:
    """Each registry of the page already has the family of the page's example."""
    text = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    begin = text.index("\n## Families with code")
    steps = text[begin : text.index("\n## ", begin + 1)]
    family = re.search(r"The example is `(\w+)`", steps)
    assert family is not None
    entry = re.compile(rf'^\s*"({family[1]}|{family[1].replace("_", "-")})"', re.MULTILINE)
    listed = re.findall(r"\b(?:in|of)\s+`([\w/.]+\.py)`", steps[steps.index("4. **Registry**") :])
    assert len(listed) >= 3
    for path in listed:
        assert entry.search((ROOT / path).read_text(encoding="utf-8")), path


# -- examples


def comparing() -> list[str]:
    """Return the commands of the pages that compare several runs of the simulator."""
    return sorted(
        {command for _, command in commands() if command.startswith("weft sim") and "--vs" in command}
    )


@pytest.mark.parametrize("command", comparing())
def test_runs_that_an_example_compares_differ(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    file = tmp_path / "runs.json"
    cli.main([*words(command), "--json", str(file)], standalone_mode=False)
    runs = json.loads(file.read_text())["runs"]
    found = [{name: value for name, value in run["report"].items() if name != "wall_seconds"} for run in runs]
    assert len({json.dumps(one, sort_keys=True) for one in found}) == len(runs) > 1


def test_every_row_of_faults_names_tests_that_exist() -> None:
    """A name without a file belongs to the file before. Names may end in a star."""
    text = (ROOT / "docs/faults-seen.md").read_text()
    current, count, missing = "", 0, []
    for file, name in re.findall(r"`([\w/]+\.py)?(?:::([\w*]+))?`", text):
        current = file.removeprefix("tests/") or current
        if not (file or name):
            continue
        count += 1
        path = ROOT / "tests" / current
        wanted = rf"def {name.replace('*', chr(92) + 'w*')}" if name else ""
        if not path.is_file() or not re.search(wanted, path.read_text()):
            missing.append((current, name))
    assert count > 90
    assert missing == []
